"""What a store's file looks like from outside: sizes, readers, owner."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from polybus.store.lmdb import folder_ownership, stored_values
from polybus.store.lmdb.store_copy import file_bytes, used_bytes
from polybus.store.lmdb.store_files import StoreFiles


class StoreFileInfo(NamedTuple):
    """`used_bytes` hold something; `free_bytes` of the file will be used before it grows."""

    format: int
    generation: str
    file_bytes: int
    used_bytes: int
    free_bytes: int
    readers: int
    owner_pid: int | None


def read_file_info(path: Path) -> StoreFileInfo:
    home = StoreFiles(path, read_only=True)
    try:
        used, file = used_bytes(home.current), file_bytes(home.current)
        return StoreFileInfo(
            stored_values.FORMAT_VERSION,
            home.current.path.name,
            file,
            used,
            max(0, file - used),
            _readers(home.current.lmdb.readers()),
            folder_ownership.owner(path),
        )
    finally:
        home.close()


def _readers(table: str) -> int:
    """Lines of LMDB's table that are readers: they begin with a pid."""
    return sum(line.split()[0].isdigit() for line in table.splitlines() if line.strip())
