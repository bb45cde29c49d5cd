"""A bound on what libzmq holds for a ROUTER's connections.

libzmq bounds a frame and counts whole messages, but a message of endlessly many frames
grows in its memory unseen, and so does an answer that nobody takes. The kernel knows what
came in and what was confirmed, and we know what we took, so a look at that tells what must
be in between:

    unfinished   what has come and was not taken: a message that is not whole, or one that waits
    untaken      what was sent to it and not confirmed

A connection over its bound is cut, and if all of them together are over theirs, the one
with most. Frames weigh more in memory than on the wire, empty ones thirty times; so the
process's own memory counts, too: if it grows past the bound while something is unfinished,
the connection with most of that is taken for the reason. A client whose connection is cut
sends its request again; whoever meant no harm comes through. One that takes next to nothing
of what it is owed is slow, and cut like every slow consumer.

Some bytes are no message's: those of the handshake, and heartbeats. Whenever next to nothing
is left behind a message they are taken for all of it, and while none comes they are allowed
for by time.

Looks come often, since a local peer sends gigabytes a second, and more often while something
is unfinished; but they never take more than a small share of the loop's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polybus.transports.zmq.router_connections import RouterConnection

CHECK_INTERVAL_S: Final = 0.05
BUSY_CHECK_INTERVAL_S: Final = 0.005  # while much is on its way
CHECK_COST_RATIO: Final = 20  # between looks passes so many times what a look takes
MINOR_BYTES: Final = 1 << 20  # less than this is a message on its way, and no trouble
HANDSHAKE_BYTES: Final = 4096  # behind a whole message: no more than a handshake takes
HEARTBEAT_BYTES_PER_S: Final = 64
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Bytes of one connection and of all; and how slow is too slow for how long."""

    max_unfinished: int
    max_unread: int
    slow_timeout_s: float
    slow_bytes_per_s: int


class MemoryWatch:
    """`has_waiting` says whether whole messages wait to be read; `cut` is told who was ended."""

    def __init__(
        self,
        open_now: Callable[[], list[RouterConnection]],
        bounds: MemoryBounds,
        clock: Callable[[], float],
        has_waiting: Callable[[], bool],
        cut: Callable[[RouterConnection, str], Any],
    ) -> None:
        self._open = open_now
        self._bounds = bounds
        self._clock = clock
        self._has_waiting = has_waiting
        self._cut = cut
        self._baseline_bytes = process_bytes()
        self._untaken = 0  # of all connections: at the last look, and what was sent since

    def check(self) -> float:
        """Measures all, cuts who is over; the seconds until it should be done again."""
        began_s = self._clock()
        unfinished = untaken = 0
        most: RouterConnection | None = None
        for one in self._open():
            self._measure(one, began_s)
            self._check_connection(one, began_s)
            unfinished += one.unfinished
            untaken += one.unacknowledged_bytes
            if most is None or one.unfinished > most.unfinished:
                most = one
        self._untaken = untaken
        self._check_total(unfinished, most)
        soon_s = (
            CHECK_INTERVAL_S if max(unfinished, untaken) < MINOR_BYTES else BUSY_CHECK_INTERVAL_S
        )
        return max(soon_s, CHECK_COST_RATIO * (self._clock() - began_s))

    def add_sent(self, size: int) -> None:
        """To one of them: it has not taken it before the next look tells."""
        self._untaken += size

    def is_full(self, one: RouterConnection) -> bool:
        """Has it, or have all together, left too much of what they were sent?"""
        bound = self._bounds.max_unfinished  # the largest message has room, and not two
        if one.unacknowledged_bytes <= bound // 2 and self._untaken <= self._bounds.max_unread:
            return False
        self._measure(one, self._clock())
        return one.unacknowledged_bytes > bound or self._untaken > self._bounds.max_unread

    def _measure(self, one: RouterConnection, now_s: float) -> None:
        counted = one.read_byte_counts()
        if counted is None:
            return
        came, one.acked = counted
        is_new = one.received != one.whole  # a whole message was taken since
        one.whole = one.received
        if one.is_guessed:
            one.baseline = came if is_new else one.baseline
            one.unfinished = came - one.baseline
            return
        held = came - one.received_bytes - one.baseline
        if held < 0 or (is_new and held <= HANDSHAKE_BYTES):
            one.baseline += held
            one.baseline_s, held = now_s, 0
        one.unfinished = max(0, held - round(HEARTBEAT_BYTES_PER_S * (now_s - one.baseline_s)))

    def _check_connection(self, one: RouterConnection, now_s: float) -> None:
        if self._is_too_much(one.unfinished):
            self._cut_connection(one, "max_unfinished_bytes")
        elif one.unacknowledged_bytes <= MINOR_BYTES:
            one.slow_since_s = None
        elif one.slow_since_s is None:
            one.slow_since_s, one.slow_acked = now_s, one.acked
        elif (passed_s := now_s - one.slow_since_s) > self._bounds.slow_timeout_s:
            if one.acked - one.slow_acked < self._bounds.slow_bytes_per_s * passed_s:
                self._cut_connection(one, "slow_consumer")
            one.slow_since_s = None

    def _is_too_much(self, unfinished: int) -> bool:
        """While messages wait for us to take them, it may be whole ones that are so much."""
        return unfinished > self._bounds.max_unfinished and not self._has_waiting()

    def _check_total(self, unfinished: int, most: RouterConnection | None) -> None:
        now = process_bytes()
        if most is None or most.unfinished < MINOR_BYTES:
            self._baseline_bytes = now
            return
        grown = now - self._baseline_bytes
        if max(unfinished, grown) > self._bounds.max_unread:
            self._cut_connection(most, "max_unread_bytes")
            self._baseline_bytes += max(0, grown)

    def _cut_connection(self, one: RouterConnection, reason: str) -> None:
        if one.cut():
            one.unfinished = 0
            self._cut(one, reason)


def process_bytes() -> int:
    """What this process takes up in memory, without pages of files, which the system lends it."""
    try:
        _, resident, shared, *_ = STATM.read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE_BYTES
