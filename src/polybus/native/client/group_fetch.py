"""`group.fetch`: what has changed, in JSON, and rows, as Arrow IPC; one of both or pairs of them.

A Result that is an object begins with a brace. If it says that there are rows, these are
in the next one; rows that come alone are of the shards that were asked for.
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
FEW_ROWS = 64  # up to here a list is quicker than a function of Arrow
SCHEMA = READ_SCHEMA.serialize()
Answer = dict[str, Any]
FetchPart = tuple[Answer | None, pa.RecordBatch | None]


def fetch(
    connection: FlightConnection, request: dict[str, Any]
) -> tuple[Answer, list[pa.RecordBatch]]:
    """Tried again while no bus answers: a fetch changes nothing."""
    return connection.retry(lambda: _first(connection, request))


def follow(connection: FlightConnection, request: dict[str, Any]) -> Iterator[FetchPart]:
    """What there is, as it comes. The batches refer to what was received."""
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
            raise PeerError(f"{connection.url} has given no answer to {FETCH}") from None
        answer = None
        yield told


def _rows(raw: pa.Buffer) -> pa.RecordBatch:
    """A stream of one batch. Its schema is nearly always the one known, and not read again."""
    if raw[: SCHEMA.size].equals(SCHEMA):
        return pa.ipc.read_record_batch(raw[SCHEMA.size :], READ_SCHEMA)
    return pa.ipc.open_stream(raw).read_next_batch()


def _first(
    connection: FlightConnection, request: dict[str, Any]
) -> tuple[Answer, list[pa.RecordBatch]]:
    answer, rows = next(follow(connection, request), (None, None))
    if answer is None:
        raise PeerError(f"{connection.url} has given no answer to {FETCH}")
    return answer, split_by_shard(answer, rows)


def split_by_shard(answer: Answer, rows: pa.RecordBatch | None) -> list[pa.RecordBatch]:
    """The rows of each place, in order."""
    found = (
        [] if rows is None else [rows.slice(start, count) for _, start, count in shard_runs(rows)]
    )
    if len(found) != len(answer["rows"]):
        raise PeerError("the bus has given rows of another number of shards than it said")
    return found


def shard_runs(rows: pa.RecordBatch) -> Iterator[tuple[int, int, int]]:
    """Shard, first row and number of rows of each: they come one shard after the other."""
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
