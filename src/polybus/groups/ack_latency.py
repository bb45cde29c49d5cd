"""The time from a message's commit to its ack, as a histogram.

When messages are handed out, the commit times of a few of them are sampled. An ack uses the
sample at or before each range. So the counts are exact, and the error of a bucket is at most
the time between two samples. For messages that were handed out before a restart of the bus,
the first one is looked up in the store.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Final

from polybus.model.offset_ranges import Range

BOUNDS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000)
BUCKET_NAMES: Final = (*map(str, BOUNDS_MS), "inf")
SAMPLES_PER_BATCH: Final = 32
MAX_SAMPLES: Final = 2048  # per shard: more than are handed out before the first ack


class CommitTimes:
    """Samples of the commit times of one shard's messages."""

    def __init__(self) -> None:
        # A fetch adds samples while an ack uses them, and both lists must have the same length.
        # It is not the shard's lock, because an ack holds that one during its commit.
        self._lock = Lock()
        self._offsets: list[int] = []
        self._times_ns: list[int] = []

    def add_samples(self, offsets: memoryview[int], times: memoryview[int]) -> None:
        """Sample messages that are handed out; both columns are int64 in order."""
        step = -(-len(offsets) // SAMPLES_PER_BATCH)
        with self._lock:
            if self._offsets and offsets[0] <= self._offsets[-1]:  # handed out again
                self._offsets.clear()
                self._times_ns.clear()
            self._offsets += offsets[::step].tolist()
            self._times_ns += times[::step].tolist()
            if len(self._offsets) > MAX_SAMPLES:
                del self._offsets[:-MAX_SAMPLES], self._times_ns[:-MAX_SAMPLES]

    def discard_below(self, below: int | None = None) -> None:
        """Discard samples that offsets >= `below` do not need; None discards all."""
        with self._lock:
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
        """Return the histogram with these messages; `look_up` reads a time without a sample."""
        counts: dict[str, int] = {}
        with self._lock:
            for start, end in acked:
                if not self._offsets or start < self._offsets[0]:
                    time_ns = look_up(start)
                    if time_ns is None:
                        continue
                    self._offsets.insert(0, start)
                    self._times_ns.insert(0, time_ns)
                index, at = bisect_right(self._offsets, start) - 1, start
                while at < end:
                    is_last = index + 1 == len(self._offsets)
                    until = end if is_last else min(end, self._offsets[index + 1])
                    elapsed_ms = (now_ns - self._times_ns[index]) / 1_000_000
                    name = BUCKET_NAMES[bisect_left(BOUNDS_MS, elapsed_ms)]
                    counts[name] = counts.get(name, 0) + until - at
                    at, index = until, index + 1
        if not counts:
            return latency
        return {**latency, **{name: latency.get(name, 0) + n for name, n in counts.items()}}
