"""Segments: files of a fixed size, written with zeros before use and reused when trimmed.

    0000000000000007.segment     the name is the sequence: records continue in the next one

All blocks of a segment are on disk before its first record, so writing a record changes no
metadata of the file, and fdatasync writes the data alone. A segment that is reused gets the
next sequence by a rename, and keeps the bytes of its old records until new ones replace them.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from polybus.errors import Damaged, StoreClosed, StoreFault, WrongFormat
from polybus.store.folder_names import sync_folder
from polybus.store.log import codec
from polybus.store.log.codec import HEAD_BYTES, SEGMENT_HEADER_BYTES, Head
from polybus.store.log.write_ahead_log import Bytes

_NAME = re.compile(r"(\d{16})\.segment")
UNFINISHED: Final = "segment.new"
_ZEROS: Final = bytes(1 << 20)
PAGE_BYTES: Final = 4096
WINDOW_BYTES: Final = 1 << 20  # of one read


class Entry(NamedTuple):
    """An intact record of any version or kind, and its place in the segment."""

    offset: int
    head: Head
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + self.head.size


class Segment:
    def __init__(self, path: Path, descriptor: int, size: int, log_id: int) -> None:
        self.path = path
        self.size = size
        self.log_id = log_id
        self._descriptor = descriptor
        # A read must not use the number of a descriptor that another file has got since.
        self._guard = threading.Lock()

    @classmethod
    def create(cls, folder: Path, sequence: int, size: int, log_id: int) -> Self:
        """Write a new segment, on disk with its name when this returns. Raises OSError."""
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < size:
            # Filling the disk to find out would fail the writes of others.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        unfinished = folder / UNFINISHED
        unfinished.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        segment = cls(unfinished, os.open(unfinished, flags, 0o600), size, log_id)
        try:
            segment.write([codec.encode_segment_header(size, log_id)], 0)
            for offset in range(SEGMENT_HEADER_BYTES, size, len(_ZEROS)):
                segment.write([_ZEROS[: size - offset]], offset)
            os.fsync(segment._descriptor)
            segment.move_to(sequence)
        except BaseException:
            segment.close()
            segment.path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a segment. Raises `WrongFormat` or `Damaged` with its path."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header = os.pread(descriptor, SEGMENT_HEADER_BYTES, 0)
            size, log_id = codec.decode_segment_header(header)
            found = os.fstat(descriptor).st_size
            if found != size:
                raise Damaged(f"it has {found} of {size} bytes")
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, Damaged | WrongFormat):
                raise type(error)(f"{path} cannot be used: {error}") from None
            raise
        return cls(path, descriptor, size, log_id)

    @property
    def sequence(self) -> int:
        return int(self.path.name.partition(".")[0])

    def move_to(self, sequence: int) -> None:
        """Rename the file to another sequence, and sync the name."""
        self.path = self.path.rename(self.path.with_name(f"{sequence:016d}.segment"))
        sync_folder(self.path.parent)

    def close(self) -> None:
        with self._guard:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    # --- writing: raises OSError

    def write(self, buffers: Sequence[Bytes], offset: int) -> None:
        written = os.pwritev(self._descriptor, buffers, offset)
        size = sum([memoryview(buffer).nbytes for buffer in buffers])
        if written < size:
            # A signal, or a limit: the next call returns the reason.
            rest = b"".join(buffers)[written:]
            self.write([rest], offset + written)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    # --- reading

    def read(self, offset: int, size: int) -> bytes:
        with self._guard:
            if self._descriptor < 0:
                raise StoreClosed("the log was closed")
            try:
                return os.pread(self._descriptor, size, offset)
            except OSError as error:
                raise StoreFault(f"reading {self.path} failed: {error}") from error

    def scan(self, offset: int = SEGMENT_HEADER_BYTES) -> Iterator[Entry]:
        """Yield the entries that follow each other from an offset, up to the first other bytes."""
        window, base = b"", offset
        while offset + HEAD_BYTES <= self.size:
            if offset + HEAD_BYTES > base + len(window):
                window, base = self.read(offset, WINDOW_BYTES), offset
            head = codec.decode_head(window, offset - base, self.log_id)
            if head is None or offset + head.size > self.size:
                return
            if offset + head.size > base + len(window):
                window, base = self.read(offset, max(WINDOW_BYTES, head.size)), offset
            entry = self._entry(window, base, offset, head)
            if entry is None:
                return
            yield entry
            offset = entry.end

    def search(self, offset: int, least: int) -> Iterator[Entry]:
        """Yield all entries behind an offset with a number of at least `least`."""
        data, mark = self.read(offset, self.size - offset), self.log_id.to_bytes(8, "little")
        at = data.find(mark)
        while at >= 0:
            index = at - codec.ID_AT
            head = codec.decode_head(data, index, self.log_id)
            at += 1
            # Stale records are many, so their numbers are compared before their checksums.
            if head is not None and head.number >= least and index + head.size <= len(data):
                entry = self._entry(data, offset, offset + index, head)
                if entry is not None:
                    yield entry
                    at = index + head.size + codec.ID_AT
            at = data.find(mark, at)

    def _entry(self, data: bytes, base: int, offset: int, head: Head) -> Entry | None:
        index = offset - base
        if not codec.is_intact(data, index, head):
            return None
        begin = index + HEAD_BYTES
        return Entry(offset, head, data[begin : begin + head.length])


def open_segments(folder: Path) -> list[Segment]:
    """Open all segments of a folder by sequence. Raises `Damaged` if one is missing."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    names = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    segments: list[Segment] = []
    try:
        for path in names:
            segments.append(Segment.open(path))
            first, segment = segments[0], segments[-1]
            expected = first.sequence + len(segments) - 1
            if segment.sequence != expected:
                raise Damaged(f"{folder}: segment {expected:016d} is missing; restore a backup")
            if (segment.log_id, segment.size) != (first.log_id, first.size):
                raise Damaged(f"{path} belongs to another log than {first.path.name}")
    except BaseException:
        for segment in segments:
            segment.close()
        raise
    return segments
