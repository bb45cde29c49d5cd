"""A cache of the entries that were written last, for readers at the tail of a topic.

A tail reader asks for messages that were committed a moment ago. Finding them in LMDB takes
a transaction, a cursor and a search per shard. The cache holds small entries: per shard the
last few that are consecutive, up to a total size. A topic that was changed otherwise than
by appends is dropped from the cache and read from LMDB.

The writer thread adds and any thread reads. The tuple of a shard is replaced as a whole, so
readers need no lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final, NamedTuple

from polybus.kernel.blocks import Layout
from polybus.model.block import open_layout
from polybus.model.rows import EMPTY, Rows
from polybus.store.contract import ShardRange
from polybus.store.lmdb import log_entry
from polybus.store.lmdb.read_txn import RowCollector
from polybus.store.lmdb.write_batch import Target, WriteBatch

MAX_ENTRIES: Final = 8  # per shard: a reader that lags further behind reads larger pieces anyway
MAX_ENTRY_BYTES: Final = 16 << 10
MAX_BYTES: Final = 16 << 20  # of all shards; beyond it the cache is emptied


class RecentEntry(NamedTuple):
    """An entry of the log and its position, as `RowCollector.collect` needs it."""

    shard: int
    first: int
    end: int
    value: bytes

    @property
    def entry(self) -> RecentEntry:
        return self

    def blocks(self, start: int) -> Iterator[tuple[Layout, bytes, int]]:
        """Yield the block. The checksum is not compared: the bytes never left memory."""
        entry = log_entry.decode(self.value)
        block = entry.block(memoryview(self.value))
        yield open_layout(block, checksum=False), entry.runs, self.first


class RecentEntries:
    def __init__(self) -> None:
        self._shards: dict[Target, tuple[RecentEntry, ...]] = {}
        self._bytes = 0

    def add_batch(self, batch: WriteBatch) -> None:
        """Add a batch that was written, before any future of it resolves."""
        # After a trim, a drop or a new generation, the cached entries may be invisible.
        for topic in batch.altered:
            for target in [target for target in self._shards if target[0] == topic]:
                del self._shards[target]
        for target, first, count, value in batch.written:
            if target[0] in batch.altered:
                continue  # the order of appends and other changes in a batch is unknown here
            # Large, or a view, which would keep the buffer of its producer in memory.
            if len(value) > MAX_ENTRY_BYTES or not isinstance(value, bytes):
                self._shards.pop(target, None)
                continue
            # Entries that leave a tuple are not subtracted: the sum only bounds the memory.
            self._bytes += len(value)
            if self._bytes > MAX_BYTES:
                self._shards, self._bytes = {}, len(value)
            before = self._shards.get(target, ())
            # A gap, for example by a published stage: only consecutive entries may stay.
            if before and before[-1].end != first:
                before = ()
            entry = RecentEntry(target[1], first, first + count, value)
            self._shards[target] = (*before[1 - MAX_ENTRIES :], entry)

    def read(self, topic: int, parts: Sequence[ShardRange], max_rows: int, max_bytes: int) -> Rows:
        """Read parts as the store does. Returns no rows if a part starts outside of the cache."""
        found = []
        for part in parts:
            kept = self._shards.get((topic, part.shard))
            # All parts must be served from here: mixing with LMDB could skip messages.
            if kept is None or not kept[0].first <= part.start < kept[-1].end:
                return EMPTY
            found.append((part, kept))
        with closing(RowCollector(max_rows, max_bytes, by_piece=True)) as collector:
            for at, (part, kept) in enumerate(found):
                if collector.is_full:
                    break
                collector.begin_part(part.max_rows, len(parts) - at)
                for entry in kept:
                    if entry.end > part.start and entry.first < part.end:
                        collector.collect(entry, part.start, part.end)
                        if collector.has_enough:
                            break
            return collector.rows("")
