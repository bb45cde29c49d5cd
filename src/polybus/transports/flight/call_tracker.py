"""Puts and reads in progress that have been decoded; refuses new calls once the port stops.

The compiled port limits their number because it sees calls earlier. Unanswered reads are counted
separately (the batch queue counts batches and actions): a stopping port waits for these and not
for idle streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from polybus.errors import StoreClosed


class CallTracker:
    def __init__(self) -> None:
        self._count = 0
        self._unanswered = 0
        self._changed = Condition()
        self._stopping = False

    @property
    def count(self) -> int:
        return self._count

    @contextmanager
    def begin_call(self) -> Iterator[None]:
        """Count a call until `end_call`, or only for the `with` if it raises."""
        self._enter(owed=False)
        try:
            yield
        except BaseException:
            self.end_call()
            raise

    @contextmanager
    def track_call(self) -> Iterator[None]:
        """Count a call that must be answered, for the length of a `with`."""
        self._enter(owed=True)
        try:
            yield
        finally:
            self.end_call(owed=True)

    def end_call(self, *, owed: bool = False) -> None:
        with self._changed:
            self._count -= 1
            self._unanswered -= owed
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until all calls are answered. Returns False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unanswered == 0, timeout_s)

    def check_open(self) -> None:
        """Raise `StoreClosed` once the port stops."""
        if self._stopping:
            raise StoreClosed("the bus is stopping")

    def _enter(self, owed: bool) -> None:
        with self._changed:
            self.check_open()
            self._count += 1
            self._unanswered += owed
