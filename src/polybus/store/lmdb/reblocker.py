"""The re-blocker: merges small neighbouring entries of a shard and keeps their runs.

Reading blocks of one message is some hundred times slower than reading large ones. So when
small entries at the end of a shard add up to `TARGET_BYTES`, they are copied into one entry;
each message is rewritten about once. The upkeep record of a shard holds the offset up to
which this was done. The bytes of small entries after it are estimated at run time, and
looked up once after opening. Small extents are merged as well, which frees their stages.
"""

from __future__ import annotations

from contextlib import closing
from typing import Final

from polybus.errors import Damaged
from polybus.kernel.blocks import Layout
from polybus.model import run_table
from polybus.model.block import concat_layouts
from polybus.store.lmdb import log_entry, store_keys, stored_values
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.write_batch import SMALL_BYTES, Target, WriteBatch
from polybus.store.lmdb.write_txn import WriteTxn
from polybus.store.lmdb.writer_state import scan_prefix

TARGET_BYTES: Final = 256 << 10
MAX_BYTES: Final = 1 << 20
MAX_ENTRIES: Final = 512  # per step, which takes a few milliseconds
MAX_STAGED: Final = 64  # stages of an extent that may be merged


class Reblocker:
    """Chooses the shards that are worth a step."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self._small: dict[Target, int] = {}  # bytes of small entries that were not yet merged
        self.due: dict[Target, None] = {}

    def load(self) -> None:
        """Find the shards that have entries after the offset up to which they were merged."""
        with self._files.snapshot() as transaction:
            for key, raw in scan_prefix(transaction, store_keys.STATE):
                if len(key) > len(store_keys.state(0)):
                    target = store_keys.shard_of_state(key)
                    if _done(transaction, target) < stored_values.SHARD_STATE.unpack(raw)[1]:
                        self.due[target] = None

    def note_batch(self, batch: WriteBatch) -> None:
        """Count the small entries of a batch, before they are encoded."""
        for target, entry in batch.entries:
            if entry.size < SMALL_BYTES:
                size = self._small[target] = self._small.get(target, 0) + entry.size
                if size >= TARGET_BYTES:
                    self.due[target] = None

    def step(self, *, whole: bool = False) -> None:
        """Run a step for the shard that has waited longest; if `whole`, merge its rest as well."""
        target = next(iter(self.due))
        try:
            with WriteTxn(self._files) as transaction:
                done = _ReblockStep(transaction, target, whole).run()
        except Damaged:
            # Readers report the damage. Damaged entries must not be merged.
            with WriteTxn(self._files) as transaction:
                done = _ReblockStep(transaction, target, whole).skip_shard()
        # Removed and added again, so that a shard with much work goes to the end of the line.
        del self.due[target]
        if done:
            self._small.pop(target, None)
        else:
            self.due[target] = None

    def run_all(self) -> int:
        """Merge all that can be merged. Returns the number of steps."""
        self.load()
        steps = 0
        while self.due:
            self.step(whole=True)
            steps += 1
        return steps


class _ReblockStep:
    """Merges the first small entries of a shard, within a transaction."""

    def __init__(self, transaction: Transaction, target: Target, whole: bool) -> None:
        self._transaction = transaction
        self._target = target
        self._whole = whole
        self._group: list[LogEntry] = []
        self._size = 0

    def run(self) -> bool:
        """Run the step. Returns True if the shard is done."""
        if self._transaction.get(store_keys.shard_state(*self._target)) is None:
            return True  # dropped meanwhile
        done = _done(self._transaction, self._target)
        with closing(
            EntryCursor(self._transaction, *self._target, f"number {self._target[0]}")
        ) as cursor:
            more = self._collect(cursor, self._first(cursor, done))
            # At the end of the log a small group waits for more entries, or each would be
            # rewritten several times.
            if len(self._group) > 1 and (more or self._whole or self._size >= SMALL_BYTES):
                self._merge(cursor)
            elif not more and not self._whole:
                return True
            self._store_upkeep(self._group[-1].end if self._group else done)
        return not more

    def skip_shard(self) -> bool:
        """Leave the shard as it is, up to its current end. Returns True."""
        self._store_upkeep(_range(self._transaction, self._target)[1])
        return True

    def _first(self, cursor: EntryCursor, done: int) -> LogEntry | None:
        """Return the first entry that may be merged; not one that is trimmed, even partly."""
        start, _ = _range(self._transaction, self._target)
        entry = cursor.seek(max(done, start))
        # A partly trimmed entry is removed later; merging would bring its trimmed messages back.
        if entry is not None and entry.first < start:
            entry = cursor.next()
        return entry

    def _collect(self, cursor: EntryCursor, entry: LogEntry | None) -> bool:
        """Fill the group. Returns True if there are entries after it."""
        looked = 0
        while entry is not None and self._can_merge(entry):
            self._group.append(entry)
            self._size += entry.charged
            looked += 1
            if self._size >= TARGET_BYTES or looked >= MAX_ENTRIES:
                return cursor.next() is not None
            entry = cursor.next()
        if entry is not None and not self._group:
            self._group.append(entry)  # too large to be merged: skipped
            return cursor.next() is not None
        return entry is not None

    def _can_merge(self, entry: LogEntry) -> bool:
        # A large entry is taken if it completes a small group, which would otherwise stay small
        # between large ones.
        small = entry.charged < SMALL_BYTES or bool(self._group and self._size < SMALL_BYTES)
        fits = self._size + entry.charged <= MAX_BYTES
        return small and fits and len(entry.parts) <= MAX_STAGED

    def _merge(self, cursor: EntryCursor) -> None:
        layouts: list[Layout] = []
        first = self._group[0]
        try:
            for entry in self._group:
                cursor.seek(entry.first)
                layouts += [layout for layout, _, _ in cursor.blocks(0)]
            block = concat_layouts(layouts)
        finally:
            for layout in layouts:
                layout.close()
        table = run_table.join_tables(*[entry.runs for entry in self._group])
        merged = LogEntry(
            log_entry.BLOCK, *self._target, first.first, block.count, block.size_bytes, table
        )
        for entry in self._group:
            self._transaction.delete(store_keys.log(*self._target, entry.first))
            self._free_parts(entry)
        self._transaction.put(
            store_keys.log(*self._target, first.first), log_entry.encode(merged, block.data)
        )
        # The merged block has another size: the difference counts as removed, or the size of the
        # shard would drift.
        self._freed = self._size - block.size_bytes

    _freed = 0

    def _free_parts(self, entry: LogEntry) -> None:
        for part in entry.parts:
            prefix = store_keys.staged_of_shard(part.stage, *self._target)
            with self._transaction.cursor() as cursor:
                while cursor.set_range(prefix) and cursor.key()[: len(prefix)] == prefix:
                    cursor.delete()

    def _store_upkeep(self, done: int) -> None:
        key = store_keys.upkeep(*self._target)
        raw = self._transaction.get(key)
        removed = stored_values.SHARD_UPKEEP.unpack(raw)[0] if raw else 0
        self._transaction.put(key, stored_values.SHARD_UPKEEP.pack(removed + self._freed, done))


def _range(transaction: Transaction, target: Target) -> tuple[int, int]:
    """Return start and end of a shard; zeros if its topic was dropped."""
    raw = transaction.get(store_keys.shard_state(*target))
    start, end, _ = stored_values.SHARD_STATE.unpack(raw) if raw else (0, 0, 0)
    return start, end


def _done(transaction: Transaction, target: Target) -> int:
    """Return the offset up to which a shard was merged."""
    raw = transaction.get(store_keys.upkeep(*target))
    done: int = stored_values.SHARD_UPKEEP.unpack(raw)[1] if raw else 0
    return done
