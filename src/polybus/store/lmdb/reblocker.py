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
from polybus.store.contract import DamageListener
from polybus.store.lmdb import log_entry, store_keys, stored_values
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.quarantine import Quarantine
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

    def __init__(
        self,
        files: StoreFiles,
        quarantine: Quarantine | None = None,
        on_damage: DamageListener = lambda topic, text: None,
    ) -> None:
        self._files = files
        self._quarantine = quarantine or ()
        self._on_damage = on_damage
        self._small: dict[Target, int] = {}  # bytes of small entries that were not yet merged
        self.due: dict[Target, None] = {}

    def load(self) -> None:
        """Find the shards that have entries after the offset up to which they were merged."""
        with self._files.snapshot() as transaction:
            for key, raw in scan_prefix(transaction, store_keys.STATE):
                if len(key) != len(store_keys.shard_state(0, 0)):
                    continue
                target = store_keys.shard_of_state(key)
                if target[0] in self._quarantine or len(raw) != stored_values.SHARD_STATE.size:
                    continue
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
                done = _merge_some(transaction, target, whole)
        except Damaged as error:
            self._on_damage(target[0], str(error))
            # Damaged entries must not be merged, so the shard is left as it is, up to its current
            # end.
            with WriteTxn(self._files) as transaction:
                raw = transaction.get(store_keys.shard_state(*target))
                if raw is not None:
                    _store_upkeep(transaction, target, stored_values.SHARD_STATE.unpack(raw)[1])
            done = True
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


def _merge_some(transaction: Transaction, target: Target, whole: bool) -> bool:
    """Merge the first small entries of a shard. Returns True if the shard is done."""
    raw = transaction.get(store_keys.shard_state(*target))
    if raw is None:
        return True  # dropped meanwhile
    start, _, _ = stored_values.SHARD_STATE.unpack(raw)
    done = _done(transaction, target)
    with closing(EntryCursor(transaction, *target, f"number {target[0]}")) as cursor:
        entry = cursor.seek(max(done, start))
        # A partly trimmed entry is removed later; merging would bring its trimmed messages back.
        if entry is not None and entry.first < start:
            entry = cursor.next()
        group: list[LogEntry] = []
        size = 0
        while entry is not None and size < TARGET_BYTES and len(group) < MAX_ENTRIES:
            # A large entry is taken if it completes a small group, which would otherwise stay
            # small between large ones.
            is_small = entry.charged < SMALL_BYTES or bool(group and size < SMALL_BYTES)
            fits = size + entry.charged <= MAX_BYTES
            if not (is_small and fits and len(entry.parts) <= MAX_STAGED):
                break
            group.append(entry)
            size += entry.charged
            entry = cursor.next()
        if entry is not None and not group:
            group.append(entry)  # too large to be merged: skipped
            entry = cursor.next()
        freed = 0
        # At the end of the log a small group waits for more entries, or each would be rewritten
        # several times.
        if len(group) > 1 and (entry is not None or whole or size >= SMALL_BYTES):
            # The merged block has another size: the difference counts as removed, or the size of
            # the shard would drift.
            freed = size - _replace_entries(transaction, target, group, cursor)
        elif entry is None and not whole:
            return True
        _store_upkeep(transaction, target, group[-1].end if group else done, freed)
    return entry is None


def _replace_entries(
    transaction: Transaction, target: Target, group: list[LogEntry], cursor: EntryCursor
) -> int:
    """Replace consecutive entries by one. Returns the bytes of its block."""
    layouts: list[Layout] = []
    try:
        for entry in group:
            cursor.seek(entry.first)
            layouts += [layout for layout, _, _ in cursor.blocks(0)]
        block = concat_layouts(layouts)
    finally:
        for layout in layouts:
            layout.close()
    first, size = group[0].first, block.size_bytes
    table = run_table.join_tables(*[entry.runs for entry in group])
    merged = LogEntry(log_entry.BLOCK, *target, first, block.count, size, table)
    for entry in group:
        transaction.delete(store_keys.log(*target, entry.first))
        # The messages of an extent are in the merged block now, so its staged blocks are freed.
        for part in entry.parts:
            prefix = store_keys.staged_of_shard(part.stage, *target)
            with transaction.cursor() as staged:
                while staged.set_range(prefix) and staged.key()[: len(prefix)] == prefix:
                    staged.delete()
    transaction.put(store_keys.log(*target, first), log_entry.encode(merged, block.data))
    return size


def _store_upkeep(transaction: Transaction, target: Target, done: int, freed: int = 0) -> None:
    key = store_keys.upkeep(*target)
    raw = transaction.get(key)
    removed = stored_values.SHARD_UPKEEP.unpack(raw)[0] if raw else 0
    transaction.put(key, stored_values.SHARD_UPKEEP.pack(removed + freed, done))


def _done(transaction: Transaction, target: Target) -> int:
    """Return the offset up to which a shard was merged."""
    raw = transaction.get(store_keys.upkeep(*target))
    # The record of a dropped topic may be damaged: nothing inspects it.
    if raw is None or len(raw) != stored_values.SHARD_UPKEEP.size:
        return 0
    done: int = stored_values.SHARD_UPKEEP.unpack(raw)[1]
    return done
