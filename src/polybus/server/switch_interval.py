"""The switch interval: how long a thread may keep the GIL while others wait for it.

A callback of the loop runs about ten microseconds, and every client of its dialects waits for
it. At Python's default interval of 5 ms one busy thread raised the p50 of an echo from 10 µs
to 5 ms. Beside a full native load, rqueue's p99 was 1.6 to 3 ms at 0.5 ms, and 0.8 ms at 0.05 ms.

The other threads wait for each other, too: a gRPC thread that brings a batch, the store's
writer, one thread per following consumer. At 0.05 ms they pass the lock on far more often: at
1000 messages per second FDQ's end-to-end p50 was 5.2 ms, and 4.3 ms at 0.5 ms. So the interval
is short only while connections of the loop send something. The store's writer checks that with
every transaction, so a first request does not wait for the next tick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

SHORT_S: Final = 0.00005
LONG_S: Final = 0.0005


class SwitchInterval:
    def __init__(self, count_received: Callable[[], int]) -> None:
        """`count_received` returns a count that grows with each read of the loop's connections."""
        self._count_received = count_received
        self._seen = self._noted = 0
        sys.setswitchinterval(SHORT_S)

    def note_reads(self, reads: int) -> int:
        """Shorten the interval if `reads` has changed. May be called from any thread.

        Returns `reads`.
        """
        if reads != self._noted:
            self._noted = reads
            sys.setswitchinterval(SHORT_S)
        return reads

    def tick(self) -> None:
        """Set the interval by the reads since the last tick. Called a few times per second."""
        seen, self._seen = self._seen, self._count_received()
        sys.setswitchinterval(LONG_S if seen == self._seen else SHORT_S)
