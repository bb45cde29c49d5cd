"""Ephemeral topics: created, read by pulling, deleted with a notice, created again.

Each request looks its action up in the table of topic_lifecycle.py, then checks policy and
quotas, then applies the event. Readers are in pull_reader.py, message flow in
ephemeral_delivery.py. Topic names, message ids and push readers are the fan-out's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from polybus.bus.quotas import SUBSCRIPTIONS, TOPICS
from polybus.bus.request_outcome import (
    DOES_NOT_EXIST,
    NO,
    NOTHING_HAPPENED,
    OK,
    RequestOutcome,
    over_quota,
)
from polybus.dialects.freud.codec import deletion_notice
from polybus.dialects.freud.server.detached_readers import DetachedReaders
from polybus.dialects.freud.server.durable_pull_reader import DurablePullReaders
from polybus.dialects.freud.server.ephemeral_delivery import (
    EphemeralDelivery,
    ProduceResult,
    PushDelivery,
)
from polybus.dialects.freud.server.plain_delivery import MessageCounts, PlainDelivery
from polybus.dialects.freud.server.pull_reader import PullReader, PullReaders, new_id
from polybus.dialects.freud.server.topic_lifecycle import (
    EphemeralTopic,
    TopicAction,
    TopicEvent,
    TopicLifecycle,
)
from polybus.dialects.freud.server.unread_queue import Chunk, Range, put_and_wake
from polybus.durable.durable_bus import durable_bus
from polybus.durable.topic_names import creator_of
from polybus.errors import Damaged
from polybus.model import topic_name
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.bus.connection import Connection
    from polybus.bus.counters import Counters
    from polybus.bus.policy import Policy
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.request_scanner import ProduceRun
    from polybus.kernel.fanout import CollectedBatch, Fanout
    from polybus.model.identity import Identity
    from polybus.model.topic import Topic as DurableTopic


class EphemeralTopics:
    def __init__(
        self,
        fanout: Fanout,
        pushing: PushDelivery,
        policy: Policy,
        quotas: Quotas,
        counters: Counters,
        limits: FreudLimits,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self._fanout = fanout
        self._policy = policy
        self._quotas = quotas
        self._counters = counters
        self._clock = clock
        self._wall_ns = wall_ns
        self._topics: dict[bytes, EphemeralTopic] = {}
        readers: dict[bytes, PullReader] = {}
        self.detached = DetachedReaders(quotas, limits.max_detached_subscriptions)
        self.message_counts = MessageCounts()
        self.plain_delivery = PlainDelivery(
            self._topics, readers, fanout, self.message_counts, limits.max_unread_messages, wall_ns
        )
        self._delivery = EphemeralDelivery(
            self.plain_delivery, fanout, pushing, quotas, self.detached, counters, limits, wall_ns
        )
        self._lifecycle = TopicLifecycle(
            self._topics, fanout, self._delivery, quotas, limits, clock, wall_ns
        )
        self.readers = PullReaders(
            readers,
            self._lifecycle,
            quotas,
            counters,
            self.detached,
            limits.detached_subscription_s,
            clock,
        )
        # Both are set on a bus with durable topics: Freud clients pull from those, too.
        self.durable_readers: DurablePullReaders | None = None
        self.is_durable: Callable[[bytes], bool] = lambda name: False

    @classmethod
    def install(cls, broker: Broker, limits: FreudLimits) -> EphemeralTopics:
        """Make the topics of a broker. Its store, if it has one, must be attached already."""
        topics = cls(
            broker.fanout,
            broker.delivery,
            broker.policy,
            broker.quotas,
            broker.counters,
            limits,
            broker.now_s,
            broker.wall_ns,
        )
        durable = durable_bus(broker)
        if durable is not None:
            readers = DurablePullReaders(
                durable.topics, durable.push_readers, broker.quotas, topics.detached
            )
            topics.durable_readers = readers
            topics.is_durable = durable.is_durable
            durable.names.on_removed.append(topics.on_durable_removed)
            durable.on_commit.append(readers.on_commit)
        broker.install_topics(topics)
        broker.overview.sections["freud"] = topics.stats
        topics.readers.on_evicted = partial(_log_eviction, broker)
        return topics

    def exists(self, name: bytes) -> bool:
        """Return True if the name is in use, also by a topic that is being deleted."""
        return name in self._topics

    def stats(self) -> dict[str, int]:
        """Return the section `freud` of the statistics."""
        return {
            "subscriptions": len(self.readers),
            "detached": len(self.detached),
            "evicted": self.detached.evicted,
            "expired": self.readers.expired,
        }

    # --- requests

    def create(self, caller: Identity, name: bytes) -> RequestOutcome:
        topic = self._topics.get(name) or EphemeralTopic(name)
        if self.is_durable(name):
            return NOTHING_HAPPENED
        if self._lifecycle.find_action(TopicEvent.CREATE, topic) is TopicAction.NOTHING:
            return NOTHING_HAPPENED
        source = topic_name.dead_letter_source(name)
        if source is not None and self.is_durable(source):
            return NO  # consumer groups need the name for a durable topic
        if not self._policy.allows(caller, "create", name):
            return NO
        if not self._quotas.charge(caller, TOPICS, 1):
            return over_quota(TOPICS)
        topic.is_restricted = self._policy.is_restricted(name)
        self._lifecycle.apply(TopicEvent.CREATE, topic, caller)
        return OK

    def delete(self, caller: Identity, name: bytes) -> RequestOutcome:
        topic = self._topics.get(name)
        if self.is_durable(name):
            return NO
        if self._lifecycle.find_action(TopicEvent.DELETE, topic) is TopicAction.NOTHING:
            return NOTHING_HAPPENED
        assert topic is not None
        assert topic.current is not None
        if not self._policy.allows(caller, "delete", name, topic.current.creator):
            return NO
        self._lifecycle.apply(TopicEvent.DELETE, topic)
        return OK

    def subscribe(self, caller: Identity, name: bytes) -> RequestOutcome | PullReader:
        topic = self._topics.get(name)
        if (
            topic is None
            and self.durable_readers is not None
            and (durable := self.durable_readers.find(name))
        ):
            if not self._policy.allows(caller, "subscribe", name, creator_of(durable)):
                return NO
            if self.durable_readers.is_damaged(durable):
                return over_quota(Damaged.code)
            if not self._charge_subscription(caller):
                return over_quota(SUBSCRIPTIONS)
            durable_reader = self.durable_readers.add(new_id(), caller, durable)
            self.readers.add(durable_reader)
            return durable_reader
        if self._lifecycle.find_action(TopicEvent.SUBSCRIBE, topic) is TopicAction.MISSING:
            return DOES_NOT_EXIST
        assert topic is not None
        assert topic.current is not None
        if not self._policy.allows(caller, "subscribe", name, topic.current.creator):
            return NO
        if not self._charge_subscription(caller):
            return over_quota(SUBSCRIPTIONS)
        reader = PullReader(new_id(), caller, topic.current)
        self.readers.add(reader)
        self._lifecycle.apply(TopicEvent.SUBSCRIBE, topic, reader)
        return reader

    def unsubscribe(self, reader: PullReader) -> None:
        self.readers.end(reader, "unsubscribed")

    def produce(
        self, connection: Connection, run: ProduceRun, *, waits: bool = True
    ) -> ProduceResult:
        """Accept the whole run, which is not plain, or nothing of it.

        Unless the producer `waits`, a full push reader loses the messages.
        """
        name = run.topic
        topic = self._topics.get(name)
        action = self._lifecycle.find_action(TopicEvent.PRODUCE, topic)
        if action is TopicAction.MISSING:
            return ProduceResult(DOES_NOT_EXIST)
        assert topic is not None
        assert topic.current is not None
        current = topic.current
        if not self._policy.allows(connection.pipe.identity, "produce", name, current.creator):
            return ProduceResult(NO)
        # A plain run calls no Python for a verdict: cache it once the rules were asked.
        identity = connection.source.identity
        can_deny = self._policy.can_deny(PRODUCE, name)
        if can_deny and self._fanout.verdict(identity, name) is None:
            allowed = self._policy.may_produce(identity, name)
            self._fanout.remember_verdict(identity, name, allowed)
        # A larger run is split by the session, so that each message evicts as few as it needs.
        if action is TopicAction.BUFFER and run.count == 1:
            self._delivery.make_buffer_room(current, len(run.bodies))
            action = self._lifecycle.find_action(TopicEvent.PRODUCE, topic)
        if action is TopicAction.BUFFER:
            result = self._delivery.buffer(current, run)
        else:
            result = self._delivery.deliver(connection if waits else None, current, run)
        if result.outcome in (OK, NOTHING_HAPPENED):
            self.message_counts.add_received(run.count, len(run.bodies))
        return result

    def count(self, caller: Identity, name: bytes) -> RequestOutcome | int:
        topic = self._topics.get(name)
        if (
            topic is None
            and self.durable_readers is not None
            and (durable := self.durable_readers.find(name))
        ):
            return (
                self.durable_readers.count(durable)
                if self._can_see_durable(caller, durable)
                else NO
            )
        if self._lifecycle.find_action(TopicEvent.COUNT, topic) is TopicAction.MISSING:
            return DOES_NOT_EXIST
        assert topic is not None
        if not self._can_see(caller, topic):
            return NO
        pushed = self._fanout.subscriber_count(name)
        if topic.current is not None:
            return len(topic.current.readers) + pushed
        return sum(len(marked.readers) for marked in topic.marked) + pushed

    def names(self, caller: Identity) -> list[bytes]:
        """Return the names of all topics visible to the caller, durable ones included, sorted."""
        seen = [topic.name for topic in self._topics.values() if self._can_see(caller, topic)]
        durable = self.durable_readers.topics() if self.durable_readers is not None else []
        return sorted(
            seen
            + [topic.name.encode() for topic in durable if self._can_see_durable(caller, topic)]
        )

    def creator_of(self, name: bytes) -> Identity | None:
        topic = self._topics.get(name)
        if topic is None:
            return None
        return (topic.current or topic.marked[-1]).creator

    @property
    def known_count(self) -> int:
        """Number of names that a List has to check."""
        return len(self._topics) + (
            self.durable_readers.topic_count if self.durable_readers is not None else 0
        )

    def fan_out_count(self, name: bytes) -> int:
        """Return how many readers and incarnations a request on this name may touch."""
        topic = self._topics.get(name)
        if topic is None:
            return 0
        current = len(topic.current.readers) if topic.current is not None else 0
        return current + len(topic.marked) + self._fanout.subscriber_count(name)

    # --- events of the rest of the bus

    def on_collected(self, batch: CollectedBatch) -> None:
        """Accept messages of a push dialect. A reader without room loses them, counted."""
        topic = self._topics.get(batch.topic)
        action = self._find_collect_action(topic, batch.topic, len(batch.bodies), batch.count)
        if action is TopicAction.NOTHING:
            return
        assert topic is not None
        assert topic.current is not None
        buffers = action is TopicAction.BUFFER
        self._delivery.accept_pushed(
            topic.current, batch.first_id, batch.offsets, batch.bodies, buffers=buffers
        )

    def on_assembled(self, name: bytes, body: bytes) -> None:
        """Accept a message that a push dialect sent in parts; push readers got the parts."""
        topic = self._topics.get(name)
        action = self._find_collect_action(topic, name, len(body), 1)
        if action is TopicAction.NOTHING:
            return
        assert topic is not None
        assert topic.current is not None
        first_id = self._fanout.next_id(name)
        self._fanout.set_next_id(name, first_id + 1)
        offsets = array("i", [0, len(body)]).tobytes()
        buffers = action is TopicAction.BUFFER
        self._delivery.accept_pushed(topic.current, first_id, offsets, body, buffers=buffers)

    def _find_collect_action(
        self, topic: EphemeralTopic | None, name: bytes, size: int, count: int
    ) -> TopicAction:
        """Return the action for messages of a push dialect, after a buffer was given room."""
        action = self._lifecycle.find_action(TopicEvent.COLLECT, topic)
        if topic is None or topic.current is None:
            return action
        if action is TopicAction.BUFFER:
            self._delivery.make_buffer_room(topic.current, size)
            action = self._lifecycle.find_action(TopicEvent.COLLECT, topic)
        # The pull readers may have left since the fan-out collected the first part.
        if action is TopicAction.DELIVER and not topic.current.readers:
            if not self._fanout.subscriber_count(name):
                self._counters.count("dropped", "no_subscriber", count)
            return TopicAction.NOTHING
        return action

    def on_push_subscribed(self, name: bytes) -> None:
        """A push reader subscribed: a buffer that awaits its first reader is flushed."""
        topic = self._topics.get(name)
        if topic is not None:
            self._lifecycle.apply(TopicEvent.RELEASE, topic)

    def end_denied(self) -> int:
        """End the subscriptions that the policy denies. Returns how many were ended."""
        return self.readers.end_denied(self._policy)

    def tick(self) -> None:
        now_s = self._clock()
        if self.durable_readers is not None:
            self.durable_readers.tick()
        self.readers.tick(now_s)
        for incarnation in self._lifecycle.find_overdue(now_s):
            for reader in self._lifecycle.expire(incarnation):
                self.readers.end(reader, "deletion_timeout")

    def on_durable_removed(self, durable: DurableTopic) -> None:
        """Put a deletion notice to the readers of a durable topic that was dropped."""
        if self.durable_readers is None:
            return
        for reader in self.durable_readers.readers(durable):
            self.durable_readers.remove(reader)
            name = reader.topic_name
            notice = Chunk.of_notice(2**63 - 1, deletion_notice(name), self._wall_ns())
            put_and_wake([reader], Range(notice, 0, 1))

    # --- helpers

    def _charge_subscription(self, caller: Identity) -> bool:
        """Charge one subscription; the user's oldest detached ones make room for it."""
        while not self._quotas.charge(caller, SUBSCRIPTIONS, 1, trial=True):
            if self.detached.evict_oldest(caller.account) is None:
                return self._quotas.charge(caller, SUBSCRIPTIONS, 1)
        return True

    def _can_see_durable(self, caller: Identity, durable: DurableTopic) -> bool:
        return self._is_visible(caller, durable.name.encode(), creator_of(durable))

    def _can_see(self, caller: Identity, topic: EphemeralTopic) -> bool:
        return self._is_visible(caller, topic.name, (topic.current or topic.marked[-1]).creator)

    def _is_visible(self, caller: Identity, name: bytes, creator: Identity) -> bool:
        if caller.owns(creator):
            return True
        verbs = ("produce", "subscribe", "delete")
        return any(self._policy.allows(caller, verb, name, creator) for verb in verbs)


def _log_eviction(broker: Broker, reader: PullReader) -> None:
    broker.log.warning(
        "subscription evicted",
        dialect="freud",
        user=broker.quotas.describe(reader.identity),
        topic=reader.topic_name.decode("utf-8", "backslashreplace"),
        messages_lost=reader.held_messages,
        reason="detached, and its user's quota is full",
    )
