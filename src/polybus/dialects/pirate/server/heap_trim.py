"""Memory that was freed goes back to the system, once it is much.

The allocator keeps what is freed for whoever needs memory next (`kernel/allocator`): that is for
buffers that come and go all the time. Messages of many megabytes do not, and what they leave
behind would be kept for ever. Looking for it takes some milliseconds, so it is done seldom.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from polybus.kernel.allocator import give_back_freed
from polybus.transports.zmq.memory_watch import process_bytes

TRIM_THRESHOLD_BYTES: Final = 64 << 20
EVERY_S: Final = 5.0


class HeapTrimmer:
    def __init__(
        self,
        measure: Callable[[], int] = process_bytes,
        give_back: Callable[[], object] = give_back_freed,
    ) -> None:
        self._measure = measure
        self._give_back = give_back
        self._least_bytes = measure()
        self._next_s = 0.0

    def trim_if_due(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        if self._measure() > self._least_bytes + TRIM_THRESHOLD_BYTES:
            self._give_back()
            self._least_bytes = self._measure()
        else:
            self._least_bytes = min(self._least_bytes, self._measure())
