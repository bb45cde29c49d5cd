"""Recovery: finds the end of a log when it is opened, and tells a torn tail from damage.

The next record has the number after the last one and an epoch that is not lower. Other bytes
there are the end of the log, unless a later record proves that the expected one was durable
before: each record holds the number up to which the log was synced when it was written. Then
acknowledged records are damaged, and the log is not opened.

A log that was closed has a mark behind its last record. Then only its last segment is read.
Otherwise all records are read, and those that were not known to be synced are written once
more: after a failed sync the kernel takes pages for clean that the disk does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from polybus.errors import Damaged
from polybus.store.log import codec
from polybus.store.log.codec import HEAD_BYTES, SEGMENT_HEADER_BYTES, Head
from polybus.store.log.segment import Segment
from polybus.store.log.write_ahead_log import Tail

EMPTY: Final = Tail(0, 0)


@dataclass
class UsedSegment:
    """A segment with records; `first` is the number of its first one."""

    segment: Segment
    first: int


@dataclass
class LogEnd:
    """What recovery knows of a log: its used segments, and where the next record goes."""

    used: list[UsedSegment] = field(default_factory=list)
    offset: int = SEGMENT_HEADER_BYTES
    tail: Tail = EMPTY
    synced: int = 0  # the highest number that a record reports as synced
    is_closed: bool = False  # the mark of a clean close is at the offset

    def read_segment(self, segment: Segment) -> bool:
        """Add the records of a segment. Returns False if it does not continue the log."""
        for offset, head, _ in segment.scan():
            if not self.is_next(head):
                break
            codec.check_version(head, f"{segment.path} at offset {offset}")
            if head.kind == codec.CLOSED:
                self.is_closed = True
                self.tail = Tail(head.epoch, self.tail.number)
                break
            if offset == SEGMENT_HEADER_BYTES:
                self.used.append(UsedSegment(segment, head.number))
            self.tail = Tail(head.epoch, head.number)
            self.synced = max(self.synced, head.synced)
            self.offset = offset + head.size
        return bool(self.used) and self.used[-1].segment is segment

    def is_next(self, head: Head) -> bool:
        last = self.tail
        return (head.number == last.number + 1 or not last.number) and head.epoch >= last.epoch


def recover(segments: list[Segment]) -> LogEnd:
    """Return the end of a log, with all records before it on disk.

    Raises `Damaged` for acknowledged records that are not there, `WrongFormat` for records of
    another version, and OSError.
    """
    end = _read_closed(segments)
    if end is None:
        end = _read_all(segments)
        _write_unsynced(end)
    if not end.used:
        end.used.append(UsedSegment(segments[0], 0))
    if end.is_closed:
        # Before the first append: a mark that is left behind would pass for the end.
        segment = end.used[-1].segment
        segment.write([bytes(HEAD_BYTES)], end.offset)
        segment.sync()
    return end


def _read_closed(segments: list[Segment]) -> LogEnd | None:
    """Return the end of a log that was closed; None if it was not."""
    used: list[UsedSegment] = []
    end = LogEnd()
    for segment in segments:
        entry = next(segment.scan(), None)
        # Numbers grow from segment to segment, so a lower one is stale.
        if entry is None or entry.head.kind != codec.RECORD:
            break
        head = entry.head
        if used and (head.number <= used[-1].first or head.epoch < end.tail.epoch):
            break
        used.append(UsedSegment(segment, head.number))
        end.tail = Tail(head.epoch, head.number - 1)
    if not used:
        return None
    end.read_segment(used[-1].segment)
    end.used = used
    return end if end.is_closed else None


def _read_all(segments: list[Segment]) -> LogEnd:
    end = LogEnd()
    for segment in segments:
        if not end.read_segment(segment):
            break
    # The next owner must exceed the leftovers, too: otherwise one could follow a new record.
    epoch = max([end.tail.epoch, *_leftover_epochs(end, segments[len(end.used) :])])
    end.tail = Tail(epoch, end.tail.number)
    return end


def _leftover_epochs(end: LogEnd, rest: list[Segment]) -> Iterator[int]:
    """Yield epochs of records behind the end. Raises `Damaged` if one proves a lost record."""
    expected = end.tail.number + 1
    places = [(used.segment, end.offset) for used in end.used[-1:]]
    places += [(segment, SEGMENT_HEADER_BYTES) for segment in rest]
    for place in places:
        for offset, head, _ in place[0].search(place[1], expected):
            if head.synced >= expected:
                where = " or ".join(f"{at.path} at offset {start}" for at, start in places[:2])
                raise Damaged(
                    f"{where}: record {expected} is damaged or missing, but was on disk before "
                    f"record {head.number} in {place[0].path.name} at offset {offset} was "
                    "written; restore a backup"
                )
            yield head.epoch


def _write_unsynced(end: LogEnd) -> None:
    """Write the records again that may not be on disk, although the page cache has them."""
    last_numbers = [after.first - 1 for after in end.used[1:]] + [end.tail.number]
    for used, last in zip(end.used, last_numbers, strict=False):  # an empty log has none
        if last > end.synced:
            is_last = used is end.used[-1]
            size = (end.offset if is_last else used.segment.size) - SEGMENT_HEADER_BYTES
            used.segment.write(
                [used.segment.read(SEGMENT_HEADER_BYTES, size)], SEGMENT_HEADER_BYTES
            )
            used.segment.sync()
