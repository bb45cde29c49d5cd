"""What a connection has received and its program has not read.

Over `max_unread_bytes` the socket is left alone, so that the bus feels it, and in the end
the service. Unless something else is waited for on the connection: that would wait for
ever, if the program reads only when it has it. Then it is read on, and over
`cut_unread_bytes` whoever holds most is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from polybus.errors import LimitReached, PolybusError


class BudgetHolder(Protocol):
    """Who holds bytes that nobody has read yet, and can be cut."""

    held_bytes: int

    def fail(self, error: PolybusError) -> None: ...


class ReceiveBudget:
    """See the top of the file. `read_on` is told to begin and to stop reading."""

    def __init__(
        self,
        most: int,
        cut_at: int,
        is_waited_for: Callable[[], bool],
        read_on: Callable[[bool], None],
        cut: Callable[[BudgetHolder], None],
    ) -> None:
        self._most = most
        self._cut_at = cut_at
        self._is_awaited = is_waited_for
        self._set_reading = read_on
        self._cut = cut
        self._held_bytes = 0
        self._holders: set[BudgetHolder] = set()
        self._reading = True

    @property
    def is_over(self) -> bool:
        return self._held_bytes > self._most

    def charge(self, by: BudgetHolder, nbytes: int) -> None:
        by.held_bytes += nbytes
        self._held_bytes += nbytes
        self._holders.add(by)

    def release(self, by: BudgetHolder) -> None:
        """All that it holds was read, or thrown away."""
        self._held_bytes -= by.held_bytes
        by.held_bytes = 0
        self._holders.discard(by)
        self.on_wait()

    def on_wait(self) -> None:
        """Somebody waits for what may lie in the socket."""
        if not self._reading:
            self.update_reading()

    def update_reading(self) -> None:
        wanted = not self.is_over or self._is_awaited()
        if wanted and self._held_bytes > self._cut_at:
            self._cut_fullest()
        if wanted != self._reading:
            self._reading = wanted
            self._set_reading(wanted)

    def _cut_fullest(self) -> None:
        fullest = max(self._holders, key=lambda one: one.held_bytes)
        fullest.fail(LimitReached("cut_unread_bytes", "too much was received and not read"))
        self._cut(fullest)
        self.release(fullest)
