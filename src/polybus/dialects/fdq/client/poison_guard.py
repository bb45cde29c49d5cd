"""How what is suspect is run: told to the bus before, and no two of them at a time.

What a consumer was handed when it died is suspect to the next one: any of it may have been
what ended it. The bus is told of each before it begins, and charges what was running when a
consumer dies. Were two begun at once, one that ends its process again and again would take
another with it each time, until that is given up as well.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, Event
from typing import TYPE_CHECKING

from polybus.dialects.fdq.client.group_member import ConsumerClosing

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.handler_run import HandlerRun

POLL_S = 0.05  # at whether the consumer closes


class PoisonGuard:
    """`tell` tells the bus that a run begins, and what runs beside it."""

    def __init__(self, tell: Callable[[HandlerRun], None], stopping: Event) -> None:
        self._report_start = tell
        self._stopping = stopping
        self._changed = Condition()
        self._run: HandlerRun | None = None

    def begin(self, run: HandlerRun) -> None:
        """When its turn has come and the bus knows; `Closing` if it does not come any more."""
        with self._changed:
            while self._run is not None:
                self._check()
                self._changed.wait(POLL_S)
            self._check()
            self._run = run
        self._report_start(run)

    def end(self, run: HandlerRun) -> None:
        """However it ended; of another, or once more, it changes nothing."""
        if self._run is run:
            with self._changed:
                self._run = None
                self._changed.notify()

    def _check(self) -> None:
        if self._stopping.is_set():
            raise ConsumerClosing
