"""The Python side of recorder.c, which records a process's changes of its files.

    library = build_library(folder)
    env = recording(library, watched, log)      # of a child that works in `watched`
    ...                                         # which calls `Marks()(b"acknowledged 7")`
    for record in records(log): ...

The module `images` computes from such a record the possible disk contents after a power cut.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("recorder.c")
FOLDER_VARIABLE = "POLYBUS_POWERCUT_FOLDER"
LOG_VARIABLE = "POLYBUS_POWERCUT_LOG"
LIBRARY_VARIABLE = "POLYBUS_POWERCUT_LIBRARY"
HEADER = struct.Struct("=IIQQQ")


class Kind(IntEnum):
    """As in recorder.c, which documents the fields of each."""

    OPENED = 1
    WRITTEN = 2
    CUT = 3
    SYNCING = 4
    SYNCED = 5
    RENAMED = 6
    REMOVED = 7
    FOLDER = 8
    MARK = 9
    UNSEEN = 10


class Record(NamedTuple):
    kind: Kind
    flags: int
    handle: int
    offset: int
    data: bytes


class UnseenWrite(Exception):
    """The process wrote in a way that cannot be recorded: the record is worth nothing."""


def build_library(folder: Path) -> Path:
    """Compile recorder.c into the folder, unless that was done since it last changed."""
    library = folder / "libpolybus_powercut.so"
    if library.exists() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "gcc")
    command = [compiler, "-std=gnu11", "-O2", "-g", "-shared", "-fPIC", "-o"]
    subprocess.run([*command, str(library), str(SOURCE), "-ldl"], check=True)
    return library


def recording(library: Path, folder: Path, log: Path) -> dict[str, str]:
    """Return the environment variables that make a child record its changes of the folder."""
    others = os.environ.get("LD_PRELOAD", "").split()
    return {
        "LD_PRELOAD": " ".join([str(library.resolve()), *others]),
        LIBRARY_VARIABLE: str(library.resolve()),
        FOLDER_VARIABLE: str(folder.resolve()),
        LOG_VARIABLE: str(log.resolve()),
    }


class Marks:
    """Writes marks of the test into the record, in order with the changes."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ[LIBRARY_VARIABLE])
        self._mark = library.powercut_mark
        self._mark.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._mark.restype = None

    def __call__(self, text: bytes) -> None:
        self._mark(text, len(text))


def records(log: Path) -> Iterator[Record]:
    """Yield the records of a log. Omits a record that a killed process left half written."""
    with log.open("rb") as file:
        while len(head := file.read(HEADER.size)) == HEADER.size:
            kind, flags, handle, offset, length = HEADER.unpack(head)
            data = file.read(length)
            if len(data) < length:
                return
            if kind == Kind.UNSEEN:
                raise UnseenWrite(data.decode())
            yield Record(Kind(kind), flags, handle, offset, data)
