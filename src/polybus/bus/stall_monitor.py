"""Connections that do not read their answers: cut after a time limit.

A session that answers requests stops reading while its answers are pending, so its memory
does not grow. A client that never reads again differs from a slow one only by its rate, so
the rule is that of slow readers of a topic.
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

    def add(self, connection: Connection, now_s: float) -> None:
        self._windows.setdefault(connection, StallWindow(now_s, _untaken_bytes(connection)))

    def forget(self, connection: Connection) -> None:
        self._windows.pop(connection, None)

    def restart_windows(self, now_s: float) -> None:
        """Measure all connections from now on: the bus itself has paused."""
        for connection in self._windows:
            self._windows[connection] = StallWindow(now_s, _untaken_bytes(connection))

    def tick(self, now_s: float) -> None:
        for connection, window in list(self._windows.items()):
            if connection.pipe.backlog_bytes() == 0:
                del self._windows[connection]
            elif now_s - window.start_s >= self._limits.slow_consumer_timeout_s:
                self._check_rate(connection, window, now_s)

    def _check_rate(self, connection: Connection, window: StallWindow, now_s: float) -> None:
        owed = _untaken_bytes(connection)
        wanted = self._limits.slow_consumer_min_bytes_per_s * (now_s - window.start_s)
        if window.owed - owed < min(wanted, window.owed):
            self._cut(connection, "slow_consumer")
        else:
            self._windows[connection] = StallWindow(now_s, owed)


def _untaken_bytes(connection: Connection) -> int:
    """Return the bytes that the client has not taken, the kernel's send queue included.

    That queue empties first; until then the backlog of the connection does not change.
    """
    return connection.pipe.backlog_bytes() + connection.pipe.unconfirmed_bytes()
