"""Offsets of a shard that are acked: all below a low-water mark, and ranges above it.

Ranges are half-open [start, end) pairs in ascending order. They never touch each other or
the low-water mark, so their number is the number of gaps. Stored records keep them as tuples
and change them with the functions here. A consumer, which adds a few offsets at a time, keeps
them in `OffsetRanges`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
Ranges = tuple[Range, ...]

MAX_OFFSET = 1 << 63  # sorts after every end, so (offset, MAX_OFFSET) follows a range at offset


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Return the fewest ranges that hold the same offsets, in ascending order."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def add_ranges(low: int, ranges: Ranges, more: Iterable[Range]) -> tuple[int, Ranges]:
    """Return the low-water mark and the ranges after `more`, in any order, is acked as well."""
    merged = merge_ranges((*ranges, *more))
    absorbed = 0
    for start, end in merged:
        if start > low:
            break
        low = max(low, end)
        absorbed += 1
    return low, tuple(merged[absorbed:])


def contains(low: int, ranges: Ranges, offset: int) -> bool:
    return offset < low or find_range(ranges, offset) is not None


def find_range(ranges: Ranges, offset: int) -> Range | None:
    """Return the range that holds the offset, or None."""
    index = bisect_right(ranges, (offset, MAX_OFFSET)) - 1
    return ranges[index] if index >= 0 and offset < ranges[index][1] else None


def unacked_parts(low: int, ranges: Ranges, more: Iterable[Range]) -> list[Range]:
    """Return the parts of `more` that are not acked yet."""
    parts = []
    for start, end in more:
        at = max(start, low)
        # Begin with the range at or before `at`: earlier ones cannot overlap.
        for acked_start, acked_end in ranges[max(bisect_right(ranges, (at, MAX_OFFSET)) - 1, 0) :]:
            if acked_start >= end:
                break
            if at < acked_start:
                parts.append((at, acked_start))
            at = max(at, acked_end)
        if at < end:
            parts.append((at, end))
    return parts


def count_offsets(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def count_unacked(low: int, ranges: Ranges, before: int) -> int:
    """Return how many offsets below `before` are not acked."""
    if before <= low:
        return 0
    acked = sum(min(end, before) - start for start, end in ranges if start < before)
    return before - low - acked


def ranges_from_offsets(offsets: Iterable[int]) -> list[Range]:
    """Return the fewest ranges that hold exactly these offsets; fastest if they are in order."""
    ranges: list[Range] = []
    start = end = -1
    for offset in offsets:
        if offset == end:
            end += 1
        elif start <= offset < end:
            continue
        else:
            if start >= 0:
                ranges.append((start, end))
            start, end = offset, offset + 1
    if start >= 0:
        ranges.append((start, end))
    return merge_ranges(ranges)


class OffsetRanges:
    """A mutable set of offsets by the same rules. Offsets are only added, never removed."""

    __slots__ = ("_ends", "_starts", "low")

    def __init__(self, low: int = 0, ranges: Iterable[Iterable[int]] = ()) -> None:
        self.low = low
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        start = max(start, self.low)
        if start >= end:
            return
        # [first, last) are the ranges that the new one touches; it replaces all of them.
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        if start == self.low:
            self.low = end
            self._starts[first:last] = []
            self._ends[first:last] = []
        else:
            self._starts[first:last] = [start]
            self._ends[first:last] = [end]

    def raise_low(self, low: int) -> None:
        """Add all offsets below `low`."""
        if low > self.low:
            self.add(self.low, low)

    def __contains__(self, offset: int) -> bool:
        if offset < self.low:
            return True
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def touches(self, offset: int) -> bool:
        """Return whether adding the offset would not increase the number of ranges."""
        neighbours = (offset - 1, offset, offset + 1)
        return offset <= self.low or any(neighbour in self for neighbour in neighbours)

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether any offset of [start, end) is in the set."""
        if start < self.low:
            return True
        at = bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < end

    def __len__(self) -> int:
        """Return the number of ranges above the low-water mark."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)
