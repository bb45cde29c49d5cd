"""Write transactions: the only place where the store is written to.

When `write` returns, the batch is on disk; when it raises, nothing of it is. LMDB gives up an
environment if writing its root page fails; it is reopened then.
"""

from __future__ import annotations

import errno
import os
import resource

import lmdb

from polybus.errors import Damaged, StoreFull
from polybus.store.lmdb import entry_removal
from polybus.store.lmdb.disk_reserve import DiskReserve
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.lmdb_errors import translate_error
from polybus.store.lmdb.quarantine import Quarantine
from polybus.store.lmdb.store_files import DATA, StoreFiles
from polybus.store.lmdb.write_batch import WriteBatch

# Time that a commit may spend on removing what it trimmed; background steps do the rest. With the
# sync of the transaction, commits of others wait less than 5 ms.
REMOVAL_S = 0.002
# LMDB reports a write that only partly fits on the disk as an I/O error. If the disk has less
# room than two of the largest blocks need, the error is taken for a full disk.
SHORT_OF_ROOM_BYTES = 512 << 20


class TransactionWriter:
    """Writes batches and removes entries, each in one transaction."""

    def __init__(self, files: StoreFiles, quarantine: Quarantine | None = None) -> None:
        self._files = files
        self._quarantine = quarantine
        self.has_removals = True  # the last owner may have left some
        self.reserve = DiskReserve(files.path)
        self.is_on_reserve = False  # this batch has the room of the reserve, and no more

    def write(self, batch: WriteBatch) -> None:
        # Before the transaction begins: encoding takes long and needs no lock of LMDB.
        batch.encode_blocks()
        with WriteTxn(self._files) as transaction:
            batch.write(transaction)
            left = self.has_removals
            # On the reserve the removal comes later, in steps of its own.
            if batch.has_removals and self.is_on_reserve:
                left = True
            elif batch.has_removals:
                step = entry_removal.RemovalStep(transaction, REMOVAL_S, self._quarantine)
                left = step.run()
        self.has_removals = left  # only now: the transaction is on disk

    def remove_some(self, time_s: float) -> None:
        """Run one removal step."""
        with WriteTxn(self._files) as transaction:
            left = entry_removal.RemovalStep(transaction, time_s, self._quarantine).run()
        self.has_removals = left

    def remove_all(self) -> int:
        """Finish all removals. Returns the number of steps."""
        steps = 0
        while self.has_removals:
            self.remove_some(REMOVAL_S)
            steps += 1
        return steps


class WriteTxn:
    """A write transaction: committed if the block does not raise, else aborted."""

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
            # Every later transaction of this environment would fail, too.
            self._files.reopen()
            return Damaged(f"LMDB gave up the environment; it was reopened: {error}")
        if os.strerror(errno.EIO) in str(error):
            # Both the free space of the disk and RLIMIT_FSIZE limit the growth of the file.
            path = self._files.current.path
            disk = os.statvfs(path)
            room = disk.f_bavail * disk.f_frsize
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit != resource.RLIM_INFINITY:
                room = min(room, limit - (path / DATA).stat().st_size)
            if room < SHORT_OF_ROOM_BYTES:
                return StoreFull(f"the store has no room, or the disk failed: {error}")
        return translate_error(error)
