"""Our values in the raw bytes of an LMDB file, whatever has become of its pages.

Values stand in one piece, in a leaf page or in pages of their own, so whatever has one
of our magics and matches its checksum is a value that was written once. It may be an
old one: LMDB does not wipe pages that it frees.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from polybus.errors import Damaged, WrongFormat
from polybus.kernel.blocks import Layout
from polybus.model.block import open_layout
from polybus.model.topic import Topic
from polybus.store.lmdb import log_entry as entries
from polybus.store.lmdb import stored_values
from polybus.store.lmdb.log_entry import LogEntry
from polybus.store.lmdb.store_copy import Progress

STEP_BYTES: Final = 16 << 20


class RawEntry(NamedTuple):
    """An entry whose tables are whole, and where its value begins."""

    entry: LogEntry
    at: int


class RawFile:
    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def entries(self, progress: Progress) -> Iterator[RawEntry]:
        for at in self._places(entries.MAGIC, progress):
            try:
                yield RawEntry(entries.decode(self._view[at:]), at)
            except Damaged:
                continue

    def topics(self) -> Iterator[tuple[Topic, int]]:
        """Topics and their revisions."""
        for at in self._places(stored_values.TOPIC_MAGIC, lambda done, total: None):
            try:
                yield stored_values.read_topic(self._view[at:])
            except Damaged:
                continue

    def layout(self, found: RawEntry) -> Layout | None:
        """The block of an entry; None if it is damaged."""
        try:
            layout = open_layout(found.entry.block(self._view[found.at :]))
        except (Damaged, WrongFormat):
            return None
        return layout if layout.count == found.entry.count else None

    def close(self) -> None:
        self._view.release()
        self._map.close()

    def _places(self, magic: bytes, progress: Progress) -> Iterator[int]:
        at, told = self._map.find(magic), 0
        while at >= 0:
            yield at
            if at - told >= STEP_BYTES:
                told = at
                progress(at, len(self))
            at = self._map.find(magic, at + 1)
