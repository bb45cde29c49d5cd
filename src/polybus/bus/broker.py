"""The verbs of the bus. Sessions call these; nothing else changes its state."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from polybus.bus.connection import Party
from polybus.bus.counters import Counters
from polybus.bus.delivery import Delivery
from polybus.bus.outbox import Outbox, Turn
from polybus.bus.overview import Overview
from polybus.bus.policy import OVERFLOW, Policy
from polybus.bus.policy_enforcer import Judging
from polybus.bus.quotas import Quotas
from polybus.bus.stall_monitor import Stalls
from polybus.bus.subscriptions import Subscribed, Subscriptions
from polybus.dialects.freud.server.durable_pull_reader import Pulling
from polybus.dialects.freud.server.ephemeral_topics import EphemeralTopics
from polybus.dialects.gsb.server.sender_tracker import Callers
from polybus.durable.publisher import Keeping, Soon
from polybus.durable.push_readers import Following, Readers
from polybus.durable.topic_names import Binding
from polybus.durable.topic_registry import Durable
from polybus.kernel.fanout import Fanout, Source
from polybus.model.limits import FreudLimits, QuotaLimits

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from polybus.bus.connection import Pipe
    from polybus.kernel.fanout import Collected, Routed
    from polybus.kernel.framing import Encoding, Framing
    from polybus.model.limits import Limits
    from polybus.store.contract import News, Store


class Log(Protocol):
    """The part of a structured logger that the bus uses."""

    def debug(self, event: str, **fields: Any) -> Any: ...
    def info(self, event: str, **fields: Any) -> Any: ...
    def warning(self, event: str, **fields: Any) -> Any: ...


class Pushed(Protocol):
    """What takes messages for one subscriber."""

    def push(self, data: bytes) -> None: ...


class Broker:
    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
        log: Log,
        *,
        wall_ns: Callable[[], int],
        freud: FreudLimits | None = None,
        quotas: QuotaLimits | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.log = log
        self.limits = limits
        self.wall_ns = wall_ns
        self._clock = clock
        counters = self.counters = Counters()
        policy = self.policy = policy or Policy()
        self.quotas = Quotas(quotas or QuotaLimits(), counters, log)
        self.turn = Turn(call_soon)
        self.callers = Callers()
        self._parties: dict[int, Party] = {}
        self._joined = 0
        self._encodings = 0
        fanout = self._fanout = Fanout(self._may_produce)
        delivery = self._delivery = Delivery(fanout, self.turn, limits, self.cut)
        delivery.collected = self._collected
        subscriptions = self._subscriptions = Subscriptions(fanout, policy, limits)
        self.topics = EphemeralTopics(
            fanout, delivery, policy, self.quotas, counters, freud or FreudLimits(), clock, wall_ns
        )
        self._judging = Judging(
            policy, fanout, self._parties, subscriptions, self.topics, self._revoked
        )
        self._stalls = Stalls(limits, self.cut)
        self.overview = Overview(
            fanout, delivery, self.topics, subscriptions, counters, self._parties, clock
        )
        self.on_tick: list[Callable[[float], None]] = []  # of dialects with deadlines of their own
        # Of a bus with a store (see `keep`).
        self.durable: Durable | None = None
        self.binding: Binding | None = None
        self.following: Following | None = None
        self.keeping: Keeping | None = None
        self.readers: Readers | None = None
        # The hot path, without a step in between.
        self.route: Callable[[Party, Framing, Buffer, int, int], Routed] = delivery.route
        self.publish = delivery.publish

    def keep(self, store: Store, soon: Soon, readers: Readers) -> None:
        """There are durable topics from now on; to be called before anybody is served.

        `soon` brings a step to the loop from any thread, `readers` reads on others.
        """
        durable = self.durable = Durable(store)
        self.overview.traffic = durable.traffic
        self.readers = readers
        self.binding = Binding(durable, self.policy, self.quotas, self.topics.exists)
        following = self.following = Following(
            durable, self._fanout, self._delivery.relay_kept, readers, self.callers, self.log
        )
        limit = self.max_uncommitted_bytes
        self.keeping = Keeping(durable, self.counters, limit, soon, self.wall_ns, self.log)
        self.binding.on_bound.append(following.bound)
        self.binding.on_gone.append(following.gone)
        self.binding.on_gone.append(self.topics.log_gone)
        self.topics.is_durable = self.binding.is_durable
        pulling = self.topics.pulling = Pulling(durable, following, self.quotas)
        self._delivery.relieved = following.has_room
        self._judging.unsubscribed = following.unsubscribed
        store.watch(lambda news: soon(lambda: _tell(news, following, pulling)))

    @property
    def max_uncommitted_bytes(self) -> int:
        """What one connection may have on its way to the disk."""
        return self.limits.max_uncommitted_bytes

    def new_encoding_number(self) -> int:
        """A dialect asks once for the number under which its encoding is known."""
        self._encodings += 1
        return self._encodings - 1

    def join(
        self,
        dialect: str,
        pipe: Pipe,
        encoding: Encoding,
        *,
        outbox: Outbox | None = None,
        reader: Pushed | None = None,
    ) -> Party:
        """A new connection, ready to publish and to be subscribed.

        A dialect may bring an outbox with marks of its own, and something that stands
        before it and takes what the fan-out pushes.
        """
        self._joined += 1
        outbox = outbox or self._delivery.open_outbox(pipe)
        number = self._fanout.add_subscriber(reader or outbox, encoding)
        source = Source(OVERFLOW)
        party = Party(
            id=self._joined,
            dialect=dialect,
            pipe=pipe,
            source=source,
            outbox=outbox,
            encoding=encoding,
            number=number,
            since_s=self._clock(),
            resume=pipe.resume_reading,
        )
        outbox.party = party
        self._parties[party.id] = party
        self._judging.classify([party])
        self.log.debug("connection opened", dialect=dialect, peer=pipe.peer, id=party.id)
        return party

    def subscribe(self, party: Party, topic: bytes) -> Subscribed:
        result = self._subscriptions.add(party, topic)
        if result is Subscribed.DENIED:
            self.refused(party, "subscribe_denied", topic)
        elif result is Subscribed.NEW:
            self.topics.heard(topic)
            if self.following is not None:
                self.following.subscribed(party, topic)
        return result

    def unsubscribe(self, party: Party, topic: bytes) -> bool:
        removed = self._subscriptions.remove(party, topic)
        if removed and self.following is not None:
            self.following.unsubscribed(party, topic)
        return removed

    def unsubscribe_all(self, party: Party) -> None:
        self._subscriptions.clear(party)
        if self.following is not None:
            self.following.left(party)

    def is_durable(self, topic: bytes) -> bool:
        return self.binding is not None and self.binding.is_durable(topic)

    def put_together(self, party: Party, topic: bytes, body: bytes) -> None:
        """A message that came in pieces, for readers who want it whole."""
        if self.is_durable(topic):
            assert self.keeping is not None
            self.keeping.keep(party, topic, array("i", [0, len(body)]), body, 1)
        else:
            self.topics.put_together(topic, body)

    def close(self, party: Party, reason: str) -> None:
        """Ends a connection that did wrong, or that we end for our own reasons.

        What it is owed already still goes out.
        """
        if self._leave(party, reason, send_held=True):
            party.pipe.close()
            self.log.warning(
                "connection closed", dialect=party.dialect, peer=party.pipe.peer, reason=reason
            )

    def cut(self, party: Party, reason: str) -> None:
        """Ends a connection at once; what it was owed is counted as dropped."""
        if party.ended:
            return
        lost = self._unsent_messages(party)
        self.counters.count("dropped", reason, lost)
        self._leave(party, reason, send_held=False)
        party.pipe.abort()
        self.log.warning(
            "connection cut",
            dialect=party.dialect,
            peer=party.pipe.peer,
            reason=reason,
            messages_lost=lost,
        )

    def finish(self, party: Party) -> None:
        """The peer has said all it will; what it is owed still goes out."""
        if self._leave(party, "peer", send_held=True):
            party.pipe.close()

    def leave(self, party: Party) -> None:
        """The connection is gone, by the peer's will or after we ended it.

        One that we closed may have had too little time for what it was owed.
        """
        self.counters.count("dropped", "disconnected", self._unsent_messages(party))
        if self._leave(party, "peer", send_held=False):
            self.log.debug("connection ended", dialect=party.dialect, peer=party.pipe.peer)

    def close_all(self, reason: str) -> None:
        for party in list(self._parties.values()):
            if self._leave(party, reason, send_held=True):
                party.pipe.close()

    def refused(self, party: Party, reason: str, topic: bytes, count: int = 1) -> None:
        """Books a request that was understood and not granted."""
        self.counters.count("refused", reason, count)
        self._say_refused(party, reason, topic)

    def watch_stall(self, party: Party) -> None:
        """The party does not take its answers: it is cut if that goes on."""
        self._stalls.add(party, self._clock())

    def end_stall(self, party: Party) -> None:
        """The party has taken all its answers, however soon there are more."""
        self._stalls.forget(party)

    def now_s(self) -> float:
        return self._clock()

    def tick(self) -> None:
        """To be called a few times a second: everything that depends on time passing."""
        now_s = self._clock()
        self._delivery.tick(now_s)
        self._stalls.tick(now_s)
        self.topics.tick()
        self._judging.tick()
        for step in self.on_tick:
            step(now_s)

    def stats(self) -> dict[str, Any]:
        return self.overview.stats(accepted=self._joined)

    def connections(self) -> list[dict[str, Any]]:
        return self.overview.connections()

    def _leave(self, party: Party, reason: str, *, send_held: bool) -> bool:
        if party.ended:
            return False
        party.ended = True
        self.counters.count("closed", reason)
        del self._parties[party.id]
        self.unsubscribe_all(party)
        self._fanout.remove_subscriber(party.number)
        party.outbox.close(send_held=send_held)
        self._delivery.forget(party)
        self._stalls.forget(party)
        return True

    def _collected(self, party: Party, batch: Collected) -> None:
        if self.is_durable(batch.topic):
            assert self.keeping is not None
            self.keeping.keep(party, batch.topic, batch.offsets, batch.bodies, batch.count)
        else:
            self.topics.collected(batch)

    def _say_refused(self, party: Party, reason: str, topic: bytes) -> None:
        name = topic.decode("utf-8", "backslashreplace")
        self.log.warning("refused", **_names(party), topic=name, reason=reason)

    def _may_produce(self, identity_class: int, topic: bytes) -> bool:
        """The fan-out asks once per class and topic, and counts the messages itself."""
        allowed = self.policy.may_produce(identity_class, topic)
        if not allowed and self._delivery.sender is not None:
            self._say_refused(self._delivery.sender, "produce_denied", topic)
        return allowed

    def _revoked(self, count: int) -> None:
        self.counters.count("refused", "subscription_revoked", count)
        self.log.warning("subscriptions revoked", count=count)

    def _unsent_messages(self, party: Party) -> int:
        return sum(party.encoding.count(chunk, sent) for chunk, sent in party.outbox.unsent())


def _tell(news: Sequence[News], following: Following, pulling: Pulling) -> None:
    numbers = {one.topic for one in news}
    following.news(numbers)
    pulling.news(numbers)


def _names(party: Party) -> dict[str, str]:
    """Whom a line of the log is about."""
    pipe = party.pipe
    return {"dialect": party.dialect, "peer": pipe.peer, "user": pipe.identity.name}
