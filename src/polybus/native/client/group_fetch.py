"""`group.fetch`: changes of the assignment as JSON and rows as Arrow IPC, alone or in pairs.

A result that is an object begins with a brace. If it lists rows, the next result contains
them; rows without an object belong to the shards of the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import PeerError
from polybus.model.arrow import READ_SCHEMA

FETCH = "group.fetch"
OBJECT = b"{"
FEW_ROWS = 64  # up to here a Python list is faster than Arrow's compute function
SCHEMA = READ_SCHEMA.serialize()
Answer = dict[str, Any]
FetchPart = tuple[Answer | None, pa.RecordBatch | None]


def decode_fetch(results: Iterable[pa.Buffer], url: str) -> Iterator[FetchPart]:
    """Yield objects and rows as they arrive. The batches refer to the received buffers."""
    answer: Answer | None = None
    for raw in results:
        try:
            if answer is None and raw[:1].to_pybytes() == OBJECT:
                answer = json.loads(raw.to_pybytes())
                if answer["rows"]:
                    continue
                part: FetchPart = answer, None
            else:
                part = answer, _rows(raw)
        except (KeyError, ValueError, TypeError, StopIteration, pa.ArrowException):
            raise PeerError(f"{url} returned no valid answer to {FETCH}") from None
        answer = None
        yield part


def _rows(raw: pa.Buffer) -> pa.RecordBatch:
    """Decode a stream of one batch; skip its schema if it is the expected one."""
    if raw[: SCHEMA.size].equals(SCHEMA):
        return pa.ipc.read_record_batch(raw[SCHEMA.size :], READ_SCHEMA)
    return pa.ipc.open_stream(raw).read_next_batch()


def split_by_shard(answer: Answer, rows: pa.RecordBatch | None) -> list[pa.RecordBatch]:
    """Return the rows of each entry of "rows", in order."""
    batches = []
    if rows is not None:
        batches = [rows.slice(start, count) for _, start, count in shard_runs(rows)]
    if len(batches) != len(answer["rows"]):
        raise PeerError("group.fetch: the rows do not match the listed shards")
    return batches


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
