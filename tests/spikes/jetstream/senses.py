"""What a bus knows by itself, without a request: two clocks.

The wall clock gives timestamps, which the tail of a topic holds back where one bus is
behind another. Leases run by the observer's own clock, from when it first saw the head
of the stage as it is now; so clocks of several buses need not agree, and a bus that was
started later only waits longer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Senses:
    wall_ns: Callable[[], int]
    clock_s: Callable[[], float]
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def expired(self, subject: str, sequence: int, lease_s: float) -> bool:
        """Whether the head has been the one of this sequence for so long."""
        since_s = self.saw(subject, sequence)
        return self.clock_s() - since_s >= lease_s

    def saw(self, subject: str, sequence: int) -> float:
        """Since when the head has been this one."""
        known = self._seen.get(subject)
        if known is None or known[0] != sequence:
            known = self._seen[subject] = sequence, self.clock_s()
        return known[1]
