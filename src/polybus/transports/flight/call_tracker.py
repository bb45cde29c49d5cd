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


class Calls:
    def __init__(self) -> None:
        self._count = 0
        self._owed = 0
        self._changed = Condition()
        self._stopping = False

    @property
    def count(self) -> int:
        return self._count

    @contextmanager
    def entering(self, *, owed: bool = False) -> Iterator[None]:
        """A call begins; it goes on until `leave`, unless this ends with an error."""
        self._enter(owed)
        try:
            yield
        except BaseException:
            self.leave(owed=owed)
            raise

    @contextmanager
    def one(self) -> Iterator[None]:
        """A call that is owed something, for as long as it lasts."""
        self._enter(owed=True)
        try:
            yield
        finally:
            self.leave(owed=True)

    def leave(self, *, owed: bool = False) -> None:
        with self._changed:
            self._count -= 1
            self._owed -= owed
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True

    def wait_settled(self, timeout_s: float) -> bool:
        """Until nobody is owed anything; False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._owed == 0, timeout_s)

    def check(self) -> None:
        """`StoreClosed` once the port stops."""
        if self._stopping:
            raise StoreClosed("the bus is stopping")

    def _enter(self, owed: bool) -> None:
        with self._changed:
            self.check()
            self._count += 1
            self._owed += owed
