"""The journal of a client: events in a file, each on disk before anything depends on it.

    polybus pirate journal 1\\n
    length, its checksum, the event's checksum (4 bytes each, big-endian), event    … repeated

An event is appended and synced before the next one begins. So a crash of the process or the
machine leaves at most one torn event, the last, on which nothing depends yet. It is cut off.
Any other unreadable data is damage and is reported, not skipped.

A journal that has grown is rewritten as one event in a new file, which is synced and renamed
over the old one; then the folder is synced. The name always refers to a complete journal. The
first journal is created in the same way.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Final
from zlib import crc32

import msgpack

from polybus.dialects.pirate.client.journal_state import (
    EpochOpened,
    Event,
    IdAssigned,
    JournalState,
    MessageRead,
    PositionsDoubted,
    PositionsTrusted,
    RequestAnswered,
    RequestForgotten,
    RequestRecorded,
    StateSnapshot,
)
from polybus.errors import Damaged, StoreFault, StoreFull, WrongFormat

NAME: Final = "journal"
NEW: Final = "journal.new"
MAGIC: Final = b"polybus pirate journal 1\n"
HEADER: Final = Struct(">III")
SECTOR_BYTES: Final = 512  # a disk writes a sector entirely or not at all
# Rewritten when it has grown by this much and to several times its rewritten size.
GROWTH_BYTES: Final = 64 * 1024
GROWTH_TIMES: Final = 4
# The number of each kind of event in the file. Never reused.
KINDS: Final[dict[int, type[Event]]] = {
    1: IdAssigned,
    2: EpochOpened,
    3: RequestRecorded,
    4: RequestAnswered,
    5: RequestForgotten,
    6: MessageRead,
    7: PositionsTrusted,
    8: StateSnapshot,
    9: PositionsDoubted,
}
NUMBERS: Final = {kind: number for number, kind in KINDS.items()}


# --- events and bytes


def encode_event(event: Event) -> bytes:
    payload: bytes = msgpack.packb([NUMBERS[type(event)], *event])
    return HEADER.pack(len(payload), _length_checksum(len(payload)), crc32(payload)) + payload


def _length_checksum(length: int) -> int:
    """Return the checksum of a length.

    Without it a wrong length would make all later events look like one torn event.
    """
    return crc32(length.to_bytes(4, "big"))


def decode_event(payload: bytes) -> Event:
    number, *fields = msgpack.unpackb(payload)
    return KINDS[number](*fields)


def _scan_events(data: bytes) -> tuple[list[Event], int]:
    """Return the events of a file, and the position after the last complete one."""
    if not data.startswith(MAGIC):
        raise WrongFormat("not a journal of this version")
    events: list[Event] = []
    at = len(MAGIC)
    while len(data) - at >= HEADER.size:
        length, of_length, of_payload = HEADER.unpack_from(data, at)
        payload = data[at + HEADER.size : at + HEADER.size + length]
        whole = of_length == _length_checksum(length) and len(payload) == length
        if not whole or crc32(payload) != of_payload:
            break
        events.append(decode_event(payload))
        at += HEADER.size + length
    return events, at


def _is_torn(tail: bytes, at: int) -> bool:
    """Return True if `tail` can be the rest of one event whose write was interrupted.

    A file may have grown before its sectors were written. Those are zeros.
    """
    if len(tail) < HEADER.size:
        return True
    length, of_length, _ = HEADER.unpack_from(tail)
    if of_length == _length_checksum(length):
        return bool(HEADER.size + length >= len(tail))
    cut = -at % SECTOR_BYTES
    parts = tail[:cut][: HEADER.size], tail[cut : HEADER.size]
    return any(part and not any(part) for part in parts)


# --- the file


class Journal:
    """An open journal and the state of its events. Not thread-safe."""

    def __init__(
        self, folder: Path, descriptor: int, state: JournalState, end: int, least: int
    ) -> None:
        self.state = state
        self._folder = folder
        self._descriptor = descriptor
        self._end = end
        self._compacted_bytes = least  # its size when it was last rewritten
        self._broken = ""

    def append(self, event: Event) -> None:
        """Write an event to disk and apply it. Raises `StoreFull` with nothing changed."""
        if self._broken:
            raise StoreFault(f"{self._folder}: {self._broken}; open the folder again")
        data = encode_event(event)
        try:
            _write(self._descriptor, data, self._end)
        except OSError as error:
            # The next event must follow a complete one.
            try:
                os.ftruncate(self._descriptor, self._end)
            except OSError as failure:
                self._broken = f"the journal has a partial event ({failure.strerror})"
            raise _store_error(self._folder, error) from None
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            # After a failed sync the state of the disk is unknown, and a retry could succeed
            # without having written anything.
            self._broken = f"cannot sync the journal ({error.strerror})"
            raise _store_error(self._folder, error) from None
        self._end += len(data)
        self.state.apply(event)
        grown = self._end - self._compacted_bytes
        has_grown = grown > max(GROWTH_BYTES, (GROWTH_TIMES - 1) * self._compacted_bytes)
        # Not right after a request: its body would be written a second time.
        if has_grown and not isinstance(event, RequestRecorded):
            self._rewrite()

    def close(self) -> None:
        os.close(self._descriptor)

    def _rewrite(self) -> None:
        """Replace the journal by a shorter one. Keeps the old one if there is no room."""
        try:
            descriptor, size = _write_new_journal(self._folder, self.state.snapshot())
        except (StoreFault, StoreFull):
            # If the new file has the name already, events in the old one would be lost.
            if not _is_same_file(self._folder / NAME, self._descriptor):
                self._broken = "the new journal may not be on disk"
            return
        os.close(self._descriptor)
        self._descriptor, self._end, self._compacted_bytes = descriptor, size, size


def open_journal(folder: Path) -> Journal | None:
    """Open the journal of a folder and cut off a torn event. Returns None if there is none."""
    with suppress(FileNotFoundError):
        (folder / NEW).unlink()  # an interrupted rewrite
    try:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        state, end = _read(folder / NAME, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return Journal(folder, descriptor, state, end, 0)


def create_journal(folder: Path, client_id: bytes) -> Journal:
    descriptor, size = _write_new_journal(folder, IdAssigned(client_id))
    state = JournalState()
    state.apply(IdAssigned(client_id))
    return Journal(folder, descriptor, state, size, size)


def _read(path: Path, descriptor: int) -> tuple[JournalState, int]:
    """Return the state of a file and its size, without a torn event, which is cut off."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        data = file.read()
    try:
        events, end = _scan_events(data)
        if not events or not _is_torn(data[end:], end):
            raise Damaged(f"unreadable from byte {end}")
        state = JournalState()
        for event in events:
            state.apply(event)
    except WrongFormat as error:
        raise WrongFormat(f"{path}: {error}") from None
    except Exception as error:  # also valid checksums with invalid content
        raise Damaged(f"{path} is damaged ({error}); see 'A lost folder' in the guide") from None
    if end < len(data):
        os.ftruncate(descriptor, end)
        os.fsync(descriptor)
    return state, end


def _write_new_journal(folder: Path, event: Event) -> tuple[int, int]:
    """Write a journal with one event and rename it into place. Returns descriptor and size."""
    data = MAGIC + encode_event(event)
    new = folder / NEW
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(new, flags, 0o600)
        try:
            _write(descriptor, data, 0)
            os.fsync(descriptor)
            new.rename(folder / NAME)
            sync_folder(folder)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise _store_error(folder, error) from None
    return descriptor, len(data)


def _write(descriptor: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view, at)
        view, at = view[done:], at + done


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _store_error(folder: Path, error: OSError) -> StoreFault | StoreFull:
    kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreFault
    return kind(f"{folder}: {error.strerror}")
