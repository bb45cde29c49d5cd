"""Parties that do not take their answers: bounded in time, as they are in memory.

A session that answers requests stops reading while its answers are not taken, so
what it holds does not grow. But it holds it, and a client that never reads again
is indistinguishable from one that is slow, except by its rate: the same rule as
for slow readers of a topic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polybus.bus.connection import Connection
    from polybus.model.limits import Limits


@dataclass(slots=True)
class StallWindow:
    start_s: float
    owed: int


class StallMonitor:
    def __init__(self, limits: Limits, cut: Callable[[Connection, str], None]) -> None:
        self._limits = limits
        self._cut = cut
        self._windows: dict[Connection, StallWindow] = {}

    def add(self, party: Connection, now_s: float) -> None:
        self._windows.setdefault(party, StallWindow(now_s, _untaken_bytes(party)))

    def forget(self, party: Connection) -> None:
        self._windows.pop(party, None)

    def tick(self, now_s: float) -> None:
        for party, window in list(self._windows.items()):
            if party.pipe.backlog_bytes() == 0:
                del self._windows[party]
            elif now_s - window.start_s >= self._limits.slow_consumer_timeout_s:
                self._check_rate(party, window, now_s)

    def _check_rate(self, party: Connection, window: StallWindow, now_s: float) -> None:
        owed = _untaken_bytes(party)
        wanted = self._limits.slow_consumer_min_bytes_per_s * (now_s - window.start_s)
        if window.owed - owed < min(wanted, window.owed):
            self._cut(party, "slow_consumer")
        else:
            self._windows[party] = StallWindow(now_s, owed)


def _untaken_bytes(party: Connection) -> int:
    """What the client has not taken, be it with us or in our host's queue.

    That queue empties first, and while it does, nothing moves here.
    """
    return party.pipe.backlog_bytes() + party.pipe.unconfirmed_bytes()
