"""Calls under way that have said what they want; none new once the port stops.

How many there may be is the compiled port's affair, which sees them earlier. What is *owed*
is counted besides: actions and reads (the desk counts batches). A port that stops waits for
that, and not for streams that are open and idle.
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
    def begin_call(self, *, owed: bool = False) -> Iterator[None]:
        """A call begins; it goes on until `leave`, unless this ends with an error."""
        self._enter(owed)
        try:
            yield
        except BaseException:
            self.end_call(owed=owed)
            raise

    @contextmanager
    def track_call(self) -> Iterator[None]:
        """A call that is owed something, for as long as it lasts."""
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
        """Until nobody is owed anything; False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unanswered == 0, timeout_s)

    def check_open(self) -> None:
        """`StoreClosed` once the port stops."""
        if self._stopping:
            raise StoreClosed("the bus is stopping")

    def _enter(self, owed: bool) -> None:
        with self._changed:
            self.check_open()
            self._count += 1
            self._unanswered += owed
