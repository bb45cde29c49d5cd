"""`group.fetch`: changes of the assignment as JSON and rows as Arrow IPC, alone or in pairs.

A result that is an object begins with a brace. If it lists rows, the next result contains
them; rows without an object belong to the shards of the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import PeerError
from polybus.model.arrow import READ_SCHEMA

if TYPE_CHECKING:
    from polybus.native.client.flight_connection import FlightConnection

FETCH = "group.fetch"
OBJECT = b"{"
FEW_ROWS = 64  # up to here a Python list is faster than Arrow's compute function
SCHEMA = READ_SCHEMA.serialize()
Answer = dict[str, Any]
FetchPart = tuple[Answer | None, pa.RecordBatch | None]


def fetch(
    connection: FlightConnection, request: dict[str, Any]
) -> tuple[Answer, list[pa.RecordBatch]]:
    """Fetch once. Retries while the bus is unreachable, because a fetch changes nothing."""
    return connection.retry(lambda: _first(connection, request))


def follow(connection: FlightConnection, request: dict[str, Any]) -> Iterator[FetchPart]:
    """Yield objects and rows as they arrive. The batches refer to the received buffers."""
    given = {key: value for key, value in request.items() if value is not None}
    answer: Answer | None = None
    for raw in connection.stream(FETCH, given):
        try:
            if answer is None and raw[:1].to_pybytes() == OBJECT:
                answer = json.loads(raw.to_pybytes())
                if answer["rows"]:
                    continue
                told: FetchPart = answer, None
            else:
                told = answer, _rows(raw)
        except (KeyError, ValueError, TypeError, StopIteration, pa.ArrowException):
            raise PeerError(f"{connection.url} returned no valid answer to {FETCH}") from None
        answer = None
        yield told


def _rows(raw: pa.Buffer) -> pa.RecordBatch:
    """Decode a stream of one batch; skip its schema if it is the expected one."""
    if raw[: SCHEMA.size].equals(SCHEMA):
        return pa.ipc.read_record_batch(raw[SCHEMA.size :], READ_SCHEMA)
    return pa.ipc.open_stream(raw).read_next_batch()


def _first(
    connection: FlightConnection, request: dict[str, Any]
) -> tuple[Answer, list[pa.RecordBatch]]:
    answer, rows = next(follow(connection, request), (None, None))
    if answer is None:
        raise PeerError(f"{connection.url} returned no valid answer to {FETCH}")
    return answer, split_by_shard(answer, rows)


def split_by_shard(answer: Answer, rows: pa.RecordBatch | None) -> list[pa.RecordBatch]:
    """Return the rows of each entry of "rows", in order."""
    found = (
        [] if rows is None else [rows.slice(start, count) for _, start, count in shard_runs(rows)]
    )
    if len(found) != len(answer["rows"]):
        raise PeerError("group.fetch: the rows do not match the listed shards")
    return found


def shard_runs(rows: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
    """Yield shard, first row and number of rows; rows of a shard are contiguous."""
    shards, start = rows.column("shard"), 0
    if len(shards) <= FEW_ROWS:
        for shard, same in groupby(shards.to_pylist()):
            count = len(list(same))
            yield shard, start, count
            start += count
        return
    runs = pc.run_end_encode(shards)
    for shard, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield shard, start, end - start
        start = end
