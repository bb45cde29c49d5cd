"""Which offsets of a shard are done: all below a low mark, and ranges above it.

The bus keeps the same of every group and shard. A range never touches the low mark or
another range, so their number is the number of gaps: of messages, or runs of them, that
others have overtaken.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]  # from, to; `to` is not in it


class OffsetRanges:
    """Offsets are only ever added."""

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
        first = bisect_left(self._ends, start)  # the first that it touches, or that is behind
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
        """All below is done, too."""
        if low > self.low:
            self.add(self.low, low)

    def __contains__(self, offset: int) -> bool:
        if offset < self.low:
            return True
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def touches(self, offset: int) -> bool:
        """Would adding it leave the number of ranges as it is, or less?"""
        near = (offset - 1, offset, offset + 1)
        return offset <= self.low or any(one in self for one in near)

    def overlaps(self, start: int, end: int) -> bool:
        """Is any offset of [start, end) done?"""
        if start < self.low:
            return True
        at = bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < end

    def __len__(self) -> int:
        """How many ranges there are above the low mark."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)


def ranges_from_offsets(offsets: Iterable[int]) -> list[Range]:
    """The fewest ranges with exactly these offsets; quickest if they come in order."""
    found: list[Range] = []
    start = end = -1
    for offset in offsets:
        if offset == end:
            end += 1
        elif start <= offset < end:
            continue
        else:
            if start >= 0:
                found.append((start, end))
            start, end = offset, offset + 1
    if start >= 0:
        found.append((start, end))
    return merge_ranges(found)


def merge_ranges(ranges: Iterable[Range]) -> list[Range]:
    """The fewest ranges with exactly what these have, in order."""
    found: list[Range] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found
