"""A cursor over the log of a shard: seeks by offset, id or time, and opens blocks.

Ids and times grow with the offset within a shard, so both are found by bisecting the range
of offsets. Every entry is verified when it is read, also during a search, and every block
before it is used. Errors name topic, shard and offset. A gap between entries, which only a
salvaged store has, is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

import lmdb

from polybus.errors import Damaged, PolybusError, StoreFault
from polybus.kernel.blocks import Layout
from polybus.model import run_table
from polybus.model.block import open_layout
from polybus.store.lmdb import log_entry, store_keys
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.lmdb_errors import translate_error
from polybus.store.lmdb.log_entry import LogEntry


class EntryCursor:
    """A position in the log of one shard, within one transaction, whose end closes it at last."""

    def __init__(
        self, transaction: Transaction, topic: int, shard: int, name: str, *, later: bool = False
    ) -> None:
        """If `later`, checksums of blocks are compared when their messages are gathered."""
        self._later = later
        self._transaction = transaction
        self._cursor = transaction.cursor()
        self._prefix = store_keys.log_of_shard(topic, shard)
        self.topic = topic
        self.shard = shard
        self._name = name
        self.entry: LogEntry | None = None  # None: after the last entry
        self.value = memoryview(b"")  # stored value of the entry

    def seek(self, offset: int) -> LogEntry | None:
        """Move to the entry that holds the offset, or to the first one after it."""
        key = store_keys.log(self.topic, self.shard, offset)
        try:
            found = self._cursor.set_range(key)
            if not (found and self._cursor.key() == key):
                # No entry starts at the offset: the entry before may hold it.
                moved = self._cursor.prev() if found else self._cursor.last()
                before = self._read_entry() if moved else None
                if before is not None and before.end > offset:
                    return before
                self._cursor.set_range(key)
            return self._read_entry()
        except (StoreFault, lmdb.Error) as error:
            raise self._locate_error(error, offset) from error

    def next(self) -> LogEntry | None:
        offset = self.entry.end if self.entry else 0
        try:
            self._cursor.next()
            return self._read_entry()
        except (StoreFault, lmdb.Error) as error:
            raise self._locate_error(error, offset) from error

    def seek_last(self, start: int, end: int, column: int, below: int) -> LogEntry | None:
        """Move to the last entry of a range whose first id (column 0) or time (1) is below a value.

        Moves to the first entry of the range if there is none.
        """
        low, high, best = start, end, start
        middle = end - 1  # tail readers search at the end of the log: probe there first
        # Offsets of the range are bisected. Each probe reads one entry, and moves the bound past
        # the whole entry.
        while low < high:
            entry = self.seek(middle)
            if entry is None or entry.first >= high:
                high = middle  # there is no entry between
            elif run_table.read_runs(entry.runs[:24])[0][column] < below:
                best, low = entry.first, entry.end
            else:
                high = entry.first
            middle = (low + high) // 2
        return self.seek(max(best, start))

    def first_after(self, offset: int) -> int | None:
        """Return the first offset of the next entry, without reading it."""
        found = self._cursor.set_range(store_keys.log(self.topic, self.shard, offset + 1))
        if not found or self._cursor.key()[: len(self._prefix)] != self._prefix:
            return None
        return store_keys.place_in_log(self._cursor.key())[2]

    def block_start(self, offset: int) -> int:
        """Return the first offset of the block of the current entry that holds an offset."""
        entry = self.entry
        assert entry is not None
        first = entry.first  # of the part
        for part in entry.parts:
            if offset < first + part.count:
                staged = next(self._staged(part.stage, offset - first), None)
                return first if staged is None else first + staged[0].first
            first += part.count
        return entry.first

    def blocks(self, start: int) -> Iterator[tuple[Layout, bytes, int]]:
        """Yield the blocks of the entry from a message on, with their runs and first offsets."""
        entry = self.entry
        assert entry is not None
        offset = entry.first + start
        try:
            # The fast path: nearly all entries hold their block.
            if entry.kind == log_entry.BLOCK:
                yield self._open(entry.block(self.value), entry.count), entry.runs, entry.first
                return
            for layout, table, first in self._extent(entry, start):
                yield layout, table, first
                offset = first + layout.count
        except (StoreFault, lmdb.Error) as error:
            raise self._locate_error(error, offset) from error

    def _extent(self, entry: LogEntry, start: int) -> Iterator[tuple[Layout, bytes, int]]:
        place = 0  # of the first message of the part within the extent
        for part in entry.parts:
            # Parts before the start are skipped by their counts, without reading them.
            if place + part.count > start:
                reached = max(0, start - place)
                for staged, value in self._staged(part.stage, reached):
                    # A gap: a staged block before this one is missing.
                    if staged.first > reached:
                        break
                    first, reached = place + staged.first, staged.end
                    table = run_table.cut_runs(entry.runs, first, first + staged.count)
                    layout = self._open(staged.block(value), staged.count)
                    yield layout, table, entry.first + first
                if reached < part.count:
                    raise Damaged("a staged block is missing")
            place += part.count

    def _staged(self, stage: int, start: int) -> Iterator[tuple[LogEntry, memoryview]]:
        prefix = store_keys.staged_of_shard(stage, self.topic, self.shard)
        key = store_keys.staged(stage, self.topic, self.shard, start)
        with self._transaction.cursor() as cursor:
            found = cursor.set_range(key)
            # No block starts at the message: the block before holds it.
            if not (found and cursor.key() == key):
                found = cursor.prev() if found else cursor.last()
            while found and cursor.key()[: len(prefix)] == prefix:
                value = cursor.value()
                staged = log_entry.decode(value)
                yield staged, value
                found = cursor.next()

    def _read_entry(self) -> LogEntry | None:
        # Cleared first: after an error there is no current entry.
        self.entry = None
        key, self.value = self._cursor.item()
        # The cursor has left the log of this shard.
        if not bytes(key).startswith(self._prefix):
            return None
        try:
            entry = log_entry.decode(self.value)
            # The head repeats the key, so a value under a wrong key is detected.
            if entry[1:4] != store_keys.place_in_log(key):
                raise Damaged("an entry of the log is at the wrong position")
        except Damaged as error:
            raise self._locate_error(error, store_keys.place_in_log(key)[2]) from error
        self.entry = entry
        return entry

    def _open(self, block: memoryview, count: int) -> Layout:
        layout = open_layout(block, checksum=True, later=self._later)
        # Offsets are counted by entries, messages are read from blocks: both must agree.
        if layout.count != count:
            raise Damaged(f"a block has {layout.count} messages, its entry says {count}")
        return layout

    def _locate_error(self, error: StoreFault | lmdb.Error, offset: int) -> PolybusError:
        """Return the error with topic, shard and offset added, unless it has them already."""
        fault = error if isinstance(error, StoreFault) else translate_error(error)
        # An error that was located by a nested call must not be located twice.
        if fault.__cause__ is not None and isinstance(fault.__cause__, StoreFault):
            return fault
        where = f"topic {self._name!r}, shard {self.shard}, offset {offset}"
        return type(fault)(f"{where}: {fault}")

    def close(self) -> None:
        """Close the cursor before its transaction ends."""
        self._cursor.close()
