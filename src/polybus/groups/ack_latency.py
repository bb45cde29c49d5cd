"""How long it takes from a message's commit to its ack, as a histogram.

When messages are handed out, the times of a few of them are noted; an ack looks up
the one at or before each range. So the counts are exact, and a bucket is off by at
most the time between two of the notes. Of what another bus process handed out, which is
acked after a restart, the first message is looked up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from polybus.model.offset_ranges import Range

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000)
BUCKET_NAMES: Final = (*map(str, BOUNDS_MS), "inf")
SAMPLES_PER_BATCH: Final = 32
MAX_SAMPLES: Final = 2048  # of a shard: more than are handed out before the first are acked


class CommitTimes:
    """When messages of one shard were committed, as far as it was noted."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._times_ns: list[int] = []

    def add_samples(self, offsets: memoryview[int], times: memoryview[int]) -> None:
        """Columns of messages that are handed out: int64, in order."""
        if self._offsets and offsets[0] <= self._offsets[-1]:  # handed out again
            self.discard_below()
        step = -(-len(offsets) // SAMPLES_PER_BATCH)
        self._offsets += offsets[::step].tolist()
        self._times_ns += times[::step].tolist()
        if len(self._offsets) > MAX_SAMPLES:
            del self._offsets[:-MAX_SAMPLES], self._times_ns[:-MAX_SAMPLES]

    def discard_below(self, below: int | None = None) -> None:
        """All, or all that is of no use for offsets from `below` on."""
        last = len(self._offsets) if below is None else bisect_right(self._offsets, below) - 1
        if last > 0:
            del self._offsets[:last], self._times_ns[:last]

    def count_acked(
        self,
        latency: Mapping[str, int],
        acked: Iterable[Range],
        now_ns: int,
        look_up: Callable[[int], int | None],
    ) -> Mapping[str, int]:
        """The histogram with these messages in it; `look_up` is asked for times not noted."""
        found: dict[str, int] = {}
        for start, end in acked:
            if not self._offsets or start < self._offsets[0]:
                self._insert_sample(start, look_up(start))
            self._add(found, start, end, now_ns)
        if not found:
            return latency
        return {**latency, **{name: latency.get(name, 0) + n for name, n in found.items()}}

    def _insert_sample(self, offset: int, time_ns: int | None) -> None:
        if time_ns is not None:
            self._offsets.insert(0, offset)
            self._times_ns.insert(0, time_ns)

    def _add(self, found: dict[str, int], start: int, end: int, now_ns: int) -> None:
        index = bisect_right(self._offsets, start) - 1
        if index < 0:
            return
        while start < end:
            last = index + 1 == len(self._offsets)
            until = end if last else min(end, self._offsets[index + 1])
            name = bucket_name(now_ns - self._times_ns[index])
            found[name] = found.get(name, 0) + until - start
            start, index = until, index + 1


def bucket_name(elapsed_ns: int) -> str:
    return BUCKET_NAMES[bisect_left(BOUNDS_MS, elapsed_ns / 1_000_000)]
