"""Ephemeral topics: created, read by pulling, deleted with a notice, created again.

`lifecycle.py` has the table of states; here each of its cells is carried out, and
`succession.py` leads from one incarnation to the next. A topic has at most one
*current* incarnation, which takes messages and readers, and any number of *marked*
ones, whose readers have yet to read their end. The current one is pending while
there are marked ones: it only buffers. What becomes of the readers is in `readers.py`.

Ids and push readers are the fan-out's. The name is held there while a current
incarnation exists, so that its ids go on, and collected while somebody pulls.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
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
from polybus.dialects.freud.server.ephemeral_delivery import (
    EphemeralDelivery,
    ProduceResult,
    PushDelivery,
    put_and_wake,
)
from polybus.dialects.freud.server.ephemeral_topic import ShortPath, Tally
from polybus.dialects.freud.server.pull_reader import PullReader, PullReaders, new_id
from polybus.dialects.freud.server.topic_lifecycle import (
    NOTICE_PREFIX,
    TABLE,
    EphemeralTopic,
    Incarnation,
    LifecycleState,
    TopicAction,
    TopicLifecycle,
    TopicVerb,
)
from polybus.dialects.freud.server.unread_queue import Chunk, Range
from polybus.durable.topic_names import creator_of
from polybus.model.access_rule import PRODUCE

if TYPE_CHECKING:
    from polybus.bus.connection import Connection
    from polybus.bus.counters import Counters
    from polybus.bus.policy import Policy
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.durable_pull_reader import DurablePullReaders
    from polybus.kernel.fanout import CollectedBatch, Fanout, Source
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
        self._delivery = EphemeralDelivery(fanout, pushing, quotas, counters, limits, wall_ns)
        self._policy = policy
        self._quotas = quotas
        self._counters = counters
        self._clock = clock
        self._wall_ns = wall_ns
        self._topics: dict[bytes, EphemeralTopic] = {}
        self._lifecycle = TopicLifecycle(
            self._topics, fanout, self._delivery, quotas, limits, clock, wall_ns
        )
        self.tally = Tally()  # of messages, beside those that the fan-out counts
        self.readers = PullReaders(
            self._lifecycle, quotas, counters, self.tally, limits.subscriber_timeout_s, clock
        )
        # Of a bus with durable topics, which are pulled from here, too.
        self.durable_readers: DurablePullReaders | None = None
        self.is_durable: Callable[[bytes], bool] = lambda name: False
        self.short_path = ShortPath(
            self._topics,
            self.readers.by_id,
            fanout,
            self.tally,
            limits.max_unread_messages,
            wall_ns,
        )

    def exists(self, name: bytes) -> bool:
        """Is the name taken: by a topic, or by what is left of one?"""
        return name in self._topics

    # --- the verbs

    def create(self, caller: Identity, name: bytes) -> RequestOutcome:
        topic = self._topics.get(name) or EphemeralTopic(name)
        if self.is_durable(name):
            return NOTHING_HAPPENED
        if TABLE[TopicVerb.CREATE, topic.state] is TopicAction.NOTHING:
            return NOTHING_HAPPENED
        if not self._policy.allows(caller, "create", name):
            return NO
        if not self._quotas.charge(caller, TOPICS, 1):
            return over_quota(TOPICS)
        self._lifecycle.create_incarnation(topic, caller)
        return OK

    def delete(self, caller: Identity, name: bytes) -> RequestOutcome:
        topic = self._topics.get(name)
        if self.is_durable(name):
            return NO
        if topic is None or TABLE[TopicVerb.DELETE, topic.state] is TopicAction.NOTHING:
            return NOTHING_HAPPENED
        assert topic.current is not None
        if not self._policy.allows(caller, "delete", name, topic.current.creator):
            return NO
        self._lifecycle.mark_for_deletion(topic, topic.current)
        return OK

    def subscribe(self, caller: Identity, name: bytes) -> RequestOutcome | PullReader:
        topic = self._topics.get(name)
        if (
            topic is None
            and self.durable_readers is not None
            and (kept := self.durable_readers.find(name))
        ):
            return self._subscribe_durable(self.durable_readers, caller, kept)
        if topic is None or TABLE[TopicVerb.SUBSCRIBE, topic.state] is TopicAction.MISSING:
            return DOES_NOT_EXIST
        assert topic.current is not None
        if not self._policy.allows(caller, "subscribe", name, topic.current.creator):
            return NO
        if not self._quotas.charge(caller, SUBSCRIPTIONS, 1):
            return over_quota(SUBSCRIPTIONS)
        return self._add_reader(topic, topic.current, caller)

    def unsubscribe(self, reader: PullReader) -> None:
        self.readers.end(reader, "unsubscribed")

    def produce(
        self,
        party: Connection,
        name: bytes,
        offsets: bytes,
        bodies: bytes,
        count: int,
        *,
        waits: bool = True,
    ) -> ProduceResult:
        """Takes the whole batch or nothing of it.

        A party that does not wait for a full push reader goes past it: that reader loses it.
        """
        topic = self._topics.get(name)
        if topic is None or topic.current is None:
            return ProduceResult(DOES_NOT_EXIST)
        current = topic.current
        if not self._policy.allows(party.pipe.identity, "produce", name, current.creator):
            return ProduceResult(NO)
        self._cache_verdict(party.source, name)
        if TABLE[TopicVerb.PRODUCE, topic.state] is TopicAction.BUFFER:
            produced = self._delivery.buffer(current, offsets, bodies, count)
        else:
            whom = party if waits else None
            produced = self._delivery.deliver(whom, current, offsets, bodies, count)
        if produced.outcome in (OK, NOTHING_HAPPENED):
            self.tally.received += count
            self.tally.received_bytes += len(bodies)
        return produced

    def count(self, caller: Identity, name: bytes) -> RequestOutcome | int:
        topic = self._topics.get(name)
        if (
            topic is None
            and self.durable_readers is not None
            and (kept := self.durable_readers.find(name))
        ):
            return self.durable_readers.count(kept) if self._can_see_durable(caller, kept) else NO
        if topic is None:
            return DOES_NOT_EXIST
        if not self._can_see(caller, topic):
            return NO
        pushed = self._fanout.subscriber_count(name)
        if topic.current is not None:
            return len(topic.current.readers) + pushed
        return sum(len(one.readers) for one in topic.marked) + pushed

    def names(self, caller: Identity) -> list[bytes]:
        """Of all topics that the caller may know of, durable ones included."""
        seen = [topic.name for topic in self._topics.values() if self._can_see(caller, topic)]
        kept = self.durable_readers.topics() if self.durable_readers is not None else []
        return sorted(
            seen + [topic.name.encode() for topic in kept if self._can_see_durable(caller, topic)]
        )

    def creator_of(self, name: bytes) -> Identity | None:
        topic = self._topics.get(name)
        if topic is None:
            return None
        return (topic.current or topic.marked[-1]).creator

    @property
    def known_count(self) -> int:
        """Of names that a List has to look at."""
        return len(self._topics) + (
            self.durable_readers.topic_count if self.durable_readers is not None else 0
        )

    def fan_out_count(self, name: bytes) -> int:
        """How many readers and lives a verb on this name may have to touch."""
        topic = self._topics.get(name)
        if topic is None:
            return 0
        current = len(topic.current.readers) if topic.current is not None else 0
        return current + len(topic.marked) + self._fanout.subscriber_count(name)

    # --- what the rest of the bus does

    def on_collected(self, batch: CollectedBatch) -> None:
        """Messages of a push dialect for a name that is collected; whoever has no room loses."""
        topic = self._topics.get(batch.topic)
        if topic is None or topic.current is None:
            return
        buffering = TABLE[TopicVerb.COLLECT, topic.state] is TopicAction.BUFFER
        self._delivery.accept_pushed(
            topic.current, batch.first_id, batch.offsets, batch.bodies, buffering=buffering
        )

    def on_assembled(self, name: bytes, body: bytes) -> None:
        """A message of a push dialect that came in pieces: push readers have had those."""
        topic = self._topics.get(name)
        if topic is None or topic.current is None:
            return
        if topic.state is LifecycleState.LIVE and not topic.current.readers:
            if not self._fanout.subscriber_count(name):
                self._counters.count("dropped", "no_subscriber")
            return  # those who wanted it whole have gone meanwhile
        first_id = self._fanout.next_id(name)
        self._fanout.set_next_id(name, first_id + 1)
        offsets = array("i", [0, len(body)]).tobytes()
        buffering = TABLE[TopicVerb.COLLECT, topic.state] is TopicAction.BUFFER
        self._delivery.accept_pushed(topic.current, first_id, offsets, body, buffering=buffering)

    def on_push_subscribed(self, name: bytes) -> None:
        """A push reader has come: a buffer that waited for its first reader goes to it."""
        topic = self._topics.get(name)
        if topic is not None and topic.state is LifecycleState.AWAITING:
            self._lifecycle.go_live(topic)

    def end_denied(self) -> int:
        """Ends subscriptions that the policy allows no longer; says how many those were."""
        return self.readers.end_denied(self._policy)

    def tick(self) -> None:
        now_s = self._clock()
        if self.durable_readers is not None:
            self.durable_readers.tick()
        self.readers.tick(now_s)
        for one in self._lifecycle.find_overdue(now_s):
            for reader in self._lifecycle.expire(one):
                self.readers.end(reader, "deletion_timeout")

    # --- inside

    def _cache_verdict(self, source: Source, name: bytes) -> None:
        """Where rules speak of producing, the short path needs their verdict on the class."""
        if (
            self._policy.has_rules_for(PRODUCE)
            and self._fanout.verdict(source.identity, name) is None
        ):
            allowed = self._policy.may_produce(source.identity, name)
            self._fanout.remember_verdict(source.identity, name, allowed)

    def on_durable_removed(self, kept: DurableTopic) -> None:
        """A durable topic was dropped: its readers are told as those of any deleted one."""
        if self.durable_readers is None:
            return
        for reader in self.durable_readers.readers(kept):
            self.durable_readers.remove(reader)
            name = reader.topic_name
            notice = Chunk.of_notice(2**63 - 1, NOTICE_PREFIX + name, self._wall_ns())
            put_and_wake([reader], Range(notice, 0, 1))

    def _subscribe_durable(
        self, pulling: DurablePullReaders, caller: Identity, kept: DurableTopic
    ) -> RequestOutcome | PullReader:
        creator = creator_of(kept)
        if not self._policy.allows(caller, "subscribe", kept.name.encode(), creator):
            return NO
        if not self._quotas.charge(caller, SUBSCRIPTIONS, 1):
            return over_quota(SUBSCRIPTIONS)
        reader = pulling.add(new_id(), caller, kept)
        self.readers.add(reader)
        return reader

    def _can_see_durable(self, caller: Identity, kept: DurableTopic) -> bool:
        return self._may_know(caller, kept.name.encode(), creator_of(kept))

    def _can_see(self, caller: Identity, topic: EphemeralTopic) -> bool:
        return self._may_know(caller, topic.name, (topic.current or topic.marked[-1]).creator)

    def _may_know(self, caller: Identity, name: bytes, creator: Identity) -> bool:
        if caller.owns(creator):
            return True
        verbs = ("produce", "subscribe", "delete")
        return any(self._policy.allows(caller, verb, name, creator) for verb in verbs)

    def _add_reader(
        self, topic: EphemeralTopic, current: Incarnation, caller: Identity
    ) -> PullReader:
        reader = PullReader(new_id(), caller, current)
        self.readers.add(reader)
        current.readers[reader.id] = reader
        self._lifecycle.update_fanout(topic)
        if topic.state is LifecycleState.AWAITING:
            self._lifecycle.go_live(topic)
        return reader
