"""The two clocks of a bus.

The wall clock gives timestamps; the tail of a topic keeps them from going back when the
clock of one bus is behind another. A lease runs by the observer's own clock, from the moment
it first saw the current head of the stage. So the clocks of several buses need not agree, and
a bus that starts later only waits longer.
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
        """Return whether the head has had this sequence for `lease_s`."""
        since_s = self.saw(subject, sequence)
        return self.clock_s() - since_s >= lease_s

    def saw(self, subject: str, sequence: int) -> float:
        """Return the time at which this bus first saw the head with this sequence."""
        known = self._seen.get(subject)
        if known is None or known[0] != sequence:
            known = self._seen[subject] = sequence, self.clock_s()
        return known[1]
