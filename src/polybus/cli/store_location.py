"""Which folder a command means by STORE, and whether a folder can take a new one.

lmdb:/srv/bus      the engine's URL
/srv/bus           the same, by its folder
/var/lib/polybus   the data folder of a bus: its store is in `store`
"""

from __future__ import annotations

import os
from pathlib import Path

from polybus.errors import UsageError

LMDB = "lmdb:"
OTHERS = ("memory:", "nats:", "polybus:")
PRIVATE = 0o700
IN_DATA = "store"  # what a bus calls its store within its data folder
MARK = "CURRENT"  # the file that every store of LMDB has
DATA = "[0-9]*/data.mdb"  # what a store with nothing else left still has


def find_store_folder(text: str, *, mark: str = MARK) -> Path:
    """The folder of an existing store, known by a file; `UsageError` if there is none."""
    other = next((scheme for scheme in OTHERS if text.startswith(scheme)), None)
    if other is not None:
        raise UsageError(f"{text}: only stores of LMDB have files: give lmdb:PATH or a folder")
    folder = Path(text.removeprefix(LMDB)).absolute()
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"{folder}: this user may not read it")
    for place in (folder, folder / IN_DATA):
        if any(place.glob(mark)):
            return place
    raise UsageError(f"{folder} is no store: it has no file {mark}")


def check_new_folder(path: Path) -> Path:
    """A folder that is missing or empty, in one that can be written to."""
    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is no folder")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty: give a folder that is missing or empty")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    try:
        _try(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def _try(path: Path) -> None:
    """Makes a folder there and removes it: rights alone do not tell whether one can."""
    probe = path / "probe" if path.is_dir() else path
    probe.mkdir(mode=PRIVATE)
    probe.rmdir()
