"""Names of files and folders, on disk.

A sync of a file does not sync its name: that is data of the folder.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder with its parents, and sync their names."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    for folder in reversed(missing):
        sync_folder(folder.parent)
