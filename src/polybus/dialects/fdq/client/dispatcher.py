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

from polybus.dialects.fdq.client.batch_run import MAX_ROWS, BatchPiece, neighbours
from polybus.dialects.fdq.client.handler_run import MessagePiece, Rows

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shard import Shard
    from polybus.dialects.fdq.client.handler_run import Piece

PIECE_ROWS = 128  # room for more is told a piece at a time
ROW_BYTES = 200  # what a message costs here beside its body

Found = list[tuple["Shard", int, int]]  # with its first row, and how many it has
Dealt = dict[int, list["Piece"]]  # by executor


class Messages:
    """For handlers that get one message."""

    def __init__(self, executors: int) -> None:
        self._executors = executors

    def deal(self, batch: pa.RecordBatch, found: Found) -> tuple[Dealt, int, int]:
        """The pieces, and how many rows and bytes they have."""
        rows = Rows(batch)
        dealt: Dealt = defaultdict(list)
        count = 0
        for shard, start, some in found:
            wanted = _not_done(shard, rows, range(start, start + some))
            self._deal_shard(dealt, shard, rows, wanted)
            count += len(wanted)
        return dealt, count, sum(map(len, rows.bodies)) + count * ROW_BYTES

    def _deal_shard(self, dealt: Dealt, shard: Shard, rows: Rows, wanted: Sequence[int]) -> None:
        if self._executors == 1:
            dealt[0] += _cut(shard, rows, wanted)
            return
        lanes = lanes_of(rows, wanted, self._executors)
        for number in set(lanes):
            mine = list(compress(wanted, (lane == number for lane in lanes)))
            dealt[number] += _cut(shard, rows, mine)


class Batches:
    """For handlers that get many messages of a shard."""

    def __init__(self, executors: int, last_attempt: int) -> None:
        self._executors = executors
        self._last_attempt = last_attempt

    def deal(self, batch: pa.RecordBatch, found: Found) -> tuple[Dealt, int, int]:
        dealt: Dealt = defaultdict(list)
        for shard, start, some in found:
            pieces = self._pieces(shard, batch.slice(start, some))
            dealt[shard.number % self._executors] += pieces
        count = sum(piece.rows for pieces in dealt.values() for piece in pieces)
        return dealt, count, int(batch.nbytes)

    def _pieces(self, shard: Shard, batch: pa.RecordBatch) -> list[Piece]:
        offsets = batch.column("offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        if last - first + 1 == batch.num_rows and not shard.is_done(first, last + 1):
            return self._cut(shard, batch, first)
        places = {offset: at for at, offset in enumerate(offsets.to_pylist())}
        wanted = [offset for offset in places if not shard.is_done(offset)]
        return [
            piece
            for start, end in neighbours(wanted)
            for piece in self._cut(shard, batch.slice(places[start], end - start), start)
        ]

    def _cut(self, shard: Shard, batch: pa.RecordBatch, first: int) -> list[Piece]:
        return [
            BatchPiece(shard, batch.slice(at, MAX_ROWS), first + at, self._last_attempt)
            for at in range(0, batch.num_rows, MAX_ROWS)
        ]


def lanes_of(rows: Rows, wanted: Sequence[int], count: int) -> list[int]:
    """Whose each is: by the upper half of its key's hash (the lower chose the shard),
    without a key in turns."""
    keys, offsets = rows.keys, rows.offsets
    hashed = xxhash.xxh64_intdigest
    return [
        offsets[at] % count if (key := keys[at]) is None else (hashed(key.encode()) >> 32) % count
        for at in wanted
    ]


def _cut(shard: Shard, rows: Rows, wanted: Sequence[int]) -> list[Piece]:
    return [
        MessagePiece(shard, rows, wanted[at : at + PIECE_ROWS])
        for at in range(0, len(wanted), PIECE_ROWS)
    ]


def _not_done(shard: Shard, rows: Rows, places: range) -> Sequence[int]:
    offsets = rows.offsets
    if not shard.is_done(offsets[places[0]], offsets[places[-1]] + 1):
        return places
    return [at for at in places if not shard.is_done(offsets[at])]
