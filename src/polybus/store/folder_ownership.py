"""Ownership of a store folder: a lock that ends with its process and names it.

It is a POSIX record lock. A child of a fork does not inherit it, so the folder is free when
the owner ends, even if its children live on. In return the lock is per process, and closing
any descriptor of the file in this process would drop it. So a table of held folders is
checked first, and a file that is listed in it is never opened again.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final

from polybus.errors import DataFolderInUse

LOCK: Final = "owner.lock"
_FLOCK = Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

_guard = threading.Lock()
_held: dict[Path, tuple[int, int]] = {}  # folder → (pid that locked it, descriptor)


def take(folder: Path) -> None:
    """Own the folder until `release`. Raises `DataFolderInUse` with the owner's pid."""
    folder = folder.resolve()
    with _guard:
        _forget_parents()
        if folder in _held:
            raise _in_use(folder, os.getpid())
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The lock of a process does not conflict with itself, so the table was checked first.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = _holder(descriptor)
            os.close(descriptor)
            raise _in_use(folder, pid) from None
        with suppress(OSError):  # a full disk does not matter: the kernel knows our pid
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held[folder] = os.getpid(), descriptor


def release(folder: Path) -> None:
    with _guard:
        pid, descriptor = _held.pop(folder.resolve())
        # In a child of a fork the file still names the parent, which owns the folder.
        if pid == os.getpid():
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def owner(folder: Path) -> int | None:
    """Return the pid of the process that owns a folder, or None."""
    folder = folder.resolve()
    with _guard:
        _forget_parents()
        # Opening and closing the file here would drop the lock of this process.
        if folder in _held:
            return os.getpid()
        with suppress(FileNotFoundError):
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                return _holder(descriptor)
            finally:
                os.close(descriptor)
    return None


def _forget_parents() -> None:
    """Forget locks of the parent after a fork. Closing them here does not unlock them there."""
    for folder, (pid, descriptor) in list(_held.items()):
        if pid != os.getpid():
            del _held[folder]
            os.close(descriptor)


def _after_fork() -> None:
    """Replace the lock: a thread of the parent may have held it, and does not exist here."""
    global _guard
    _guard = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _holder(descriptor: int) -> int | None:
    """Return the pid that holds the lock, 0 if it is unknown, None if it is free."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    # The kernel reports pid 0 for an owner in a pid namespace that this process cannot see. The
    # file has the pid that the owner has there.
    written = os.pread(descriptor, 20, 0).strip()
    return pid or (int(written) if written.isdigit() else 0)


def _in_use(folder: Path, pid: int | None) -> DataFolderInUse:
    who = "this process" if pid == os.getpid() else "another process"
    return DataFolderInUse(f"{folder} is in use by {who} (pid {pid or 'unknown'})")
