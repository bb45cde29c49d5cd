"""Limits the rate of repeated log lines.

Within one second the first `max_repeats_per_s` lines of an event are written. The rest are
counted, and after the second one line with `repeated=COUNT` replaces them. The counters of
the bus count every event in any case. Tracebacks are long, so their window is a minute.

Lines that differ in reason, quota or user are not repeats of each other, because a client
that floods the log must not hide the lines of others.

The limiter is the first processor of the log, so a suppressed line costs almost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from structlog import DropEvent

WINDOW_S = 1.0
TRACEBACK_WINDOW_S = 60.0
# Events and reasons are constants in the code, but user namespaces give one user thousands of
# uids. All kinds beyond this limit share one count.
MAX_KINDS = 200
SUMMARY = "repeated"
# Fields that distinguish two events of the same name.
DISTINGUISHING_FIELDS = ("reason", "quota", "user", "kind")


class EventKind(NamedTuple):
    """Lines of one kind are repeats of each other. `facts` are its DISTINGUISHING_FIELDS."""

    level: str
    event: str
    facts: tuple[tuple[str, str], ...] = ()


OVERFLOW_KIND = EventKind("warning", "too many kinds of events")


@dataclass(slots=True)
class _Window:
    start: float
    length_s: float
    seen: int = 0
    held_back: int = 0


class LogRateLimiter:
    """A log processor: drops events that repeat too often, and counts them."""

    def __init__(self, max_repeats_per_s: int, clock: Callable[[], float]) -> None:
        self._limit = max_repeats_per_s
        self._clock = clock
        self._windows: dict[EventKind, _Window] = {}
        self._mutex = threading.Lock()  # the store's threads log, too

    def __call__(
        self, _logger: Any, level: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if SUMMARY not in event:
            length_s = TRACEBACK_WINDOW_S if event.get("exc_info") else WINDOW_S
            facts = tuple((key, str(event[key])) for key in DISTINGUISHING_FIELDS if key in event)
            if not self._admit(EventKind(level, str(event.get("event")), facts), length_s):
                raise DropEvent
        return event

    def summaries(self, final: bool = False) -> list[tuple[EventKind, int]]:
        """Return the suppressed lines of each window that has ended; `final` ends all windows."""
        now = self._clock()
        with self._mutex:
            over = [k for k, w in self._windows.items() if final or now - w.start >= w.length_s]
            closed = [(kind, self._windows.pop(kind)) for kind in over]
        return [(kind, window.held_back) for kind, window in closed if window.held_back]

    def _admit(self, kind: EventKind, length_s: float) -> bool:
        now = self._clock()
        with self._mutex:
            window = self._windows.get(kind)
            if window is None:
                if len(self._windows) >= MAX_KINDS:
                    kind = OVERFLOW_KIND
                window = self._windows.setdefault(kind, _Window(now, length_s))
            if now - window.start >= window.length_s:
                window.start, window.seen = now, 0
            window.seen += 1
            if window.seen <= self._limit:
                return True
            window.held_back += 1
            return False
