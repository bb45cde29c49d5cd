"""Small programs on plain files and plain LMDB, for tests of the power-cut model.

They run in children of a `ChildServer`, under the recorder.
"""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import lmdb

from tests.rig.power import recorder


def write(folder: str, commits: int, sync: bool) -> None:
    """Commit transactions, and mark each with its number after its commit has returned."""
    marks = recorder.Marks()
    with lmdb.open(folder, map_size=1 << 30, sync=sync) as env:
        sync_folder(folder)  # LMDB does not: its file's name would not be safe
        for number in range(1, commits + 1):
            with env.begin(write=True) as txn:
                txn.put(b"%08d" % number, bytes(3000))
            marks(b"%d" % number)


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def count(folder: str) -> int:
    """Return the number of transactions in the file, which must have no gap."""
    with lmdb.open(folder, map_size=1 << 30, subdir=True) as env, env.begin() as txn:
        keys = [int(key) for key in txn.cursor().iternext(values=False)]
    assert keys == list(range(1, len(keys) + 1))
    return len(keys)


def shuffle_files(folder: str) -> None:
    """Make one of each call that the recorder knows."""
    root = Path(folder)
    (root / "sub").mkdir()
    (root / "sub" / "a").write_bytes(b"first words")
    (root / "sub" / "a").rename(root / "b")
    with (root / "b").open("ab") as file:
        file.write(b" and more")
    fd = os.open(root / "c", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"0123456789")
    os.pwrite(fd, b"ab", 4)
    os.writev(fd, [b"x", b"yz"])
    os.pwritev(fd, [b"A", b"B"], 20)
    os.ftruncate(fd, 21)
    os.fsync(fd)
    os.close(fd)
    (root / "gone").write_bytes(b"")
    (root / "gone").unlink()
    (root / "tree" / "deep").mkdir(parents=True)
    (root / "tree" / "deep" / "leaf").write_bytes(b"leaf")
    shutil.rmtree(root / "tree")
    os.chdir(root)
    Path("d").write_bytes(b"by a relative path")
    Path("d").replace("e")


def map_a_file(folder: str) -> None:
    path = Path(folder, "mapped")
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as area:
        area[0] = 1
