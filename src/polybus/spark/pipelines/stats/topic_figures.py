"""The figures of a topic, from which tables and report are made, and their histograms.

A histogram has counts of values in buckets, eight per doubling, so quantiles are exact within 9 %.
Bucket 0 has all values below 1, bucket n those from 2^((n-1)/8) to 2^(n/8). Histograms of parts add
up to the histogram of the whole, however it was divided: counts per batch, also of repeated
batches, give the same result as counting once.

A plot with many windows merges them, and their histograms with them: a plot over a month shows true
percentiles of each point, not means of percentiles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Self, TypeVar

MOST_POINTS = 240
PER_DOUBLING = 8
Bound = TypeVar("Bound", int, str)
Buckets = Mapping[int, int]  # bucket → number of values


def bucket_sql(value: str) -> str:
    """Return Spark SQL for the bucket of a number."""
    return (
        f"CAST(CASE WHEN {value} < 1 THEN 0 "
        f"ELSE 1 + FLOOR(LOG2({value}) * {PER_DOUBLING}) END AS INT)"
    )


def lower(bucket: int) -> float:
    return 0.0 if bucket <= 0 else float(2.0 ** ((bucket - 1) / PER_DOUBLING))


def upper(bucket: int) -> float:
    return float(2.0 ** (max(bucket, 0) / PER_DOUBLING))


class Histogram(NamedTuple):
    """Distribution of values: counts in buckets, and the largest value."""

    buckets: Buckets = MappingProxyType({})
    largest: float = math.inf

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        whole: Counter[int] = Counter()
        largest = 0.0
        for part in parts:
            whole.update(part.buckets)
            largest = max(largest, part.largest)
        return cls(whole, largest)

    def quantile(self, share: float) -> float | None:
        """Return an upper bound of this share of all values; None if there are no values."""
        bucket = find_quantile_bound(self.buckets, share)
        return None if bucket is None else min(upper(bucket), self.largest)


def find_quantile_bound(counts: Mapping[Bound, int], share: float) -> Bound | None:
    """Return the bucket that contains this quantile. Names of buckets must be numbers."""
    wanted = math.ceil(sum(counts.values()) * share)
    reached = 0
    for bound in sorted(counts, key=float):
        reached += counts[bound]
        if reached >= wanted > 0:
            return bound
    return None


NOTHING = Histogram()


@dataclass(frozen=True)
class TimeWindow:
    """Messages that the bus received within `width_s` seconds from `start_s`."""

    start_s: int
    width_s: int
    messages: int = 0
    bytes: int = 0
    sizes: Histogram = NOTHING  # of bytes
    latencies: Histogram = NOTHING  # of microseconds


@dataclass(frozen=True)
class KeyCount:
    name: str
    messages: int
    bytes: int


@dataclass(frozen=True)
class ShardCount:
    number: int
    messages: int
    bytes: int


@dataclass(frozen=True)
class GroupSample:
    """A group at one time. `ack_latency` has counts by upper bound in milliseconds."""

    at_s: float
    name: str
    members: int
    lag: int
    lag_s: float
    acked: int
    redelivered: int
    dead_lettered: int
    ack_latency: Mapping[str, int]


@dataclass(frozen=True)
class TopicFigures:
    """All values of a topic. `keys` are the largest keys, `distinct_keys` counts all of them."""

    name: str
    windows: Sequence[TimeWindow]
    keys: Sequence[KeyCount] = ()
    distinct_keys: int = 0
    keyless: int = 0
    shards: Sequence[ShardCount] = ()
    groups: Sequence[GroupSample] = ()  # every sample, the oldest first

    @property
    def messages(self) -> int:
        return sum(window.messages for window in self.windows)

    @property
    def bytes(self) -> int:
        return sum(window.bytes for window in self.windows)

    @property
    def sizes(self) -> Histogram:
        return Histogram.merge(window.sizes for window in self.windows)

    @property
    def latencies(self) -> Histogram:
        return Histogram.merge(window.latencies for window in self.windows)

    def points(self) -> list[TimeWindow]:
        return merge_windows(self.windows)


def merge_windows(windows: Sequence[TimeWindow], most: int = MOST_POINTS) -> list[TimeWindow]:
    """Return at most `most` windows of equal width, from the first window to the last.

    Times without messages are windows too.
    """
    if not windows:
        return []
    width = windows[0].width_s
    first, last = windows[0].start_s, windows[-1].start_s
    each = -(-((last - first) // width + 1) // most)
    step = each * width
    merged: dict[int, list[TimeWindow]] = {start: [] for start in range(first, last + 1, step)}
    for window in windows:
        merged[first + (window.start_s - first) // step * step].append(window)
    return [
        TimeWindow(
            start_s,
            step,
            sum(part.messages for part in parts),
            sum(part.bytes for part in parts),
            Histogram.merge(part.sizes for part in parts),
            Histogram.merge(part.latencies for part in parts),
        )
        for start_s, parts in merged.items()
    ]
