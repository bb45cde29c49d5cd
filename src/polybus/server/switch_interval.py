"""The switch interval: how long a thread may keep the GIL while others wait for it.

The loop does some ten microseconds at a time, and every client of its dialects waits for
it. At Python's default of 5 ms one busy thread took an echo's p50 from 10 µs to 5 ms. What
the loop waits for in turn are a few threads: rqueue's p99 beside a full native load was
1.6 to 3 ms at 0.5 ms, and 0.8 at 0.05.

But those threads wait for each other as well: one that brings batches, one that writes, one
for each consumer that follows. Where each loses the lock every 0.05 ms, all of them are
done when the last is, and it is passed on far more often: at 1000 messages a second FDQ's
p50 was 5.2 ms from end to end, and 4.3 at 0.5. So turns are short only while connections of
the loop send something. Busy threads check that more often than the loop itself (the store,
with every transaction), so a first request does not wait for the next tick.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

SHORT_S: Final = 0.00005
LONG_S: Final = 0.0005


class SwitchInterval:
    def __init__(self, brought: Callable[[], int]) -> None:
        """`brought` counts up with all that the loop's connections bring."""
        self._count_received = brought
        self._seen = self._noted = 0
        sys.setswitchinterval(SHORT_S)

    def note_reads(self, reads: int) -> int:
        """How often connections were read from so far; any thread. If that is more than before,
        turns are short from now on."""
        if reads != self._noted:
            self._noted = reads
            sys.setswitchinterval(SHORT_S)
        return reads

    def tick(self) -> None:
        """A few times a second."""
        seen, self._seen = self._seen, self._count_received()
        sys.setswitchinterval(LONG_S if seen == self._seen else SHORT_S)
