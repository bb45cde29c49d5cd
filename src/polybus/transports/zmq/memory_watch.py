"""A bound on the memory that libzmq holds for the connections of a ROUTER.

libzmq limits the size of a frame and counts complete messages, but a message of endlessly many
frames grows in its memory, and so do replies that a peer does not read. The kernel counts the
received and the acknowledged bytes of a connection, and the listener counts the bytes it has
read. The difference is in libzmq:

    unfinished       bytes received and not read: an incomplete or a queued message
    unacknowledged   bytes sent and not acknowledged

A connection over its bound is cut. If all together are over theirs, the one with the most is
cut. Frames take more memory than bytes on the wire, empty ones thirty times as much, so the
memory of the process counts too: if it grows past the bound while bytes are unfinished, the
connection with the most unfinished bytes is cut. A client whose connection is cut sends its
request again, so an innocent client still succeeds. A peer that reads almost nothing of its
replies is cut like every slow consumer.

Some bytes belong to no message: the handshake and heartbeats. If almost no bytes are left after
a message, they are taken for those. Between messages they are allowed for by time.

Checks are frequent because a local peer can send gigabytes per second, and more frequent while
bytes are unfinished. They take at most 1/CHECK_COST_RATIO of the loop's time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from polybus.transports.descriptor_reserve import descriptor_reserve
from polybus.transports.zmq.router_connections import RouterConnection

CHECK_INTERVAL_S: Final = 0.05
BUSY_CHECK_INTERVAL_S: Final = 0.005  # while many bytes are in transfer
BASELINE_INTERVAL_S: Final = 1.0  # between measurements of a process without unfinished bytes
CHECK_COST_RATIO: Final = 20  # the pause is at least this many times the cost of a check
MINOR_BYTES: Final = 1 << 20  # less is a message in transfer and needs no action
HANDSHAKE_BYTES: Final = 4096  # the most that a handshake takes, after a complete message
HEARTBEAT_BYTES_PER_S: Final = 64
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
STATM: Final = "/proc/self/statm"
STATM_BYTES: Final = 256  # seven numbers


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Bounds in bytes per connection and in total, and the definition of a slow consumer."""

    max_unfinished: int
    max_unread: int
    slow_timeout_s: float
    slow_bytes_per_s: int


class MemoryWatch:
    """`has_waiting` returns True if complete messages are queued; `cut` is called for each cut."""

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
        self.set_baseline()
        # Of all connections at the last check, and bytes sent since: many replies can be sent
        # between two checks.
        self._unacknowledged_bytes = 0

    def set_baseline(self) -> None:
        """Measure the process. Growth counts from here on. Called before connections begin."""
        self._baseline_bytes, self._baseline_s = process_bytes(), self._clock()

    def check(self) -> float:
        """Measure all connections and cut those over a bound. Returns the pause in seconds."""
        began_s = self._clock()
        unfinished = unacknowledged = 0
        most: RouterConnection | None = None
        for connection in self._open():
            self._measure(connection, began_s)
            self._check_connection(connection, began_s)
            unfinished += connection.unfinished
            unacknowledged += connection.unacknowledged_bytes
            if most is None or connection.unfinished > most.unfinished:
                most = connection
        self._unacknowledged_bytes = unacknowledged
        self._check_total(unfinished, most)
        is_busy = max(unfinished, unacknowledged) >= MINOR_BYTES
        pause_s = BUSY_CHECK_INTERVAL_S if is_busy else CHECK_INTERVAL_S
        return max(pause_s, CHECK_COST_RATIO * (self._clock() - began_s))

    def add_sent(self, size: int) -> None:
        """Count sent bytes as unacknowledged until the next check."""
        self._unacknowledged_bytes += size

    def is_full(self, connection: RouterConnection) -> bool:
        """Return True if the connection, or all together, have too many unacknowledged bytes."""
        bound = self._bounds.max_unfinished  # room for one largest message, not for two
        if (
            connection.unacknowledged_bytes <= bound // 2
            and self._unacknowledged_bytes <= self._bounds.max_unread
        ):
            return False  # without asking the kernel
        self._measure(connection, self._clock())
        return (
            connection.unacknowledged_bytes > bound
            or self._unacknowledged_bytes > self._bounds.max_unread
        )

    def _measure(self, connection: RouterConnection, now_s: float) -> None:
        counted = connection.read_byte_counts()
        if counted is None:
            return
        received, connection.acked = counted
        # True if a complete message was read since the last check.
        is_new = connection.received != connection.whole
        connection.whole = connection.received
        if connection.is_guessed:  # counts of a Unix socket are not comparable with messages
            connection.baseline = received if is_new else connection.baseline
            connection.unfinished = received - connection.baseline
            return
        held = received - connection.received_bytes - connection.baseline
        if held < 0 or (is_new and held <= HANDSHAKE_BYTES):
            connection.baseline += held
            connection.baseline_s, held = now_s, 0
        connection.unfinished = max(
            0, held - round(HEARTBEAT_BYTES_PER_S * (now_s - connection.baseline_s))
        )

    def _check_connection(self, connection: RouterConnection, now_s: float) -> None:
        bounds = self._bounds
        # While messages are queued, the bytes may be complete messages, which are not its fault.
        if connection.unfinished > bounds.max_unfinished and not self._has_waiting():
            self._cut_connection(connection, "max_unfinished_bytes")
        elif connection.unacknowledged_bytes <= MINOR_BYTES:
            connection.slow_since_s = None
        elif connection.slow_since_s is None:
            connection.slow_since_s, connection.slow_acked = now_s, connection.acked
        elif (passed_s := now_s - connection.slow_since_s) > bounds.slow_timeout_s:
            if connection.acked - connection.slow_acked < bounds.slow_bytes_per_s * passed_s:
                self._cut_connection(connection, "slow_consumer")
            connection.slow_since_s = None

    def _check_total(self, unfinished: int, most: RouterConnection | None) -> None:
        if most is None or most.unfinished < MINOR_BYTES:
            if self._clock() - self._baseline_s >= BASELINE_INTERVAL_S:
                self.set_baseline()
            return
        grown = process_bytes() - self._baseline_bytes
        if max(unfinished, grown) > self._bounds.max_unread:
            self._cut_connection(most, "max_unread_bytes")
            self._baseline_bytes += max(0, grown)

    def _cut_connection(self, connection: RouterConnection, reason: str) -> None:
        if connection.cut():
            connection.unfinished = 0
            self._cut(connection, reason)


def process_bytes() -> int:
    """Return the memory of this process without file-backed pages."""
    try:
        statm = descriptor_reserve.open_file(STATM, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        _, resident, shared, *_ = os.read(statm, STATM_BYTES).split()
    finally:
        os.close(statm)
    return (int(resident) - int(shared)) * PAGE_BYTES
