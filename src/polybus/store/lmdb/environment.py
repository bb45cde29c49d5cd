"""LMDB environments: opened once a process, used in short transactions, never over a fork.

LMDB forbids to open one environment twice in a process, so a table shares it: whoever
reads in the process of the owner uses the owner's. A view of the mapped file is valid
only within its transaction, so `reading` hands one out for the length of a `with`.
A store that was compacted lives in a new environment; the old one is closed when the
last transaction on it has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from polybus.errors import DataFolderInUse
from polybus.store.lmdb.lmdb_errors import translate_error, translated_errors

# Address space, not disk: more than any store will fill. It costs nothing.
MAP_BYTES: Final = 1 << 40
MAX_READERS: Final = 1024

Transaction = Any  # lmdb.Transaction; its stubs know only newer releases
Cursor = Any

_guard = threading.Condition()
_shared: dict[tuple[int, Path], Environment] = {}


class Environment:
    """One LMDB environment, shared within the process. Made by `acquire` only."""

    def __init__(self, path: Path, read_only: bool) -> None:
        self.path = path
        self.resolved = path.resolve()
        self.pid = os.getpid()
        self.read_only = read_only
        self.users = 0  # stores that have it open
        self.open_reads = 0  # looks that are under way
        self.is_reopening = False
        self.closed = False
        self.open()

    def open(self) -> None:
        with translated_errors():
            self.lmdb = lmdb.open(
                str(self.path),
                map_size=MAP_BYTES,
                max_readers=MAX_READERS,
                readonly=self.read_only,
                create=not self.read_only,
                readahead=True,  # a log is read forward: cold reads are eight times as quick
                # Else what the process had in memory fills the pages' gaps, and salvage and
                # whoever gets a backup would find it there.
                meminit=True,
                mode=0o600,
            )

    def enter(self) -> bool:
        """One more look, which ends with `leave`; False if it is closed already."""
        with _guard:
            if self.is_reopening:
                _guard.wait_for(lambda: not self.is_reopening)
            self.open_reads += not self.closed
            return not self.closed

    @property
    def pages(self) -> int:
        """That the file has had to have so far."""
        last: int = self.lmdb.info()["last_pgno"]
        return last

    def clear_dead_readers(self) -> None:
        """Places of killed readers are freed, so that pages they looked at can be used again."""
        self.lmdb.reader_check()

    @contextmanager
    def read_transaction(self) -> Iterator[Transaction]:
        """A transaction for a short look, by one who has entered."""
        transaction = self.begin()
        try:
            yield transaction
        finally:
            self.end(transaction)

    def begin(self) -> Transaction:
        try:
            return self.lmdb.begin(buffers=True)
        except lmdb.Error as error:
            raise translate_error(error) from error

    def end(self, transaction: Transaction) -> None:
        transaction.abort()


def acquire(path: Path, *, read_only: bool) -> Environment:
    """The environment in this folder; goes with the last `release`."""
    key = os.getpid(), path.resolve()
    with _guard:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = Environment(path, read_only)
        elif found.read_only and not read_only:
            raise DataFolderInUse(f"{path} is open for reading in this process (pid {key[0]})")
        found.users += 1
        return found


def release(environment: Environment) -> None:
    """In the child of a fork this closes nothing: the environment is the parent's."""
    with _guard:
        environment.users -= 1
        _close_if_unused(environment)


def leave(environment: Environment) -> None:
    """A look has ended."""
    with _guard:
        environment.open_reads -= 1
        _close_if_unused(environment)
        if environment.is_reopening:
            _guard.notify_all()


def reopen(environment: Environment) -> None:
    """Opens it anew, for all who have it open; waits until every look has ended."""
    with _guard:
        environment.is_reopening = True
        try:
            _guard.wait_for(lambda: environment.open_reads == 0)
            environment.lmdb.close()
            environment.open()
        except BaseException:
            _shared.pop((environment.pid, environment.resolved), None)
            environment.closed = True
            raise
        finally:
            environment.is_reopening = False
            _guard.notify_all()


def _close_if_unused(environment: Environment) -> None:
    if environment.users == environment.open_reads == 0 and environment.pid == os.getpid():
        _shared.pop((environment.pid, environment.resolved), None)
        environment.closed = True
        environment.lmdb.close()


def _after_fork() -> None:
    """Some thread of the parent may have held it, and does not live here."""
    global _guard
    _guard = threading.Condition()


os.register_at_fork(after_in_child=_after_fork)
