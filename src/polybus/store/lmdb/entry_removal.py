"""Removal of trimmed, dropped and discarded entries, in steps of bounded time.

The transaction that makes entries unreachable also stores a removal key (`x …`), so the
work continues after a crash. Each step deletes as many entries as its time allows and
lowers the size of the shard by the bytes they were charged.

The staged blocks of a trimmed extent are deleted one by one, before the extent. Of an extent
that is only partly trimmed, the staged blocks before the start are deleted.
"""

from __future__ import annotations

import time

from polybus.errors import Damaged
from polybus.store.lmdb import log_entry, store_keys, stored_values
from polybus.store.lmdb.environment import Cursor, Transaction
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.quarantine import Quarantine


class RemovalStep:
    """One step within a transaction: ends when its time is over, after at least one deletion."""

    def __init__(
        self, transaction: Transaction, time_s: float, quarantine: Quarantine | None = None
    ) -> None:
        self._transaction = transaction
        self._quarantine = quarantine or ()
        self._end_s = time.monotonic() + time_s
        self._freed = 0

    def run(self) -> bool:
        """Run the step. Returns True if entries are left to be removed."""
        start = store_keys.REMOVALS
        with self._transaction.cursor() as cursor:
            while cursor.set_range(start) and bytes(cursor.key()[:1]) == store_keys.REMOVALS:
                key = bytes(cursor.key())
                numbers = store_keys.removal_target(key)
                # A damaged topic is left as it is, and so is a key that is damaged itself.
                # Stages have higher numbers than topics.
                if not numbers or numbers[0] in self._quarantine:
                    start = key + b"\0"
                    continue
                if key.startswith(store_keys.TRIMMED):
                    done = self._trimmed(*numbers)
                elif key.startswith(store_keys.DROPPED):
                    done = (
                        self._log(store_keys.log_of_topic(*numbers), None)
                        and self._all_with(store_keys.state(*numbers))
                        and self._all_with(store_keys.upkeep_of_topic(*numbers))
                    )
                else:
                    done = self._all_with(store_keys.staged_of_stage(*numbers))
                if not done:
                    return True
                # Deleted last: if the step ends earlier, the next one continues with this key.
                self._transaction.delete(key)
        return False

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end_s

    def _trimmed(self, topic: int, shard: int) -> bool:
        """Delete the entries before the start of a shard. Returns True if none is left."""
        raw = self._transaction.get(store_keys.shard_state(topic, shard))
        if raw is None:
            return True  # dropped meanwhile, which has a removal key of its own
        start = stored_values.SHARD_STATE.unpack(raw)[0]
        self._freed = 0
        done = self._log(store_keys.log_of_shard(topic, shard), start)
        key = store_keys.upkeep(topic, shard)
        found = self._transaction.get(key)
        removed, packed = stored_values.SHARD_UPKEEP.unpack(found) if found else (0, 0)
        # Entries before the start are gone, so they count as re-blocked.
        raw = stored_values.SHARD_UPKEEP.pack(removed + self._freed, max(packed, start))
        self._transaction.put(key, raw)
        return done

    def _log(self, prefix: bytes, start: int | None) -> bool:
        """Delete the entries that end before an offset, or all. Returns True if none is left."""
        with self._transaction.cursor() as cursor:
            while cursor.set_range(prefix) and bytes(cursor.key()[: len(prefix)]) == prefix:
                entry = _entry(cursor)
                # An entry that holds the start stays; of an extent, staged blocks before it go.
                whole = start is None or entry.end <= start
                if not whole and (start is None or entry.first >= start):
                    return True
                upto = entry.count if whole or start is None else start - entry.first
                if not self._parts(entry, upto):
                    return False
                if not whole:
                    return True
                # Deleting the staged blocks may have moved the cursor.
                cursor.set_range(store_keys.log(entry.topic, entry.shard, entry.first))
                cursor.delete()
                # The bytes of an extent were counted with its staged blocks.
                self._freed += entry.charged if entry.kind == log_entry.BLOCK else 0
                if self._is_over:
                    return False
        return True

    def _parts(self, entry: LogEntry, upto: int) -> bool:
        """Delete the staged blocks of an extent before a message. Returns True if none is left."""
        for part in entry.parts:
            prefix = store_keys.staged_of_shard(part.stage, entry.topic, entry.shard)
            if upto <= 0:
                break
            if not self._staged(prefix, upto):
                return False
            upto -= part.count
        return True

    def _staged(self, prefix: bytes, upto: int) -> bool:
        with self._transaction.cursor() as cursor:
            found = cursor.set_range(prefix)
            while found and bytes(cursor.key()[: len(prefix)]) == prefix:
                entry = _entry(cursor)
                if entry.end > upto:
                    return True
                cursor.delete()
                self._freed += entry.charged
                # After the deletion, so that every step makes progress, however short its time.
                if self._is_over:
                    return False
                found = cursor.set_range(prefix)
        return True

    def _all_with(self, prefix: bytes) -> bool:
        with self._transaction.cursor() as cursor:
            while cursor.set_range(prefix) and bytes(cursor.key()[: len(prefix)]) == prefix:
                cursor.delete()
                if self._is_over:
                    return False
        return True


def _entry(cursor: Cursor) -> LogEntry:
    """Return the entry at the cursor. A damaged one is unreadable anyway and may be deleted."""
    key, value = cursor.item()
    try:
        return log_entry.decode(value)
    except Damaged:
        if bytes(key[:1]) == store_keys.LOG:
            return LogEntry(log_entry.BLOCK, *store_keys.place_in_log(key), 1, 0)
        return LogEntry(log_entry.STAGED, 0, 0, 0, 0, 0)
