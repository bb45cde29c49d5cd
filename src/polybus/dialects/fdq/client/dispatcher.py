"""Which executor gets what of a fetch: messages by their key, batches by their shard.

What is done once for a fetch costs nothing beside its messages, so the rows of all shards
become lists together, and an executor's lock is taken once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

import xxhash

from polybus.dialects.fdq.client.batch_run import MAX_ROWS, QueuedBatches, split_consecutive
from polybus.dialects.fdq.client.handler_run import FetchedRows, QueuedMessages

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shard import AssignedShard
    from polybus.dialects.fdq.client.handler_run import QueuedRows

PIECE_ROWS = 128  # room for more is told a piece at a time
ROW_BYTES = 200  # what a message costs here beside its body

ShardSlices = list[tuple["AssignedShard", int, int]]  # with its first row, and how many it has
RowsByExecutor = dict[int, list["QueuedRows"]]  # by executor


class MessageDispatcher:
    """For handlers that get one message."""

    def __init__(self, executors: int) -> None:
        self._executors = executors

    def dispatch(
        self, batch: pa.RecordBatch, found: ShardSlices
    ) -> tuple[RowsByExecutor, int, int]:
        """The pieces, and how many rows and bytes they have."""
        rows = FetchedRows(batch)
        dealt: RowsByExecutor = defaultdict(list)
        count = 0
        for shard, start, some in found:
            wanted = _select_pending(shard, rows, range(start, start + some))
            self._dispatch_shard(dealt, shard, rows, wanted)
            count += len(wanted)
        return dealt, count, sum(map(len, rows.bodies)) + count * ROW_BYTES

    def _dispatch_shard(
        self, dealt: RowsByExecutor, shard: AssignedShard, rows: FetchedRows, wanted: Sequence[int]
    ) -> None:
        if self._executors == 1:
            dealt[0] += _cut(shard, rows, wanted)
            return
        lanes = choose_executors(rows, wanted, self._executors)
        for number in set(lanes):
            mine = list(compress(wanted, (lane == number for lane in lanes)))
            dealt[number] += _cut(shard, rows, mine)


class BatchDispatcher:
    """For handlers that get many messages of a shard."""

    def __init__(self, executors: int, last_attempt: int) -> None:
        self._executors = executors
        self._last_attempt = last_attempt

    def dispatch(
        self, batch: pa.RecordBatch, found: ShardSlices
    ) -> tuple[RowsByExecutor, int, int]:
        dealt: RowsByExecutor = defaultdict(list)
        for shard, start, some in found:
            pieces = self._pieces(shard, batch.slice(start, some))
            dealt[shard.number % self._executors] += pieces
        count = sum(piece.rows for pieces in dealt.values() for piece in pieces)
        return dealt, count, int(batch.nbytes)

    def _pieces(self, shard: AssignedShard, batch: pa.RecordBatch) -> list[QueuedRows]:
        offsets = batch.column("offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        if last - first + 1 == batch.num_rows and not shard.is_done(first, last + 1):
            return self._cut(shard, batch, first)
        places = {offset: at for at, offset in enumerate(offsets.to_pylist())}
        wanted = [offset for offset in places if not shard.is_done(offset)]
        return [
            piece
            for start, end in split_consecutive(wanted)
            for piece in self._cut(shard, batch.slice(places[start], end - start), start)
        ]

    def _cut(self, shard: AssignedShard, batch: pa.RecordBatch, first: int) -> list[QueuedRows]:
        return [
            QueuedBatches(shard, batch.slice(at, MAX_ROWS), first + at, self._last_attempt)
            for at in range(0, batch.num_rows, MAX_ROWS)
        ]


def choose_executors(rows: FetchedRows, wanted: Sequence[int], count: int) -> list[int]:
    """Whose each is: by the upper half of its key's hash (the lower chose the shard),
    without a key in turns."""
    keys, offsets = rows.keys, rows.offsets
    hashed = xxhash.xxh64_intdigest
    return [
        offsets[at] % count if (key := keys[at]) is None else (hashed(key.encode()) >> 32) % count
        for at in wanted
    ]


def _cut(shard: AssignedShard, rows: FetchedRows, wanted: Sequence[int]) -> list[QueuedRows]:
    return [
        QueuedMessages(shard, rows, wanted[at : at + PIECE_ROWS])
        for at in range(0, len(wanted), PIECE_ROWS)
    ]


def _select_pending(shard: AssignedShard, rows: FetchedRows, places: range) -> Sequence[int]:
    offsets = rows.offsets
    if not shard.is_done(offsets[places[0]], offsets[places[-1]] + 1):
        return places
    return [at for at in places if not shard.is_done(offsets[at])]
