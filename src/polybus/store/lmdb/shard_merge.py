"""The merge of all shards of a topic by id, and the positions where recent merges ended.

A merge needs the first message of every shard at or after an id. Searching one takes several
lookups in LMDB, so the end of each merge is remembered: the next page, which begins there,
opens only the shards whose messages it returns.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Final

from polybus.errors import StoreFault
from polybus.model import run_table
from polybus.store.lmdb.entry_cursor import EntryCursor

if TYPE_CHECKING:
    from polybus.model.block import BlockSlice
    from polybus.store.lmdb.read_txn import ReadTxn, RowCollector

# Shard positions that are kept, of some 150 bytes each: 500 readers of topics with 128 shards.
MAX_KEPT: Final = 1 << 16


# First id, shard, offset: the messages of the shard go on at the offset, and none from there on
# has an id below the first id. Ids only rise along a shard and messages only disappear from its
# start, so this stays true after every later commit and trim.
ShardPosition = tuple[int, int, int]


class MergePositions:
    """The positions of all shards where recent merges ended, by topic and id."""

    def __init__(self) -> None:
        self._positions: OrderedDict[tuple[int, int], Sequence[ShardPosition]] = OrderedDict()
        self._kept = 0
        self._lock = Lock()

    def get(self, topic: int, from_id: int) -> Sequence[ShardPosition] | None:
        with self._lock:
            positions = self._positions.get((topic, from_id))
            if positions is not None:
                # Kept after its use: other readers of the topic may be at the same id.
                self._positions.move_to_end((topic, from_id))
            return positions

    def put(self, topic: int, from_id: int, positions: Sequence[ShardPosition]) -> None:
        with self._lock:
            replaced = self._positions.pop((topic, from_id), ())
            self._positions[topic, from_id] = positions
            self._kept += len(positions) - len(replaced)
            while self._kept > MAX_KEPT and len(self._positions) > 1:
                _, dropped = self._positions.popitem(last=False)
                self._kept -= len(dropped)


# A shard position and a cursor at the entry of the offset, None if the shard was not opened yet.
# A shard occurs once, so cursors are never compared.
_Head = tuple[int, int, int, EntryCursor | None]


class ShardMerge:
    """Collects the messages of all shards in the order of their ids."""

    def __init__(self, txn: ReadTxn, heads: Sequence[_Head]) -> None:
        self._txn = txn
        self._heads = list(heads)
        heapq.heapify(self._heads)
        self._ended: list[ShardPosition] = []
        self.fault: StoreFault | None = None  # at which the merge had to stop

    def collect(self, collector: RowCollector, below_id: int) -> int:
        """Collect until there is enough. Returns the id below which no message was left out."""
        heads = self._heads
        while heads and heads[0][0] < below_id and not collector.has_enough_below(heads[0][0]):
            first_id, shard, offset, cursor = heapq.heappop(heads)
            try:
                if cursor is None:
                    self._open(shard, offset)
                    continue
                entry = cursor.entry
                assert entry is not None
                offset = collector.collect(cursor, offset, entry.end)
                # If the next entry cannot be read, the merge must stop right after the
                # messages that were collected.
                first_id = run_table.id_at(entry.runs, offset - 1 - entry.first) + 1
                if offset == entry.end:
                    entry = cursor.next()
            except StoreFault as error:
                # Return the messages before the damage. The next read starts at it and raises.
                self.fault = error
                heapq.heappush(heads, (first_id, shard, offset, None))
                break
            if entry is None:
                self._ended.append((self._txn.next_id, shard, offset))
            else:
                offset = max(offset, entry.first)
                first_id = run_table.id_at(entry.runs, offset - entry.first)
                heapq.heappush(heads, (first_id, shard, offset, cursor))
        # Later ids of the collected entries must wait: uncollected messages come before them.
        return min(below_id, heads[0][0]) if heads else below_id

    def positions_after(self, last_id: int, pieces: Sequence[BlockSlice]) -> list[ShardPosition]:
        """Return where each shard goes on after a message, of all that were collected."""
        positions = {head[1]: head[:3] for head in self._heads}
        positions |= {ended[1]: ended for ended in self._ended}
        returned = set()  # shards whose pieces from here to the front are not needed again
        for piece in reversed(pieces):
            if piece.shard in returned:
                continue
            runs = bytes(piece.runs)
            place = max(piece.start, run_table.place_of_id(runs, last_id + 1))
            if place < piece.end:
                offset = piece.first_offset + place
                positions[piece.shard] = run_table.id_at(runs, place), piece.shard, offset
            if place > piece.start:
                returned.add(piece.shard)
        return list(positions.values())

    def _open(self, shard: int, offset: int) -> None:
        """Move a cursor to the first message of a shard from an offset on."""
        start, end, _ = self._txn.shard_state(shard)
        reached = max(offset, start)
        # Most shards have nothing new when a reader at the end reads on, so no cursor is opened.
        cursor = self._txn.cursor(shard) if reached < end else None
        entry = cursor.seek(reached) if cursor is not None else None
        if entry is None:
            self._ended.append((self._txn.next_id, shard, offset))
            return
        reached = max(reached, entry.first)
        first_id = run_table.id_at(entry.runs, reached - entry.first)
        heapq.heappush(self._heads, (first_id, shard, reached, cursor))
