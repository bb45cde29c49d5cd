"""LMDB environments, shared within a process and never used across a fork.

LMDB forbids opening an environment twice in a process, so `acquire` shares it: a reader in
the process of the owner uses the owner's environment. A view of the mapped file is valid
only within its transaction. A compacted store has a new environment; the old one is closed
when its last transaction has ended.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

import lmdb

from polybus.errors import DataFolderInUse
from polybus.store.lmdb.lmdb_errors import translated_errors

# Address space, not disk space: larger than any store, and free of cost.
MAP_BYTES: Final = 1 << 40
MAX_READERS: Final = 1024

Transaction = Any  # lmdb.Transaction, whose stubs describe newer releases only
Cursor = Any

_guard = threading.Condition()
_shared: dict[tuple[int, Path], Environment] = {}


class Environment:
    """One LMDB environment, shared within the process. Created by `acquire` only."""

    def __init__(self, path: Path, read_only: bool) -> None:
        self.path = path
        # Kept, because the path can no longer be resolved once the folder was removed.
        self.resolved = path.resolve()
        self.pid = os.getpid()
        self.read_only = read_only
        self.users = 0  # stores that have it open
        self.open_reads = 0  # transactions that are open
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
                readahead=True,  # a log is read forward: cold reads are eight times as fast
                # Otherwise gaps in pages contain old memory of the process, which would leak
                # into backups and could confuse salvage.
                meminit=True,
                mode=0o600,
            )

    def enter(self) -> bool:
        """Begin a read, which `leave` ends. Returns False if the environment is closed."""
        with _guard:
            # `reopen` waits until no read is open, so new ones wait for it.
            if self.is_reopening:
                _guard.wait_for(lambda: not self.is_reopening)
            self.open_reads += not self.closed
            return not self.closed

    @property
    def pages(self) -> int:
        """The number of pages that the file has ever needed."""
        last: int = self.lmdb.info()["last_pgno"]
        return last

    def clear_dead_readers(self) -> None:
        """Free the reader slots of dead processes, so that LMDB can reuse the pages they pinned."""
        self.lmdb.reader_check()


def acquire(path: Path, *, read_only: bool) -> Environment:
    """Return the environment of a folder. The last `release` closes it."""
    # The pid is part of the key: a child of a fork must not use environments of its parent.
    key = os.getpid(), path.resolve()
    with _guard:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = Environment(path, read_only)
        # An environment cannot be opened twice, nor change from reading to writing.
        elif found.read_only and not read_only:
            raise DataFolderInUse(f"{path} is open read-only in this process (pid {key[0]})")
        found.users += 1
        return found


def release(environment: Environment) -> None:
    """End a use. In a child of a fork nothing is closed: the environment is the parent's."""
    with _guard:
        environment.users -= 1
        if environment.users == environment.open_reads == 0:
            _close(environment)


def leave(environment: Environment) -> None:
    """End a read."""
    with _guard:
        environment.open_reads -= 1
        if environment.users == environment.open_reads == 0:
            _close(environment)
        # `reopen` waits for the last read.
        if environment.is_reopening:
            _guard.notify_all()


def reopen(environment: Environment) -> None:
    """Close and open an environment for all its users. Waits until no read is open."""
    with _guard:
        environment.is_reopening = True
        try:
            # Closing an environment with open transactions would unmap memory that they read.
            _guard.wait_for(lambda: environment.open_reads == 0)
            environment.lmdb.close()
            environment.open()
        except BaseException:
            # Reads that wait here must fail instead of using a closed environment.
            _shared.pop((environment.pid, environment.resolved), None)
            environment.closed = True
            raise
        finally:
            environment.is_reopening = False
            _guard.notify_all()


def _close(environment: Environment) -> None:
    if environment.pid == os.getpid():
        _shared.pop((environment.pid, environment.resolved), None)
        environment.closed = True
        environment.lmdb.close()


def _after_fork() -> None:
    """Replace the lock: a thread of the parent may have held it, and does not exist here."""
    global _guard
    _guard = threading.Condition()


os.register_at_fork(after_in_child=_after_fork)
