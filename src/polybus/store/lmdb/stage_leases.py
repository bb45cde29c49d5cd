"""How long stages may still wait: by this process's monotonic clock, never the wall's.

Leases are not stored, their lengths are: whoever opens the store gives every stage a
fresh one, so a stop of the bus costs nobody their stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StageLeases:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[int, float] = {}
        self._ended: dict[int, float] = {}  # by what is being gathered
        self._leaving: dict[int, float] = {}  # by what is on its way to the disk

    def start(self, stage: int, lease_s: float) -> None:
        self._ends[stage] = self._clock() + lease_s

    def end(self, stage: int) -> None:
        end = self._ends.pop(stage, None)
        if end is not None:
            self._ended[stage] = end

    def mark_in_flight(self) -> None:
        """What was gathered is on its way to the disk."""
        self._leaving |= self._ended
        self._ended = {}

    def confirm(self) -> None:
        """What was on its way is on disk."""
        self._leaving = {}

    def rollback(self) -> None:
        """What ended leases was not written: they go on as before."""
        self._ends = self._leaving | self._ended | self._ends
        self._leaving, self._ended = {}, {}

    def is_active(self, stage: int) -> bool:
        end = self._ends.get(stage)
        return end is not None and self._clock() < end

    def expired(self) -> list[int]:
        now = self._clock()
        return [stage for stage, end in list(self._ends.items()) if end <= now]

    def next_expiry_s(self) -> float | None:
        """Until the next one runs out; None if there is none."""
        ends = list(self._ends.values())
        return max(0.0, min(ends) - self._clock()) if ends else None
