"""A batch becomes a transaction: the one place where the store is written to.

When it returns, the batch is on disk; when it raises, nothing of it is there. LMDB
gives an environment up when writing its root fails; it is then opened anew.
"""

from __future__ import annotations

import errno
import os
import resource

import lmdb

from polybus.errors import Damaged, StoreFull
from polybus.store.lmdb import entry_removal
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.lmdb_errors import translate_error
from polybus.store.lmdb.store_files import DATA, StoreFiles
from polybus.store.lmdb.write_batch import WriteBatch

# So long may a commit take to remove what it has trimmed; the rest is done later.
REMOVAL_S = 0.005
# LMDB calls a write that the disk had only half the room for an I/O error. With less room
# than two of the largest blocks need it is taken for that.
SHORT_OF_ROOM_BYTES = 512 << 20


class TransactionWriter:
    def __init__(self, files: StoreFiles) -> None:
        self._files = files
        self.has_removals = True  # something may have been left by the last owner

    def write(self, batch: WriteBatch) -> None:
        batch.encode_blocks()
        with self.transaction() as transaction:
            batch.write(transaction)
            left = (
                entry_removal.RemovalStep(transaction, REMOVAL_S).run()
                if batch.has_removals
                else self.has_removals
            )
        self.has_removals = left  # now that it is on disk

    def remove_some(self, time_s: float) -> None:
        """One step of what is left to be removed."""
        with self.transaction() as transaction:
            left = entry_removal.RemovalStep(transaction, time_s).run()
        self.has_removals = left

    def remove_all(self) -> int:
        """All that is left to be removed; how many steps that took."""
        steps = 0
        while self.has_removals:
            self.remove_some(REMOVAL_S)
            steps += 1
        return steps

    def transaction(self) -> WriteTxn:
        return WriteTxn(self._files)


class WriteTxn:
    """A write transaction: committed when the block ends well, else nothing is changed."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files

    def __enter__(self) -> Transaction:
        try:
            self._transaction = self._files.current.lmdb.begin(write=True, buffers=True)
        except lmdb.Error as error:
            raise self._failed(error) from error
        return self._transaction

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            try:
                self._transaction.commit()
            except lmdb.Error as failure:
                raise self._failed(failure) from failure
        else:
            self._transaction.abort()
            if isinstance(error, lmdb.Error):
                raise self._failed(error) from error

    def _failed(self, error: lmdb.Error) -> Exception:
        if isinstance(error, lmdb.PanicError):
            self._files.reopen()
            return Damaged(f"LMDB gave up, and was opened anew: {error}")
        if os.strerror(errno.EIO) in str(error) and self._room_bytes() < SHORT_OF_ROOM_BYTES:
            return StoreFull(f"the store has no room, or its disk failed: {error}")
        return translate_error(error)

    def _room_bytes(self) -> int:
        """How far the file can grow: what the disk has, and the process may use."""
        path = self._files.current.path
        disk, size = os.statvfs(path), (path / DATA).stat().st_size
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        free = disk.f_bavail * disk.f_frsize
        return free if limit == resource.RLIM_INFINITY else min(free, limit - size)
