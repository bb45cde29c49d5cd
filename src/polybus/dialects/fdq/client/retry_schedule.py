"""When a failed message is run again: later after each failure, and never in step.

A schedule holds what is due at which time. It knows no clock: the time is passed in.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from polybus.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s` after the first failure, doubling up to `last_s`; of that, by chance, at
    least half: consumers that failed together do not come back together."""

    first_s: float = 0.1
    last_s: float = 30.0
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.last_s:
            raise UsageError("backoff: 0 ≤ first ≤ last, in seconds")

    def pause_s(self, failures: int) -> float:
        """Before the run that follows so many failed ones."""
        doubled = min(max(failures, 1) - 1, 64)
        return min(self.first_s * 2.0**doubled, self.last_s) * (0.5 + self.random() / 2)


class RetrySchedule(Generic[T]):
    """Things, each with a time at which it is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._serial = count()  # what is due at the same time comes in the order it was put

    def put(self, due_s: float, what: T) -> None:
        heapq.heappush(self._heap, (due_s, next(self._serial), what))

    def take(self, now_s: float) -> list[T]:
        """What is due by now, the earliest first."""
        found = []
        while self._heap and self._heap[0][0] <= now_s:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def next_s(self) -> float | None:
        """When something is due next; None if there is nothing."""
        return self._heap[0][0] if self._heap else None

    def clear(self) -> None:
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)
