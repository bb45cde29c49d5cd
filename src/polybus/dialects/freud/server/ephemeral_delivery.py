"""How messages move within an ephemeral topic: to readers, into a buffer, out of it.

Bytes are charged before they are kept: to each reader's account, or, while they
are buffered for readers still to come, to the account of the topic's creator. A
producer that can be told no is told; a message that came from a push dialect
cannot be refused, so a reader without room loses it, counted.


Which unread messages fit into a limit (unread_queue.pyx stores them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from polybus.bus.quotas import BYTES
from polybus.bus.request_outcome import NOTHING_HAPPENED, OK, WAIT, RequestOutcome, over_quota
from polybus.dialects.freud.server.unread_queue import Range

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Connection
    from polybus.bus.counters import Counters
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.dialects.freud.server.topic_lifecycle import Incarnation
    from polybus.dialects.freud.server.unread_queue import Range
    from polybus.kernel.fanout import Fanout
    from polybus.model.identity import Identity

UNREAD = "max_unread_messages"


class PushDelivery(Protocol):
    """The way to push readers (bus/delivery.py)."""

    def relay(self, party: Connection, topic: bytes, offsets: Buffer, bodies: Buffer) -> bool:
        """All or nothing; False if one of them is full: then the party waits for it."""

    def relay_skipping_full(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> int:
        """To those who have room; how many messages the others have lost."""


class ProduceResult(NamedTuple):
    """What became of a batch, all of it: if it was accepted, from `first_id` on."""

    outcome: RequestOutcome
    first_id: int = 0


class EphemeralDelivery:
    def __init__(
        self,
        fanout: Fanout,
        pushing: PushDelivery,
        quotas: Quotas,
        counters: Counters,
        limits: FreudLimits,
        wall_ns: Callable[[], int],
    ) -> None:
        self._fanout = fanout
        self._pushing = pushing
        self._quotas = quotas
        self._counters = counters
        self._limits = limits
        self._wall_ns = wall_ns

    def deliver(
        self,
        party: Connection | None,
        current: Incarnation,
        offsets: bytes,
        bodies: bytes,
        count: int,
    ) -> ProduceResult:
        """A batch from a producer, to all readers of a live topic. `None` cannot wait."""
        pushed = self._fanout.subscriber_count(current.name)
        if not current.readers and not pushed:
            self._counters.count("dropped", "no_subscriber", count)
            return ProduceResult(NOTHING_HAPPENED)
        reached = self._charge_all(current, len(bodies), count)
        if reached:
            return ProduceResult(over_quota(reached))
        first_id = self._fanout.next_id(current.name)
        if pushed and not self._push(party, current.name, offsets, bodies):
            self._release_all(current.readers.values(), len(bodies))
            return ProduceResult(WAIT)
        self._fanout.set_next_id(current.name, first_id + count)
        if current.readers:
            found = current.writer.write(first_id, offsets, bodies, self._wall_ns())
            put_and_wake(current.readers.values(), found)
        return ProduceResult(OK, first_id)

    def buffer(
        self, current: Incarnation, offsets: bytes, bodies: bytes, count: int
    ) -> ProduceResult:
        """A batch for readers who are still to come."""
        if current.buffered_messages + count > self._limits.max_unread_messages:
            return ProduceResult(over_quota(UNREAD))
        if not self._quotas.charge(current.creator, BYTES, len(bodies), trial=count > 1):
            return ProduceResult(over_quota(BYTES))
        first_id = self._fanout.next_id(current.name)
        self._fanout.set_next_id(current.name, first_id + count)
        found = current.writer.write(first_id, offsets, bodies, self._wall_ns())
        current.append_buffer(found, relayed=False)
        return ProduceResult(OK, first_id)

    def accept_pushed(
        self, current: Incarnation, first_id: int, offsets: bytes, bodies: bytes, *, buffering: bool
    ) -> None:
        """A batch that a push dialect has published, and its readers have had."""
        found = current.writer.write(first_id, offsets, bodies, self._wall_ns())
        if not buffering:
            self._put_within_room(current, [found])
            return
        room = self._limits.max_unread_messages - current.buffered_messages
        for run in self._charge_fitting(current.creator, found, room):
            current.append_buffer(run, relayed=True)

    def flush_buffer(self, current: Incarnation) -> None:
        """What was buffered goes to those who are there by now."""
        self._quotas.release(current.creator, BYTES, current.buffered_bytes)
        buffered = current.take_buffer()
        for found, relayed in buffered:
            if not relayed:
                self._push_buffered(current, found)
        self._put_within_room(current, [found for found, _ in buffered])

    def drop_buffer(self, current: Incarnation, reason: str) -> None:
        self._quotas.release(current.creator, BYTES, current.buffered_bytes)
        lost = sum(len(found) for found, _ in current.take_buffer())
        self._counters.count("dropped", reason, lost)

    def _push_buffered(self, current: Incarnation, found: Range) -> None:
        """To push readers, from the buffer: nobody can be made to wait for them now."""
        next_id = self._fanout.next_id(current.name)
        offsets = found.chunk.offsets[found.start : found.end + 1]
        self._push(None, current.name, offsets, found.chunk.bodies)
        self._fanout.set_next_id(current.name, next_id)

    def _push(self, party: Connection | None, name: bytes, offsets: Buffer, bodies: Buffer) -> bool:
        """False if the party has to wait; without one, whoever is full loses it, counted."""
        if party is not None:
            return self._pushing.relay(party, name, offsets, bodies)
        lost = self._pushing.relay_skipping_full(name, offsets, bodies)
        self._counters.count("dropped", "slow_consumer", lost)
        return True

    def _charge_all(self, current: Incarnation, size: int, count: int) -> str | None:
        """Charges every reader, or none: then the name of what was reached."""
        charged: list[PullReader] = []
        for reader in current.readers.values():
            reached = self._limit_reached(reader, size, count)
            if reached:
                self._release_all(charged, size)
                return reached
            charged.append(reader)
        return None

    def _limit_reached(self, reader: PullReader, size: int, count: int) -> str | None:
        """Charges a reader, or says what was reached. More than one may be tried one by one."""
        if reader.held_messages + count > self._limits.max_unread_messages:
            return UNREAD
        charged = self._quotas.charge(reader.identity, BYTES, size, trial=count > 1)
        return None if charged else BYTES

    def _put_within_room(self, current: Incarnation, batch: list[Range]) -> None:
        """To all readers, what nobody can take back: each gets as much as it has room for."""
        readers = list(current.readers.values())
        for reader in readers:
            for found in batch:
                room = self._limits.max_unread_messages - reader.held_messages
                for run in self._charge_fitting(reader.identity, found, room):
                    reader.put(run)
        for reader in readers:
            reader.wake()

    def _charge_fitting(self, whom: Identity, found: Range, room_messages: int) -> list[Range]:
        """What there is room for, charged; the rest is counted as dropped."""
        if len(found) <= room_messages and self._quotas.charge(whom, BYTES, found.size, trial=True):
            return [found]
        fit = find_fitting(found, self._quotas.room(whom, BYTES), room_messages)
        self._quotas.charge(whom, BYTES, sum(run.size for run in fit.runs), trial=True)
        self._counters.count("dropped", UNREAD, fit.too_many)
        self._counters.count("dropped", BYTES, fit.too_large)
        if fit.too_large:
            self._quotas.refuse(whom, BYTES, found.size)
        return [copy_range(run) for run in fit.runs]

    def _release_all(self, readers: Iterable[PullReader], size: int) -> None:
        for reader in readers:
            self._quotas.release(reader.identity, BYTES, size)


def put_and_wake(readers: Iterable[PullReader], found: Range) -> None:
    """To all of them first, then those who wait are woken: none sees another's turn half done."""
    those = list(readers)
    for reader in those:
        reader.put(found)
    for reader in those:
        reader.wake()


class FittingRanges(NamedTuple):
    """What of a range there is room for: the runs that fit, and how many do not, and why."""

    runs: list[Range]
    too_large: int
    too_many: int


def copy_range(run: Range) -> Range:
    """A copy: a run of a batch that did not fit whole must not keep the rest of it alive.

    What a reader holds of the bus's memory is in proportion to what it is charged for.
    """
    own = run.chunk.part(run.start, run.end)
    return Range(own, 0, len(own))


def find_fitting(found: Range, room_bytes: int, room_messages: int) -> FittingRanges:
    """One by one: a message fits if what fitted before it has left room for it."""
    runs: list[Range] = []
    too_large = 0
    for place, size in enumerate(found.sizes(), found.start):
        if room_messages <= 0:
            return FittingRanges(runs, too_large, found.end - place)
        if size > room_bytes:
            too_large += 1
            continue
        room_bytes -= size
        room_messages -= 1
        if runs and runs[-1].end == place:
            runs[-1].end += 1
        else:
            runs.append(Range(found.chunk, place, place + 1))
    return FittingRanges(runs, too_large, 0)
