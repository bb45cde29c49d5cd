"""The thread that makes the coordinator's time pass.

If it comes late, the whole process stood still, and has heard of nobody meanwhile:
then its members are given that time on top.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from polybus.errors import StoreClosed

if TYPE_CHECKING:
    from polybus.groups.coordinator import Coordinator

_log = logging.getLogger("polybus.groups")

TICK_S: Final = 0.25  # a dead consumer is noticed that much later at most
LATE_S: Final = 1.0


class CoordinatorTimer:
    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="polybus-groups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a tick under way, which may need the one who calls."""
        self._stopped.set()

    def _run(self) -> None:
        last = self._clock()
        while not self._stopped.wait(TICK_S):
            now = self._clock()
            try:
                if now - last > TICK_S + LATE_S:
                    self._coordinator.extend_deadlines(now - last)
                self._coordinator.tick()
            except StoreClosed:
                return
            except Exception:
                _log.exception("the groups could not be looked after; tried again")
            last = now
