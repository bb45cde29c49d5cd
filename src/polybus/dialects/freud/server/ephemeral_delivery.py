"""The flow of messages within an ephemeral topic: to readers, into a buffer, out of it.

Bytes are charged before they are stored: to each reader's account, or, while they are
buffered for later readers, to the account of the topic's creator. plain_delivery.pyx charges
and serves the pull readers of a topic; this file has what may stand in the way of that. A
producer that exceeds a limit is refused. A message of a push dialect cannot be refused, so a
reader without room loses it, and the loss is counted. In either case the account's detached
readers make room first (detached_readers.py): neither is refused or lost because of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from polybus.bus.quotas import BYTES
from polybus.bus.request_outcome import NOTHING_HAPPENED, OK, WAIT, RequestOutcome, over_quota
from polybus.dialects.freud.server.plain_delivery import UNREAD
from polybus.dialects.freud.server.unread_queue import Range

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Connection
    from polybus.bus.counters import Counters
    from polybus.bus.quotas import Key, Quotas
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.detached_readers import DetachedReaders
    from polybus.dialects.freud.server.plain_delivery import PlainDelivery
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.dialects.freud.server.request_scanner import ProduceRun
    from polybus.dialects.freud.server.topic_lifecycle import Incarnation
    from polybus.kernel.fanout import Fanout
    from polybus.model.identity import Identity


class PushDelivery(Protocol):
    """Delivery to push readers (bus/delivery.py)."""

    def relay(self, connection: Connection, topic: bytes, offsets: Buffer, bodies: Buffer) -> bool:
        """Deliver to all. Returns False, with nothing sent, if one is full and must be awaited."""

    def relay_skipping_full(self, topic: bytes, offsets: Buffer, bodies: Buffer) -> int:
        """Deliver to readers with room. Returns how many messages the others lost."""


class ProduceResult(NamedTuple):
    """The outcome of a whole batch, and the id of its first message if it was accepted."""

    outcome: RequestOutcome
    first_id: int = 0


class EphemeralDelivery:
    def __init__(
        self,
        plain: PlainDelivery,
        fanout: Fanout,
        pushing: PushDelivery,
        quotas: Quotas,
        detached: DetachedReaders,
        counters: Counters,
        limits: FreudLimits,
        wall_ns: Callable[[], int],
    ) -> None:
        self._plain = plain
        self._fanout = fanout
        self._pushing = pushing
        self._quotas = quotas
        self._detached = detached
        self._counters = counters
        self._limits = limits
        self._wall_ns = wall_ns

    def deliver(
        self, connection: Connection | None, current: Incarnation, run: ProduceRun
    ) -> ProduceResult:
        """Deliver a producer's run to all readers of a live topic.

        Without a `connection` that can wait, full push readers lose the run.
        """
        size, count = len(run.bodies), run.count
        reached = self._plain.charge(current, size, count)
        # The session splits a larger run, so that each message evicts as few as it needs.
        if reached and count == 1:
            reached = self._evict_for(current, size) or self._plain.charge(current, size, count)
        if reached:
            return ProduceResult(over_quota(reached))
        pushed = self._fanout.subscriber_count(current.name)
        if not current.readers and not pushed:
            self._counters.count("dropped", "no_subscriber", count)
            return ProduceResult(NOTHING_HAPPENED)
        first_id = self._fanout.next_id(current.name)
        # Push readers first: only they can make the producer wait, with nothing delivered.
        if pushed and not self._push(connection, current.name, run.offsets, run.bodies):
            self._plain.release(current, size)
            return ProduceResult(WAIT)
        self._plain.deliver(current, first_id, run)
        return ProduceResult(OK, first_id)

    def buffer(self, current: Incarnation, run: ProduceRun) -> ProduceResult:
        """Buffer a producer's run for later readers."""
        if current.buffered_messages + run.count > self._limits.max_unread_messages:
            return ProduceResult(over_quota(UNREAD))
        if not self._quotas.charge(current.creator, BYTES, len(run.bodies), trial=run.count > 1):
            return ProduceResult(over_quota(BYTES))
        first_id = self._fanout.next_id(current.name)
        self._fanout.set_next_id(current.name, first_id + run.count)
        messages = current.writer.write(first_id, run.offsets, run.bodies, self._wall_ns())
        current.append_buffer(messages, relayed=False)
        return ProduceResult(OK, first_id)

    def accept_pushed(
        self, current: Incarnation, first_id: int, offsets: bytes, bodies: bytes, *, buffers: bool
    ) -> None:
        """Accept a batch of a push dialect, which push readers received already."""
        messages = current.writer.write(first_id, offsets, bodies, self._wall_ns())
        if not buffers:
            self._put_within_room(current, [messages])
            return
        room = self._limits.max_unread_messages - current.buffered_messages
        for run in self._charge_fitting(current.creator, messages, room):
            current.append_buffer(run, relayed=True)

    def make_buffer_room(self, current: Incarnation, size: int) -> None:
        """Evict detached readers of the creator if the buffer then has room for `size` bytes.

        The caller must look the topic's action up after it: an evicted reader may have been the
        last one that the buffer waited for.
        """
        if current.buffered_messages >= self._limits.max_unread_messages:
            return
        if (
            self._quotas.room(current.creator, BYTES)
            < size
            <= self._reachable_room(current.creator)
        ):
            self._detached.make_room(current.creator, size)

    def flush_buffer(self, current: Incarnation) -> None:
        """Deliver the buffer to the readers of the moment."""
        self._quotas.release(current.creator, BYTES, current.buffered_bytes)
        buffered = current.take_buffer()
        for messages, relayed in buffered:
            if not relayed:
                # The messages have their ids already, so pushing must not use new ones.
                next_id = self._fanout.next_id(current.name)
                offsets = messages.chunk.offsets[messages.start : messages.end + 1]
                # There is no producer to wait, so full push readers lose them.
                self._push(None, current.name, offsets, messages.chunk.bodies)
                self._fanout.set_next_id(current.name, next_id)
        self._put_within_room(current, [messages for messages, _ in buffered])

    def drop_buffer(self, current: Incarnation, reason: str) -> None:
        self._quotas.release(current.creator, BYTES, current.buffered_bytes)
        lost = sum(len(messages) for messages, _ in current.take_buffer())
        self._counters.count("dropped", reason, lost)

    def _push(
        self, connection: Connection | None, name: bytes, offsets: Buffer, bodies: Buffer
    ) -> bool:
        """Push a batch. Returns False if the connection must wait."""
        if connection is not None:
            return self._pushing.relay(connection, name, offsets, bodies)
        lost = self._pushing.relay_skipping_full(name, offsets, bodies)
        self._counters.count("dropped", "slow_consumer", lost)
        return True

    def _evict_for(self, current: Incarnation, size: int) -> str | None:
        """Evict the detached readers that have no room for a message, or leave none to others.

        Returns the limit that is reached without them, if any; then none is evicted.
        """
        readers = list(current.readers.values())
        reached = self._find_reached(readers, size)
        if reached:
            return reached
        for reader in readers:
            is_full = reader.held_messages >= self._limits.max_unread_messages
            if is_full and self._detached.can_evict(reader):
                self._detached.evict(reader)
        left = Counter(reader.identity.account for reader in readers if not reader.gone)
        for identity in {reader.identity.account: reader.identity for reader in readers}.values():
            account = identity.account
            while left[account] * size > self._quotas.room(identity, BYTES):
                evicted = self._detached.evict_oldest(account) if left[account] else None
                if evicted is None:
                    break
                left[account] -= evicted.incarnation is current
        return None

    def _find_reached(self, readers: Iterable[PullReader], size: int) -> str | None:
        """Return the limit that a message would reach if all detached readers were evicted."""
        room: dict[Key, int] = {}
        for reader in readers:
            if self._detached.can_evict(reader):
                continue
            if reader.held_messages >= self._limits.max_unread_messages:
                return UNREAD
            account = reader.identity.account
            if account not in room:
                room[account] = self._reachable_room(reader.identity)
            room[account] -= size
            if room[account] < 0:
                self._quotas.refuse(reader.identity, BYTES, size)
                return BYTES
        return None

    def _reachable_room(self, identity: Identity) -> int:
        """Return the room of the user's quota_bytes without its detached readers."""
        free = self._quotas.room(identity, BYTES)
        return free + self._detached.evictable_bytes(identity.account)

    def _put_within_room(self, current: Incarnation, batch: list[Range]) -> None:
        """Put messages that cannot be refused: each reader gets as many as it has room for."""
        readers = list(current.readers.values())
        size = sum(messages.size for messages in batch)
        for reader in readers:
            if not reader.gone:  # evicted for an earlier reader
                self._detached.make_room(reader.identity, size)
            if reader.gone:
                continue
            for messages in batch:
                room = self._limits.max_unread_messages - reader.held_messages
                for run in self._charge_fitting(reader.identity, messages, room):
                    reader.put(run)
        for reader in readers:
            reader.wake()

    def _charge_fitting(
        self, account: Identity, messages: Range, room_messages: int
    ) -> list[Range]:
        """Charge and return the ranges that fit; the rest is counted as dropped."""
        if len(messages) <= room_messages and self._quotas.charge(
            account, BYTES, messages.size, trial=True
        ):
            return [messages]
        fit = find_fitting(messages, self._quotas.room(account, BYTES), room_messages)
        self._quotas.charge(account, BYTES, sum(run.size for run in fit.runs), trial=True)
        self._counters.count("dropped", UNREAD, fit.too_many)
        self._counters.count("dropped", BYTES, fit.too_large)
        if fit.too_large:
            self._quotas.refuse(account, BYTES, messages.size)
        return [copy_range(run) for run in fit.runs]


class FittingRanges(NamedTuple):
    """The runs of a range that fit a limit, and how many messages do not, by reason."""

    runs: list[Range]
    too_large: int
    too_many: int


def copy_range(run: Range) -> Range:
    """Return a copy that does not keep the rest of its chunk alive.

    A reader must not hold much more memory than it is charged for.
    """
    own = run.chunk.part(run.start, run.end)
    return Range(own, 0, len(own))


def find_fitting(messages: Range, room_bytes: int, room_messages: int) -> FittingRanges:
    """Find the messages that fit, in order: each takes room from the later ones."""
    runs: list[Range] = []
    too_large = 0
    for place, size in enumerate(messages.sizes(), messages.start):
        if room_messages <= 0:
            return FittingRanges(runs, too_large, messages.end - place)
        if size > room_bytes:
            too_large += 1
            continue
        room_bytes -= size
        room_messages -= 1
        if runs and runs[-1].end == place:
            runs[-1].end += 1
        else:
            runs.append(Range(messages.chunk, place, place + 1))
    return FittingRanges(runs, too_large, 0)
