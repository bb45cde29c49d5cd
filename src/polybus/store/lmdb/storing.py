"""A batch becomes a transaction: the one place where the store is written to.

When it returns, the batch is on disk; when it raises, nothing of it is there. LMDB
gives an environment up when writing its root fails; it is then opened anew.
"""

from __future__ import annotations

import lmdb

from polybus.errors import Damaged
from polybus.store.lmdb import removal, sabotage
from polybus.store.lmdb.batch import Batch
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.faults import translate
from polybus.store.lmdb.home import Home

# So long may a commit take to remove what it has trimmed; the rest is done later.
REMOVAL_S = 0.005


class Storing:
    def __init__(self, home: Home) -> None:
        self._home = home
        self.removing = True  # something may have been left by the last owner

    def write(self, batch: Batch) -> None:
        batch.encode_blocks()
        if sabotage.KEEP_NOTHING:
            return
        if sabotage.TORN_COMMITS:
            self._write_torn(batch)
        with self.transaction() as transaction:
            batch.write(transaction)
            if batch.cleaning:
                self.removing = removal.Step(transaction, REMOVAL_S).run()

    def remove(self, time_s: float) -> None:
        """One step of what is left to be removed."""
        with self.transaction() as transaction:
            self.removing = removal.Step(transaction, time_s).run()

    def transaction(self) -> Writing:
        return Writing(self._home)

    def _write_torn(self, batch: Batch) -> None:
        first = Batch()
        first.puts = dict(sorted(batch.puts.items())[: len(batch.puts) // 2])
        with self.transaction() as transaction:
            first.write(transaction)


class Writing:
    """A write transaction: committed when the block ends well, else nothing is changed."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def __enter__(self) -> Transaction:
        try:
            self._transaction = self._home.used.lmdb.begin(write=True, buffers=True)
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
            self._home.reopen()
            return Damaged(f"LMDB gave up, and was opened anew: {error}")
        return translate(error)
