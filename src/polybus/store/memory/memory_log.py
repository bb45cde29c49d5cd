"""A topic in memory: per shard a list of blocks with their offsets and run tables.

Offsets of a shard are dense: a block of 3 messages at offset 7 is followed by a block at
offset 10. Trimming drops the blocks before the new start; of a block that contains the new
start, reads skip the first messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from polybus.kernel.blocks import Layout
from polybus.model import run_table
from polybus.model.block import Block, BlockSlice
from polybus.model.topic import Bounds, ShardBounds, Topic
from polybus.store.contract import Excess


class MemoryEntry(NamedTuple):
    """A block and the offset of its first message."""

    first_offset: int
    layout: Layout
    table: bytes


def _end(entry: MemoryEntry) -> int:
    return entry.first_offset + entry.layout.count


def _last_time(entry: MemoryEntry) -> int:
    return run_table.time_at(entry.table, entry.layout.count - 1)


def _last_id(entry: MemoryEntry) -> int:
    return run_table.id_at(entry.table, entry.layout.count - 1)


@dataclass(slots=True)
class MemoryShard:
    number: int
    start: int
    end: int
    size_bytes: int = 0
    entries: list[MemoryEntry] = field(default_factory=list)

    def append(self, block: Block, first_id: int, timestamp_ns: int) -> None:
        table = run_table.make_table(first_id, timestamp_ns, block.count)
        self.entries.append(MemoryEntry(self.end, block.layout(), table))
        self.end += block.count
        self.size_bytes += block.size_bytes

    def trim(self, before: int) -> None:
        self.start = max(self.start, min(before, self.end))
        # Only whole blocks are removed; reads skip the first messages of the block at the start.
        gone = bisect_right(self.entries, self.start, key=_end)
        self.size_bytes -= sum(entry.layout.size_bytes for entry in self.entries[:gone])
        del self.entries[:gone]

    def offset_of_time(self, timestamp_ns: int) -> int:
        """Return the first offset with this time or a later one, the end if there is none."""
        at = bisect_left(self.entries, timestamp_ns, key=_last_time)
        if at == len(self.entries):
            return self.end
        entry = self.entries[at]
        place = run_table.place_of_time(entry.table, timestamp_ns)
        return max(self.start, entry.first_offset + place)

    def offset_of_id(self, wanted: int) -> int:
        """Return the first offset with this id or a higher one, the end if there is none."""
        at = bisect_left(self.entries, wanted, key=_last_id)
        if at == len(self.entries):
            return self.end
        entry = self.entries[at]
        return max(self.start, entry.first_offset + run_table.place_of_id(entry.table, wanted))

    def id_of_offset(self, offset: int) -> int | None:
        """Return the id of the message at an offset, None at the end."""
        for entry in self._entries_from(offset):
            return run_table.id_at(entry.table, offset - entry.first_offset)
        return None

    def pieces(self, start: int, end: int, max_rows: int) -> Iterator[BlockSlice]:
        """Yield slices of blocks with offsets from `start` to `end`, up to `max_rows`."""
        end = min(end, self.end, start + max_rows)
        for entry in self._entries_from(start):
            first = entry.first_offset
            if first >= end:
                return
            places = max(start, first) - first, min(end, _end(entry)) - first
            yield BlockSlice(entry.layout, entry.table, first, self.number, *places)

    def bounds(self) -> ShardBounds:
        return ShardBounds(self.start, self.end, self.size_bytes)

    def _entries_from(self, offset: int) -> Iterator[MemoryEntry]:
        at = bisect_right(self.entries, offset, key=_end)
        for index in range(at, len(self.entries)):
            yield self.entries[index]


@dataclass(slots=True)
class MemoryLog:
    topic: Topic
    shards: list[MemoryShard]
    next_id: int = 1
    timestamp_ns: int = 0

    def append(self, shard: int, block: Block, timestamp_ns: int) -> None:
        self.shards[shard].append(block, self.next_id, timestamp_ns)
        self.next_id += block.count
        self.timestamp_ns = timestamp_ns

    def bounds(self) -> Bounds:
        firsts = (shard.id_of_offset(shard.start) for shard in self.shards)
        first_id = min((first for first in firsts if first is not None), default=self.next_id)
        shards = tuple(shard.bounds() for shard in self.shards)
        return Bounds(first_id, self.next_id, self.timestamp_ns, shards)

    def find_excess(self, keep_bytes: int) -> Excess:
        """Return the end of the oldest blocks, by shard, without which `keep_bytes` are left."""
        excess = sum(shard.size_bytes for shard in self.shards) - keep_bytes
        entries = [(shard, entry) for shard in self.shards for entry in shard.entries]
        cuts: dict[int, int] = {}
        for shard, entry in sorted(entries, key=lambda pair: _last_id(pair[1])):
            excess -= entry.layout.size_bytes
            if excess < 0:
                break
            cuts[shard.number] = _end(entry)
        return Excess(cuts, False)

    def id_of_time(self, timestamp_ns: int) -> int:
        """Return the first id with this time or a later one, the next id if there is none."""
        ids = (shard.id_of_offset(shard.offset_of_time(timestamp_ns)) for shard in self.shards)
        return min((first for first in ids if first is not None), default=self.next_id)
