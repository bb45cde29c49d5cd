"""What was written last, as it was written: who follows a topic reads it from here.

A follower wants what was committed a moment ago. To find that in LMDB takes a transaction,
a cursor and a search for each shard; here it is at hand. Kept are small entries, of each
shard the last few that follow each other, until they are too many in all. A topic of which
more has changed than that messages were added is forgotten: it is read from LMDB then.

The writer's thread notes, any thread reads. What stands for a shard is replaced as a whole,
so whoever reads needs no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.kernel.blocks import Layout
from polybus.model.block import open_layout
from polybus.model.rows import EMPTY, Rows
from polybus.store.lmdb import log_entry
from polybus.store.lmdb.read_txn import RowCollector

if TYPE_CHECKING:
    from polybus.store.contract import ShardRange
    from polybus.store.lmdb.write_batch import Target, WriteBatch

MAX_ENTRIES: Final = 8  # of a shard: who is further behind than some commits reads more at once
MAX_ENTRY_BYTES: Final = 16 << 10
MAX_BYTES: Final = 16 << 20  # of all shards; then it begins anew


class RecentEntry(NamedTuple):
    """An entry of the log, with its place: a place in a shard that can be harvested."""

    shard: int
    first: int
    end: int
    value: bytes

    @property
    def entry(self) -> RecentEntry:
        return self

    def blocks(self, start: int) -> Iterator[tuple[Layout, bytes, int]]:
        """As a walk gives them. What was never out of memory is not compared with its sum."""
        entry = log_entry.decode(self.value)
        block = entry.block(memoryview(self.value))
        yield open_layout(block, checksum=False), entry.runs, self.first


class RecentEntries:
    def __init__(self) -> None:
        self._shards: dict[Target, tuple[RecentEntry, ...]] = {}
        self._bytes = 0

    def add_batch(self, batch: WriteBatch) -> None:
        """It is written, and nobody has been told yet."""
        for topic in batch.altered:
            self._forget(topic)
        for target, first, count, value in batch.written:
            if target[0] in batch.altered:
                continue  # in which order things were done in a batch is not known here
            if len(value) > MAX_ENTRY_BYTES or not isinstance(value, bytes):
                self._shards.pop(target, None)
                continue
            self._bytes += len(value)
            if self._bytes > MAX_BYTES:
                self._shards, self._bytes = {}, len(value)
            before = self._shards.get(target, ())
            if before and before[-1].end != first:
                before = ()
            one = RecentEntry(target[1], first, first + count, value)
            self._shards[target] = (*before[1 - MAX_ENTRIES :], one)

    def read(self, topic: int, parts: Sequence[ShardRange], max_rows: int, max_bytes: int) -> Rows:
        """As the store reads parts; nothing if one of them begins outside of what is kept."""
        found = []
        for part in parts:
            kept = self._shards.get((topic, part.shard))
            if kept is None or not kept[0].first <= part.start < kept[-1].end:
                return EMPTY
            found.append((part, kept))
        with closing(RowCollector(max_rows, max_bytes, by_piece=True)) as collector:
            for at, (part, kept) in enumerate(found):
                if not collector.is_full:
                    collector.begin_part(part.max_rows, len(parts) - at)
                    _take(collector, part, kept)
            return collector.rows("")

    def _forget(self, topic: int) -> None:
        for target in [target for target in self._shards if target[0] == topic]:
            del self._shards[target]


def _take(collector: RowCollector, part: ShardRange, kept: Sequence[RecentEntry]) -> None:
    for one in kept:
        if one.end > part.start and one.first < part.end:
            collector.collect(one, part.start, part.end)
            if collector.has_enough:
                return
