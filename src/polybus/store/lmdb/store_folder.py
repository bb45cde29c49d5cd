"""The folder of a store, and which of its generations is the one in use.

    PATH/owner.lock     locked by the process that writes (ownership.py)
    PATH/CURRENT        "polybus store <format>", and the name of a sub-folder
    PATH/0001/          an LMDB environment: data.mdb, lock.mdb

Whatever is named is on disk first: LMDB syncs what it writes, but not the names of its
files, nor the first pages of a new one.

Compaction writes the next sub-folder and then replaces CURRENT, which is atomic:
readers look at it before each read, and move over. Sub-folders that CURRENT does not
name are left-overs of a compaction that did not finish, and removed by the next owner.
Other files in PATH are not ours and left alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from polybus.errors import Damaged, DoesNotExist, WrongFormat
from polybus.store.lmdb.stored_values import FORMAT_VERSION

CURRENT: Final = "CURRENT"
DATA: Final = "data.mdb"
_TITLE: Final = "polybus store"
_GENERATION = re.compile(r"\d{4,}")

CurrentVersion = tuple[int, int]  # tells one CURRENT from another


def current_generation(path: Path) -> Path:
    """The sub-folder in use. `DoesNotExist` if there is no store, `WrongFormat` if not ours."""
    try:
        text = (path / CURRENT).read_text()
    except FileNotFoundError:
        raise DoesNotExist(f"there is no store in {path}") from None
    except UnicodeDecodeError:
        text = ""
    title, _, name = text.strip().partition("\n")
    kind, _, version = title.rpartition(" ")
    if kind != _TITLE or not _GENERATION.fullmatch(name):
        raise WrongFormat(f"{path / CURRENT} was not written by polybus")
    if version != str(FORMAT_VERSION):
        raise WrongFormat(f"{path} has format {version}, this polybus reads {FORMAT_VERSION}")
    return path / name


def current_version(path: Path) -> CurrentVersion:
    """Changes whenever another generation comes into use."""
    found = os.stat(path / CURRENT)  # noqa: PTH116 -- before each read, and twice as quick
    return found.st_ino, found.st_mtime_ns


def prepare(path: Path, fill: Callable[[Path], None]) -> Path:
    """The sub-folder in use, made if there is none. Only the owner may call this.

    `fill` makes an environment in a folder. All names are on disk when this returns, also
    those that an owner made who was killed before he could see to it.
    """
    if not (path / CURRENT).exists():
        found = _generations(path)
        if len(found) > 1:
            raise Damaged(f"{path / CURRENT} is missing, and there are {len(found)} generations")
        switch_generation(path, found[0] if found else _create_first(path, fill))
    used = current_generation(path)
    for other in _generations(path):
        if other != used:
            shutil.rmtree(other, ignore_errors=True)
    sync_folder(used)
    sync_folder(path)
    return used


def _create_first(path: Path, fill: Callable[[Path], None]) -> Path:
    """The first generation: whole on disk before it goes by its name.

    LMDB writes a new file's first pages without a sync, and never syncs its folder: a cut
    of power would leave what is no LMDB file, or none, where CURRENT says there is one.
    """
    fresh, first = path / "0001.new", path / "0001"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    fill(fresh)
    sync_folder(fresh)
    return fresh.rename(first)


def next_generation(used: Path) -> Path:
    """An empty sub-folder for the generation after this one."""
    path = used.with_name(f"{int(used.name) + 1:04d}")
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def switch_generation(path: Path, used: Path) -> None:
    """Makes a sub-folder, whose files are on disk already, the one in use."""
    sync_folder(used)
    fresh = path / (CURRENT + ".new")
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
        with fresh.open("w") as file:
            file.write(f"{_TITLE} {FORMAT_VERSION}\n{used.name}\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path / CURRENT)
        os.fsync(directory)  # opened before: it must not lack a descriptor now
    finally:
        os.close(directory)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """The folder itself, its name on disk as well."""
    missing = [one for one in (path, *path.parents) if not one.is_dir()]
    path.mkdir(parents=True, mode=0o700, exist_ok=True)
    for one in reversed(missing):
        sync_folder(one.parent)


def _generations(path: Path) -> list[Path]:
    found = [entry for entry in path.iterdir() if _GENERATION.fullmatch(entry.name)]
    return sorted(entry for entry in found if entry.is_dir())
