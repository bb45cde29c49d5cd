"""A reserve on the disk, so that a topic can be dropped or trimmed when the disk is full.

LMDB never overwrites a page in use: also a transaction that only removes needs new pages. On
a full disk no drop would succeed, and nothing could make room. So the owner keeps a file
beside the store. It is removed when a drop or a trim finds no room, and created again when
the disk has room.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

RESERVE: Final = "reserve"
# A drop changes some ten pages. A step of the removal that follows may write a list of as
# many free pages as fit into half of this.
RESERVE_BYTES: Final = 4 << 20
LEAST_ROOM_BYTES: Final = 4 * RESERVE_BYTES  # on a disk that is nearly full, data comes first


class DiskReserve:
    """The reserve of a store that this process owns."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESERVE

    def fill(self) -> None:
        """Create the reserve if it is missing and the disk has room."""
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size == RESERVE_BYTES:
                return
            disk = os.statvfs(self._path.parent)
            if disk.f_bavail * disk.f_frsize < LEAST_ROOM_BYTES:
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            except OSError:
                self._path.unlink()
            finally:
                os.close(descriptor)

    def release(self) -> bool:
        """Free the reserve. Returns False if there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
