"""Moves messages from publishers to readers, and holds publishers back.

The kernel's fan-out does the work per message; here is the rule for full
readers. A message that would reach a full reader is not routed: its publisher
is not read from, and what it has sent stays where it is. So an outbox never
holds more than its mark and one buffer, whatever the number of publishers, and
nothing is lost. Publishers wait in the order in which they came.

A reader that stays over its mark and takes next to nothing is cut, because one
stuck process must not hold up all who publish to it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from polybus.bus.outbox import LoopTurn, Outbox
from polybus.kernel.fanout import BLOCKED, Fanout, Source

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
        self._fresh: list[Outbox] = []  # became full since the last tick: no clock was read then
        self._trusted = Source(0, trusted=True)
        # Who takes the batches of collected topics; set by the broker.
        self.on_collected: Callable[[Connection, CollectedBatch], None] = lambda party, batch: None
        # Who is told of a reader that was full and has room again.
        self.on_room_again: Callable[[Connection], None] = lambda party: None
        self.waiting = 0
        self.sender: Connection | None = None  # whose buffer was routed last, for the judge's log

    def open_outbox(self, pipe: ConnectionIO) -> Outbox:
        limits = self._limits
        return Outbox(
            pipe, self._turn, self, limits.outbox_high_water_bytes, limits.outbox_max_bytes
        )

    def route(
        self, party: Connection, framing: Framing, buffer: Buffer, start: int, end: int
    ) -> RouteResult:
        """Routes received frames; a publisher that must wait is not read from meanwhile."""
        self.sender = party
        routed = self._fanout.route(framing, party.source, buffer, start, end)
        self._push_outputs(party, routed)
        return routed

    def publish(
        self, party: Connection, topic: bytes, offsets: Buffer, bodies: Buffer
    ) -> RouteResult:
        """The same for messages that are not in frames of the fan-out's."""
        self.sender = party
        routed = self._fanout.publish(party.source, topic, offsets, bodies)
        self._push_outputs(party, routed)
        return routed

    def _push_outputs(self, party: Connection, routed: RouteResult) -> None:
        for outbox, data in routed.outputs:
            outbox.push(data)
        if routed.stop == BLOCKED and not party.is_closed:
            self._wait(party, routed.blocker)
        for batch in routed.collected:
            self.on_collected(party, batch)

    def relay(self, party: Connection, topic: bytes, offsets: Buffer, bodies: Buffer) -> bool:
        """Sends messages that were judged already to push readers: all of them, or none.

        None if one of the readers is full: then the party waits.
        """
        routed = self.relay_committed(topic, offsets, bodies)
        if routed.stop == BLOCKED and not party.is_closed:
            self._wait(party, routed.blocker)
        return routed.stop != BLOCKED

    def relay_skipping_full(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> int:
        """To push readers who have room, if nobody can wait; how many messages others lost."""
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
        for party in passed:
            if not party.is_closed:
                self._fanout.attach(party.number, topic)
        return lost

    def relay_committed(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> RouteResult:
        """Sends what was taken already to push readers, up to the first that is full."""
        routed = self._fanout.publish(self._trusted, topic, offsets, bodies)
        for outbox, data in routed.outputs:
            outbox.push(data)
        return routed

    @property
    def relayed(self) -> tuple[int, int]:
        """Messages and bytes that `relay` has taken: counted as received elsewhere, too."""
        return self._trusted.messages, self._trusted.bytes

    def forget(self, party: Connection) -> None:
        """The party has left the fan-out: it waits for nobody, and nobody waits for it.

        Those who did go on soon, not at once: a party may leave while a buffer is being
        routed, and a chain of parties that end each other must not nest.
        """
        if party.blocked_by is not None:
            self._stop_waiting(party, party.blocked_by)
        self._full.pop(party.outbox, None)
        if party.outbox.waiters:
            self._turn.call_soon(partial(self._release, party.outbox))

    def tick(self, now_s: float) -> None:
        """Cuts readers that were over their mark for too long and took too little."""
        for outbox in self._fresh:
            outbox.window_start_s = now_s
            outbox.window_taken = outbox.taken()
        self._fresh = []
        for outbox in [outbox for outbox in self._full if self._window_is_over(outbox, now_s)]:
            self._check_rate(outbox, now_s)

    # What an outbox reports (outbox.Owner).

    def on_filled(self, outbox: Outbox) -> None:
        self._full[outbox] = None
        self._fresh.append(outbox)
        self._fanout.set_full(outbox.connection.number, True)

    def on_room(self, outbox: Outbox) -> None:
        self._full.pop(outbox, None)
        self._fanout.set_full(outbox.connection.number, False)
        self.on_room_again(outbox.connection)
        self._release(outbox)

    def on_overflow(self, outbox: Outbox) -> None:
        self._cut(outbox.connection, "outbox_overflow")

    def _wait(self, party: Connection, blocker: Outbox) -> None:
        if party.blocked_by is not None:
            return  # it is leaving, and nothing makes it wait any more
        party.blocked_by = blocker
        blocker.waiters[party] = None
        self.waiting += 1
        party.pipe.pause_reading()

    def _stop_waiting(self, party: Connection, blocker: Outbox) -> None:
        del blocker.waiters[party]
        party.blocked_by = None
        self.waiting -= 1

    def _release(self, outbox: Outbox) -> None:
        """Lets waiting publishers go on, one after another, as long as there is room."""
        while outbox.waiters and not outbox.full:
            party = next(iter(outbox.waiters))
            self._stop_waiting(party, outbox)
            if not party.is_committing:
                party.on_resume()

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
