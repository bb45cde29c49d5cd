"""The values of a report.

A plot with many windows merges them, and their histograms with them: a plot over a month shows true
percentiles of each point, not means of percentiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polybus.spark.pipelines.stats.report.histogram import Histogram

MOST_POINTS = 240
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
        return sum(one.messages for one in self.windows)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.windows)

    @property
    def sizes(self) -> Histogram:
        return Histogram.merge(one.sizes for one in self.windows)

    @property
    def latencies(self) -> Histogram:
        return Histogram.merge(one.latencies for one in self.windows)

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
    found: dict[int, list[TimeWindow]] = {start: [] for start in range(first, last + 1, step)}
    for one in windows:
        found[first + (one.start_s - first) // step * step].append(one)
    return [_sum(start, step, parts) for start, parts in found.items()]


def _sum(start_s: int, width_s: int, parts: Sequence[TimeWindow]) -> TimeWindow:
    return TimeWindow(
        start_s,
        width_s,
        sum(one.messages for one in parts),
        sum(one.bytes for one in parts),
        Histogram.merge(one.sizes for one in parts),
        Histogram.merge(one.latencies for one in parts),
    )
