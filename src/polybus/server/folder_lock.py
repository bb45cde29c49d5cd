"""One bus owns a data folder.

The owner holds an flock on the file `lock` in it and writes its pid there. The kernel
releases the lock when the owner ends, so a kill -9 leaves nothing to clean up. The file
stays; its pid is read only while a process holds the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Self

from polybus.errors import ConfigError, DataFolderInUse

LOCK_NAME = "lock"
# Between taking the lock and writing its pid an owner needs microseconds.
PID_WAIT_S = 1.0
DEFAULT_URL = "polybus://127.0.0.1:6570"


class FolderLock:
    """The held lock; `close` gives it back."""

    def __init__(self, folder: Path) -> None:
        self._fd = _open(folder / LOCK_NAME)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(self._fd)
            os.close(self._fd)
            raise DataFolderInUse(
                f"data folder {folder} is in use by the bus with pid {owner}:"
                f" reach that bus through its URL instead, e.g. {DEFAULT_URL}"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock. The file stays, or two buses could lock two files of one name."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"data folder {path.parent}: cannot be locked: {error.strerror}"
        ) from None


def _owner(fd: int) -> str:
    deadline = time.monotonic() + PID_WAIT_S
    while time.monotonic() < deadline:
        text = os.pread(fd, 32, 0).strip()
        if text.isdigit():
            return text.decode()
        time.sleep(0.01)
    return "unknown"
