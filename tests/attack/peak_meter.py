"""Samples the threads and the memory of a bus while it is attacked.

    with PeakMeter(bus) as peak:
        attack(bus)
    peak.threads, peak.growth_bytes

Both are the largest values above those at the start, so every part of the bus that the attack
uses must have been used once before.
"""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Self

from tests.rig.observer import rss_bytes, thread_count

if TYPE_CHECKING:
    from polybus.testing.bus_process import BusProcess

MIB = 1 << 20
MAX_GROWTH_BYTES = 200 * MIB  # of any attack
INTERVAL_S = 0.002


class PeakMeter:
    def __init__(self, bus: BusProcess) -> None:
        self._pid = bus.pid
        self._threads_before, self._before = thread_count(bus.pid), rss_bytes(bus.pid)
        self._after = self._before
        self._done = Event()
        self._thread = Thread(target=self._sample)
        self.threads = self.growth_bytes = 0

    def check_memory(self, most_bytes: int = MAX_GROWTH_BYTES) -> None:
        grown = self.growth_bytes
        assert grown <= most_bytes, f"{grown >> 20} MiB above an idle bus"

    def figures(self) -> dict[str, float]:
        """Return the values for the record of a soak run; `_max` names are not summed."""
        return {
            "threads_max": self.threads,
            "rss_before_mb_max": self._before >> 20,
            "rss_growth_mb_max": self.growth_bytes >> 20,
            "rss_after_mb_max": self._after >> 20,
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._after = rss_bytes(self._pid)

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self.threads = max(self.threads, thread_count(self._pid) - self._threads_before)
            self.growth_bytes = max(self.growth_bytes, rss_bytes(self._pid) - self._before)
