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
    from polybus.bus.connection import Party
    from polybus.model.limits import Limits


@dataclass(slots=True)
class Window:
    start_s: float
    owed: int


class Stalls:
    def __init__(self, limits: Limits, cut: Callable[[Party, str], None]) -> None:
        self._limits = limits
        self._cut = cut
        self._windows: dict[Party, Window] = {}

    def add(self, party: Party, now_s: float) -> None:
        self._windows.setdefault(party, Window(now_s, _owed(party)))

    def forget(self, party: Party) -> None:
        self._windows.pop(party, None)

    def tick(self, now_s: float) -> None:
        for party, window in list(self._windows.items()):
            if party.pipe.backlog() == 0:
                del self._windows[party]
            elif now_s - window.start_s >= self._limits.slow_consumer_timeout_s:
                self._judge(party, window, now_s)

    def _judge(self, party: Party, window: Window, now_s: float) -> None:
        owed = _owed(party)
        wanted = self._limits.slow_consumer_min_bytes_per_s * (now_s - window.start_s)
        if window.owed - owed < min(wanted, window.owed):
            self._cut(party, "slow_consumer")
        else:
            self._windows[party] = Window(now_s, owed)


def _owed(party: Party) -> int:
    """What the client has not taken, be it with us or in our host's queue.

    That queue empties first, and while it does, nothing moves here.
    """
    return party.pipe.backlog() + party.pipe.unconfirmed()
