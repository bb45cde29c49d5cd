"""A low mark and ranges above it: which offsets of a shard are acked.

All below `low` is. Ranges are [from, to) pairs in order, that neither touch each
other nor the low mark.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def add(low: int, ranges: Ranges, more: Iterable[Range]) -> tuple[int, Ranges]:
    """The low mark and ranges once `more`, in any order, is acked as well."""
    merged: list[Range] = []
    for start, end in sorted((*ranges, *more)):
        if start <= low:
            low = max(low, end)
        elif merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return low, tuple(merged)


def contains(low: int, ranges: Ranges, offset: int) -> bool:
    found = range_of(ranges, offset)
    return offset < low or found is not None


def range_of(ranges: Ranges, offset: int) -> Range | None:
    """The range that the offset is in."""
    index = bisect_right(ranges, (offset, 1 << 63)) - 1
    return ranges[index] if index >= 0 and offset < ranges[index][1] else None


def unacked_parts(low: int, ranges: Ranges, more: Iterable[Range]) -> list[Range]:
    """The parts of `more` that are not acked yet."""
    found = []
    for start, end in more:
        at = max(start, low)
        for first, behind in ranges[max(bisect_right(ranges, (at, 1 << 63)) - 1, 0) :]:
            if first >= end:
                break
            if at < first:
                found.append((at, first))
            at = max(at, behind)
        if at < end:
            found.append((at, end))
    return found


def count(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def count_unacked(low: int, ranges: Ranges, before: int) -> int:
    """How many offsets below `before` are not acked."""
    if before <= low:
        return 0
    acked = sum(min(end, before) - start for start, end in ranges if start < before)
    return before - low - acked
