"""Outcomes are told on a thread of their own.

The store's thread must not run what programs hang on their futures: it would hold up
everybody's commits, and a program that waits for the store there would wait for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread, current_thread

log = logging.getLogger("polybus.native.inprocess")


class CallbackThread:
    """Steps, taken in the order they came."""

    def __init__(self) -> None:
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="polybus-embedded-answers", daemon=True)
        self._thread.start()

    def add(self, step: Callable[[], None]) -> None:
        self._steps.put(step)

    def close(self) -> None:
        """All steps that were added are taken first."""
        self._steps.put(None)
        if current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step()
            except Exception:  # one program's trouble is not everyone's
                log.exception("a step failed")
