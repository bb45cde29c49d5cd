"""Walking a shard's log: seeking by offset, id or time, and opening what stands there.

Ids and times grow with the offset within a shard, so both are found by halving the
range of offsets. Every entry that is looked at is verified, also on the way, and every
block before it is used; a fault says topic, shard and offset. A range that has no entry
(only a salvaged store has one) is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polybus.errors import Damaged, WrongFormat
from polybus.kernel.blocks import Layout
from polybus.model import runs
from polybus.model.block import open_layout
from polybus.store.lmdb import entries, keys, sabotage
from polybus.store.lmdb.entries import Entry
from polybus.store.lmdb.environment import Transaction


class Walk:
    """A place in the log of one shard, within one transaction."""

    def __init__(self, transaction: Transaction, topic: int, shard: int, name: str) -> None:
        self._transaction = transaction
        self._cursor = transaction.cursor()
        self._prefix = keys.log_of_shard(topic, shard)
        self.topic = topic
        self.shard = shard
        self._name = name
        self.entry: Entry | None = None  # None: behind the last one

    def seek(self, offset: int) -> Entry | None:
        """To the entry that holds the offset, or the first one behind it."""
        key = keys.log(self.topic, self.shard, offset)
        found = self._cursor.set_range(key)
        if not (found and self._cursor.key() == key):
            moved = self._cursor.prev() if found else self._cursor.last()
            before = self._here() if moved else None
            if before is not None and before.end > offset:
                return before
            self._cursor.set_range(key)
        return self._here()

    def next(self) -> Entry | None:
        self._cursor.next()
        return self._here()

    def seek_last(self, start: int, end: int, before: Callable[[int, int], bool]) -> Entry | None:
        """To the last entry in a range of offsets whose first id and time are `before`.

        To the range's first entry if none is.
        """
        low, high, best = start, end, start
        middle = end - 1  # who follows a topic is at its end
        while low < high:
            entry = self.seek(middle)
            if entry is None or entry.first >= high:
                high = middle  # nothing stands between
            elif before(*runs.entries(entry.runs[:24])[0][:2]):
                best, low = entry.first, entry.end
            else:
                high = entry.first
            middle = (low + high) // 2
        return self.seek(max(best, start))

    def value(self) -> memoryview:
        found: memoryview = self._cursor.value()
        return found

    def blocks(self, start: int) -> Iterator[tuple[Layout, bytes, int]]:
        """Blocks of this entry from a place in it on: each with its runs and first offset."""
        entry = self.entry
        assert entry is not None
        with self.naming(entry.first + start):
            if entry.kind == entries.BLOCK:
                yield _open(self.value()[entry.block_at :], entry.count), entry.runs, entry.first
            else:
                yield from self._extent(entry, start)

    def _extent(self, entry: Entry, start: int) -> Iterator[tuple[Layout, bytes, int]]:
        place = 0  # of the part's first message in the extent
        for part in entry.parts:
            if place + part.count > start:
                for staged, value in self._staged(part.stage, max(0, start - place)):
                    first = place + staged.first
                    table = runs.cut_runs(entry.runs, first, first + staged.count)
                    layout = _open(value[staged.block_at :], staged.count)
                    yield layout, table, entry.first + first
            place += part.count

    def _staged(self, stage: int, start: int) -> Iterator[tuple[Entry, memoryview]]:
        prefix = keys.staged_of_shard(stage, self.topic, self.shard)
        key = keys.staged(stage, self.topic, self.shard, start)
        with self._transaction.cursor() as cursor:
            found = cursor.set_range(key)
            if not (found and cursor.key() == key):
                found = cursor.prev() if found else cursor.last()
            while found and cursor.key()[: len(prefix)] == prefix:
                value = cursor.value()
                staged = entries.decode(value)
                yield staged, value
                found = cursor.next()

    @contextmanager
    def naming(self, offset: int) -> Iterator[None]:
        """Faults found within say where."""
        try:
            yield
        except (Damaged, WrongFormat) as error:
            where = f"topic {self._name!r}, shard {self.shard}, offset {offset}"
            raise type(error)(f"{where}: {error}") from error

    def _here(self) -> Entry | None:
        self.entry = None
        key = self._cursor.key()
        if key[: len(self._prefix)] == self._prefix:
            with self.naming(keys.place_in_log(key)[2]):
                entry = entries.decode(self._cursor.value())
                if (entry.topic, entry.shard, entry.first) != keys.place_in_log(key):
                    raise Damaged("an entry of the log stands at another's place")
            self.entry = entry
        return self.entry

    def close(self) -> None:
        self._cursor.close()


def _open(block: memoryview, count: int) -> Layout:
    layout = open_layout(block, checksum=not sabotage.CHECKSUM_OFF)
    if layout.count != count:
        raise Damaged(f"a block has {layout.count} messages, its entry says {count}")
    return layout
