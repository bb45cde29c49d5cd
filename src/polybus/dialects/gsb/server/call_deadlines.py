"""Calls that take too long.

A call's clock starts again with each reply. It stands while the service is out of credit,
and while the bus does not read from it: neither is the service's fault.

One timer serves all calls. It is set for the earliest deadline, when it fires all open
calls are looked at, and it is set again: so a call that is answered in time costs nothing
but a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from polybus.dialects.gsb.server.call_table import overdue

if TYPE_CHECKING:
    from polybus.bus.timers import Timer, Timers
    from polybus.dialects.gsb.server.call_table import Call, Desk, End

NEVER = float("inf")
MIN_STEP_S = 0.01  # between two looks: how late a deadline may be noticed
IDLE_RATIO = 20  # a look that takes long comes less often: it has a twentieth of the loop at most


class CallDeadlines:
    """`expire` is told of each call that is over its deadline."""

    def __init__(
        self,
        ends: Iterable[End],
        desk: Desk,
        timers: Timers,
        clock: Callable[[], float],
        expire: Callable[[Call], None],
    ) -> None:
        self._ends = ends
        self._desk = desk
        self._timers = timers
        self._clock = clock
        self._expire = expire
        self._timer: Timer | None = None
        desk.next_due_s = NEVER

    def watch(self, due_s: float) -> None:
        """There is a call with this deadline."""
        if due_s < self._desk.next_due_s:
            self._set(due_s)

    def _set(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._desk.next_due_s = due_s
        if due_s < NEVER:
            self._timer = self._timers.call_later(
                max(0.0, due_s - self._clock()), self._check_calls
            )

    def _check_calls(self) -> None:
        self._timer = None
        self._desk.next_due_s = NEVER
        now_s = self._clock()
        late, nearest_s = overdue(self._ends, now_s)
        if nearest_s is not None:
            took_s = self._clock() - now_s
            self._set(max(nearest_s, now_s + MIN_STEP_S, now_s + IDLE_RATIO * took_s))
        for call in late:
            if call.caller.calls.get(call.request_id) is call:
                self._expire(call)
