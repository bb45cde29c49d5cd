"""Delivery of messages to push readers, with back-pressure on publishers.

The kernel's fan-out does the work per message; this module has the rule for full readers.
A message to a full reader is not routed: the bus stops reading from its publisher, and the
bytes stay in the receive buffer. So an outbox never holds more than its high-water mark and
one buffer, with any number of publishers, and no message is lost. Publishers are resumed in
the order in which they were blocked.

A reader that stays over its mark and reads slower than slow_consumer_min_bytes_per_s is
cut, because one stuck process must not block all publishers of a topic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from polybus.kernel.fanout import BLOCKED, Fanout, Source
from polybus.kernel.outbox import LoopTurn, Outbox

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Connection, ConnectionIO
    from polybus.kernel.fanout import CollectedBatch, RouteResult
    from polybus.kernel.framing import Framing
    from polybus.model.limits import Limits


class Delivery:
    def __init__(
        self, fanout: Fanout, turn: LoopTurn, limits: Limits, cut: Callable[[Connection, str], None]
    ) -> None:
        self._fanout = fanout
        self._turn = turn
        self._limits = limits
        self._cut = cut
        self._full: dict[Outbox, None] = {}
        self._fresh: list[Outbox] = []  # became full since the last tick, so without a time
        self._trusted = Source(0, trusted=True)
        # Receives the batches of collected topics; set by the broker.
        self.on_collected: Callable[[Connection, CollectedBatch], None]
        # Called with a reader that was full and has room again.
        self.on_room_again: Callable[[Connection], None] = lambda connection: None
        self.waiting = 0
        self.sender: Connection | None = None  # of the routed buffer, for the log

    def open_outbox(self, pipe: ConnectionIO) -> Outbox:
        limits = self._limits
        return Outbox(
            pipe, self._turn, self, limits.outbox_high_water_bytes, limits.outbox_max_bytes
        )

    def route(
        self, connection: Connection, framing: Framing, buffer: Buffer, start: int, end: int
    ) -> RouteResult:
        """Route received frames. Reading from the publisher pauses if a reader is full."""
        self.sender = connection
        routed = self._fanout.route(framing, connection.source, buffer, start, end)
        self._push_outputs(connection, routed)
        return routed

    def publish(
        self, connection: Connection, topic: bytes, offsets: Buffer, bodies: Buffer
    ) -> RouteResult:
        """Route messages that are not in frames of the fan-out."""
        self.sender = connection
        routed = self._fanout.publish(connection.source, topic, offsets, bodies)
        self._push_outputs(connection, routed)
        return routed

    def _push_outputs(self, connection: Connection, routed: RouteResult) -> None:
        for outbox, data in routed.outputs:
            outbox.push(data)
        if routed.stop == BLOCKED and not connection.is_closed:
            self._wait(connection, routed.blocker)
        for batch in routed.collected:
            self.on_collected(connection, batch)

    def relay(self, connection: Connection, topic: bytes, offsets: Buffer, bodies: Buffer) -> bool:
        """Send messages that the policy allowed to push readers: all of them, or none.

        Returns False, and blocks the publisher, if one of the readers is full.
        """
        routed = self.relay_committed(topic, offsets, bodies)
        if routed.stop == BLOCKED and not connection.is_closed:
            self._wait(connection, routed.blocker)
        return routed.stop != BLOCKED

    def relay_skipping_full(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> int:
        """Send to push readers that have room. Returns the number of messages that others lost."""
        ends = memoryview(offsets).cast("B").cast("i")
        passed: list[Connection] = []
        lost = 0
        while self._fanout.subscriber_count(topic):
            routed = self.relay_committed(topic, ends, bodies)
            if routed.stop != BLOCKED:
                break
            ends = ends[routed.consumed :]
            lost += len(ends) - 1
            passed.append(routed.blocker.connection)
            self._fanout.detach(passed[-1].number, topic)
        for connection in passed:
            if not connection.is_closed:
                self._fanout.attach(connection.number, topic)
        return lost

    def relay_committed(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> RouteResult:
        """Send committed messages to push readers, up to the first full reader."""
        routed = self._fanout.publish(self._trusted, topic, offsets, bodies)
        for outbox, data in routed.outputs:
            outbox.push(data)
        return routed

    @property
    def relayed(self) -> tuple[int, int]:
        """Return messages and bytes of `relay_committed`, which were counted when they arrived."""
        return self._trusted.messages, self._trusted.bytes

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has left the fan-out.

        Publishers that it blocked resume in a later callback: a connection may leave while a
        buffer is being routed, and connections that end each other must not nest.
        """
        if connection.blocked_by is not None:
            self._stop_waiting(connection, connection.blocked_by)
        self._full.pop(connection.outbox, None)
        if connection.outbox.waiters:
            self._turn.call_soon(partial(self._release, connection.outbox))

    def tick(self, now_s: float) -> None:
        """Cut slow readers: over their mark for too long, and too few bytes taken."""
        for outbox in self._fresh:
            outbox.window_start_s = now_s
            outbox.window_taken = outbox.taken()
        self._fresh = []
        for outbox in [outbox for outbox in self._full if self._window_is_over(outbox, now_s)]:
            self._check_rate(outbox, now_s)

    def restart_windows(self) -> None:
        """Measure all full readers from the next tick on: the bus itself has paused."""
        self._fresh = list(self._full)

    # Events of an outbox (`OutboxOwner`).

    def on_filled(self, outbox: Outbox) -> None:
        self._full[outbox] = None
        self._fresh.append(outbox)

    def on_room(self, outbox: Outbox) -> None:
        self._full.pop(outbox, None)
        self.on_room_again(outbox.connection)
        self._release(outbox)

    def on_overflow(self, outbox: Outbox) -> None:
        self._cut(outbox.connection, "outbox_overflow")

    def _wait(self, connection: Connection, blocker: Outbox) -> None:
        if connection.blocked_by is not None:
            return  # it is leaving, and nothing makes it wait any more
        connection.blocked_by = blocker
        blocker.waiters[connection] = None
        self.waiting += 1
        connection.pipe.pause_reading()

    def _stop_waiting(self, connection: Connection, blocker: Outbox) -> None:
        del blocker.waiters[connection]
        connection.blocked_by = None
        self.waiting -= 1

    def _release(self, outbox: Outbox) -> None:
        """Resume blocked publishers one after another, as long as there is room."""
        while outbox.waiters and not outbox.full:
            connection = next(iter(outbox.waiters))
            self._stop_waiting(connection, outbox)
            if not connection.is_committing:
                connection.on_resume()

    def _window_is_over(self, outbox: Outbox, now_s: float) -> bool:
        return now_s - outbox.window_start_s >= self._limits.slow_consumer_timeout_s

    def _check_rate(self, outbox: Outbox, now_s: float) -> None:
        taken = outbox.taken()
        window_s = now_s - outbox.window_start_s
        if taken - outbox.window_taken < self._limits.slow_consumer_min_bytes_per_s * window_s:
            self._cut(outbox.connection, "slow_consumer")
        else:
            outbox.window_start_s = now_s
            outbox.window_taken = taken
