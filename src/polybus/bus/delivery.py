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

from polybus.bus.outbox import Outbox, Turn
from polybus.kernel.fanout import BLOCKED, Fanout, Source

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Party, Pipe
    from polybus.kernel.fanout import Collected, Routed
    from polybus.kernel.framing import Framing
    from polybus.model.limits import Limits


class Delivery:
    def __init__(
        self, fanout: Fanout, turn: Turn, limits: Limits, cut: Callable[[Party, str], None]
    ) -> None:
        self._fanout = fanout
        self._turn = turn
        self._limits = limits
        self._cut = cut
        self._full: dict[Outbox, None] = {}
        self._fresh: list[Outbox] = []  # became full since the last tick: no clock was read then
        self._trusted = Source(0, trusted=True)
        # Who takes the batches of collected topics; set by the broker.
        self.collected: Callable[[Party, Collected], None] = lambda party, batch: None
        # Who is told of a reader that was full and has room again.
        self.relieved: Callable[[Party], None] = lambda party: None
        self.waiting = 0
        self.sender: Party | None = None  # whose buffer was routed last, for the judge's log

    def open_outbox(self, pipe: Pipe) -> Outbox:
        limits = self._limits
        return Outbox(
            pipe, self._turn, self, limits.outbox_high_water_bytes, limits.outbox_max_bytes
        )

    def route(self, party: Party, framing: Framing, buffer: Buffer, start: int, end: int) -> Routed:
        """Routes received frames; a publisher that must wait is not read from meanwhile."""
        self.sender = party
        routed = self._fanout.route(framing, party.source, buffer, start, end)
        self._spread(party, routed)
        return routed

    def publish(self, party: Party, topic: bytes, offsets: Buffer, bodies: Buffer) -> Routed:
        """The same for messages that are not in frames of the fan-out's."""
        self.sender = party
        routed = self._fanout.publish(party.source, topic, offsets, bodies)
        self._spread(party, routed)
        return routed

    def _spread(self, party: Party, routed: Routed) -> None:
        for outbox, data in routed.outputs:
            outbox.push(data)
        if routed.stop == BLOCKED and not party.ended:
            self._wait(party, routed.blocker)
        for batch in routed.collected:
            self.collected(party, batch)

    def relay(self, party: Party, topic: bytes, offsets: Buffer, bodies: Buffer) -> bool:
        """Sends messages that were judged already to push readers: all of them, or none.

        None if one of the readers is full: then the party waits.
        """
        routed = self.relay_kept(topic, offsets, bodies)
        if routed.stop == BLOCKED and not party.ended:
            self._wait(party, routed.blocker)
        return routed.stop != BLOCKED

    def relay_past(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> int:
        """To push readers who have room, if nobody can wait; how many messages others lost."""
        ends = memoryview(offsets).cast("B").cast("i")
        passed: list[Party] = []
        lost = 0
        while self._fanout.subscriber_count(topic):
            routed = self.relay_kept(topic, ends, bodies)
            if routed.stop != BLOCKED:
                break
            ends = ends[routed.consumed :]
            lost += len(ends) - 1
            passed.append(routed.blocker.party)
            self._fanout.detach(passed[-1].number, topic)
        for party in passed:
            if not party.ended:
                self._fanout.attach(party.number, topic)
        return lost

    def relay_kept(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> Routed:
        """Sends what was taken already to push readers, up to the first that is full."""
        routed = self._fanout.publish(self._trusted, topic, offsets, bodies)
        for outbox, data in routed.outputs:
            outbox.push(data)
        return routed

    @property
    def relayed(self) -> tuple[int, int]:
        """Messages and bytes that `relay` has taken: counted as received elsewhere, too."""
        return self._trusted.messages, self._trusted.bytes

    def forget(self, party: Party) -> None:
        """The party has left the fan-out: it waits for nobody, and nobody waits for it.

        Those who did go on soon, not at once: a party may leave while a buffer is being
        routed, and a chain of parties that end each other must not nest.
        """
        if party.waiting_for is not None:
            self._stop_waiting(party, party.waiting_for)
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
            self._judge(outbox, now_s)

    # What an outbox reports (outbox.Owner).

    def filled(self, outbox: Outbox) -> None:
        self._full[outbox] = None
        self._fresh.append(outbox)
        self._fanout.set_full(outbox.party.number, True)

    def has_room(self, outbox: Outbox) -> None:
        self._full.pop(outbox, None)
        self._fanout.set_full(outbox.party.number, False)
        self.relieved(outbox.party)
        self._release(outbox)

    def overflowed(self, outbox: Outbox) -> None:
        self._cut(outbox.party, "outbox_overflow")

    def _wait(self, party: Party, blocker: Outbox) -> None:
        if party.waiting_for is not None:
            return  # it is leaving, and nothing makes it wait any more
        party.waiting_for = blocker
        blocker.waiters[party] = None
        self.waiting += 1
        party.pipe.pause_reading()

    def _stop_waiting(self, party: Party, blocker: Outbox) -> None:
        del blocker.waiters[party]
        party.waiting_for = None
        self.waiting -= 1

    def _release(self, outbox: Outbox) -> None:
        """Lets waiting publishers go on, one after another, as long as there is room."""
        while outbox.waiters and not outbox.full:
            party = next(iter(outbox.waiters))
            self._stop_waiting(party, outbox)
            if not party.is_committing:
                party.resume()

    def _window_is_over(self, outbox: Outbox, now_s: float) -> bool:
        return now_s - outbox.window_start_s >= self._limits.slow_consumer_timeout_s

    def _judge(self, outbox: Outbox, now_s: float) -> None:
        taken = outbox.taken()
        window_s = now_s - outbox.window_start_s
        if taken - outbox.window_taken < self._limits.slow_consumer_min_bytes_per_s * window_s:
            self._cut(outbox.party, "slow_consumer")
        else:
            outbox.window_start_s = now_s
            outbox.window_taken = taken
