"""Ephemeral topics: created, read by pulling, deleted with a notice, created again.

`lifecycle.py` has the table of states; here each of its cells is carried out, and
`succession.py` leads from one incarnation to the next. A topic has at most one
*current* incarnation, which takes messages and readers, and any number of *marked*
ones, whose readers have yet to read their end. The current one is pending while
there are marked ones: it only buffers.

Ids and push readers are the fan-out's. The name is held there while a current
incarnation exists, so that its ids go on, and collected while somebody pulls.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from polybus.bus.binding import creator_of
from polybus.bus.incarnation import Incarnation
from polybus.bus.lifecycle import TABLE, Action, State, Verb
from polybus.bus.movement import Movement, Produced, Pushing, put
from polybus.bus.outcomes import (
    DOES_NOT_EXIST,
    NO,
    NOTHING_HAPPENED,
    OK,
    Outcome,
    over_quota,
)
from polybus.bus.pulling import LogReader, Pulling
from polybus.bus.quotas import BYTES, SUBSCRIPTIONS, TOPICS
from polybus.bus.reader import Reader
from polybus.bus.succession import NOTICE_PREFIX, Succession, Topic
from polybus.kernel.ephemeral import ShortPath, Tally
from polybus.kernel.unread import Chunk, Range
from polybus.model.rules import PRODUCE

if TYPE_CHECKING:
    from polybus.bus.party import Party
    from polybus.bus.policy import Policy
    from polybus.bus.quotas import Quotas
    from polybus.bus.stats import Counters
    from polybus.kernel.fanout import Collected, Fanout, Source
    from polybus.model.identity import Identity
    from polybus.model.limits import FreudLimits
    from polybus.model.topic import Topic as DurableTopic

READER_ID_BYTES = 16


class EphemeralTopics:
    def __init__(
        self,
        fanout: Fanout,
        pushing: Pushing,
        policy: Policy,
        quotas: Quotas,
        counters: Counters,
        limits: FreudLimits,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self._fanout = fanout
        self._movement = Movement(fanout, pushing, quotas, counters, limits, wall_ns)
        self._policy = policy
        self._quotas = quotas
        self._counters = counters
        self._limits = limits
        self._clock = clock
        self._wall_ns = wall_ns
        self._topics: dict[bytes, Topic] = {}
        self._readers: dict[bytes, Reader] = {}
        self._unowned: dict[Reader, None] = {}
        self._succession = Succession(
            self._topics, fanout, self._movement, quotas, limits, clock, wall_ns
        )
        self._tally = Tally()
        # Of a bus with durable topics, which are pulled from here, too.
        self.pulling: Pulling | None = None
        self.is_durable: Callable[[bytes], bool] = lambda name: False
        self.short_path = ShortPath(
            self._topics, self._readers, fanout, self._tally, limits.max_unread_messages, wall_ns
        )

    def exists(self, name: bytes) -> bool:
        """Is the name taken: by a topic, or by what is left of one?"""
        return name in self._topics

    # --- the verbs

    def create(self, caller: Identity, name: bytes) -> Outcome:
        topic = self._topics.get(name) or Topic(name)
        if self.is_durable(name):
            return NOTHING_HAPPENED
        if TABLE[Verb.CREATE, topic.state] is Action.NOTHING:
            return NOTHING_HAPPENED
        if not self._policy.allows(caller, "create", name):
            return NO
        if not self._quotas.charge(caller, TOPICS, 1):
            return over_quota(TOPICS)
        self._succession.begin(topic, caller)
        return OK

    def delete(self, caller: Identity, name: bytes) -> Outcome:
        topic = self._topics.get(name)
        if self.is_durable(name):
            return NO
        if topic is None or TABLE[Verb.DELETE, topic.state] is Action.NOTHING:
            return NOTHING_HAPPENED
        assert topic.current is not None
        if not self._policy.allows(caller, "delete", name, topic.current.creator):
            return NO
        self._succession.mark(topic, topic.current)
        return OK

    def subscribe(self, caller: Identity, name: bytes) -> Outcome | Reader:
        topic = self._topics.get(name)
        if topic is None and self.pulling is not None and (kept := self.pulling.find(name)):
            return self._follow_log(self.pulling, caller, kept)
        if topic is None or TABLE[Verb.SUBSCRIBE, topic.state] is Action.MISSING:
            return DOES_NOT_EXIST
        assert topic.current is not None
        if not self._policy.allows(caller, "subscribe", name, topic.current.creator):
            return NO
        if not self._quotas.charge(caller, SUBSCRIPTIONS, 1):
            return over_quota(SUBSCRIPTIONS)
        return self._add_reader(topic, topic.current, caller)

    def unsubscribe(self, reader: Reader) -> None:
        self._end_reader(reader, "unsubscribed")

    def produce(
        self,
        party: Party,
        name: bytes,
        offsets: bytes,
        bodies: bytes,
        count: int,
        *,
        waits: bool = True,
    ) -> Produced:
        """Takes the whole batch or nothing of it.

        A party that does not wait for a full push reader goes past it: that reader loses it.
        """
        topic = self._topics.get(name)
        if topic is None or topic.current is None:
            return Produced(DOES_NOT_EXIST)
        current = topic.current
        if not self._policy.allows(party.pipe.identity, "produce", name, current.creator):
            return Produced(NO)
        self._remember(party.source, name)
        if TABLE[Verb.PRODUCE, topic.state] is Action.BUFFER:
            produced = self._movement.buffer(current, offsets, bodies, count)
        else:
            whom = party if waits else None
            produced = self._movement.deliver(whom, current, offsets, bodies, count)
        if produced.outcome in (OK, NOTHING_HAPPENED):
            self._tally.received += count
            self._tally.received_bytes += len(bodies)
        return produced

    def count(self, caller: Identity, name: bytes) -> Outcome | int:
        topic = self._topics.get(name)
        if topic is None and self.pulling is not None and (kept := self.pulling.find(name)):
            return self.pulling.count(kept) if self._sees_log(caller, kept) else NO
        if topic is None:
            return DOES_NOT_EXIST
        if not self._sees(caller, topic):
            return NO
        pushed = self._fanout.subscriber_count(name)
        if topic.current is not None:
            return len(topic.current.readers) + pushed
        return sum(len(one.readers) for one in topic.marked) + pushed

    def names(self, caller: Identity) -> list[bytes]:
        """Of all topics that the caller may know of, durable ones included."""
        seen = [topic.name for topic in self._topics.values() if self._sees(caller, topic)]
        kept = self.pulling.topics() if self.pulling is not None else []
        return sorted(
            seen + [topic.name.encode() for topic in kept if self._sees_log(caller, topic)]
        )

    def reader(self, caller: Identity, reader_id: bytes) -> Reader | None:
        """The subscription of this id, if it is the caller's."""
        reader = self._readers.get(reader_id)
        if reader is None or reader.identity.account != caller.account:
            return None
        reader.used_s = self._clock()
        return reader

    def creator_of(self, name: bytes) -> Identity | None:
        topic = self._topics.get(name)
        if topic is None:
            return None
        return (topic.current or topic.marked[-1]).creator

    @property
    def received(self) -> int:
        """Messages, beside those that the fan-out counts; so the other three."""
        return self._tally.received

    @property
    def received_bytes(self) -> int:
        return self._tally.received_bytes

    @property
    def delivered(self) -> int:
        return self._tally.delivered

    @property
    def delivered_bytes(self) -> int:
        return self._tally.delivered_bytes

    @property
    def reader_count(self) -> int:
        return len(self._readers)

    @property
    def known_count(self) -> int:
        """Of names that a List has to look at."""
        return len(self._topics) + (self.pulling.topic_count if self.pulling is not None else 0)

    def reach(self, name: bytes) -> int:
        """How many readers and lives a verb on this name may have to touch."""
        topic = self._topics.get(name)
        if topic is None:
            return 0
        current = len(topic.current.readers) if topic.current is not None else 0
        return current + len(topic.marked) + self._fanout.subscriber_count(name)

    # --- what readers and connections do

    def confirm(self, reader: Reader, taken: Range) -> None:
        """What was taken is in the reader's socket."""
        if reader.gone:
            return
        reader.confirm(taken)
        self._tally.delivered += len(taken)
        self._tally.delivered_bytes += taken.size
        self._quotas.release(reader.identity, BYTES, _charged(taken))
        if taken.chunk.notice:
            self._end_reader(reader, "deleted")

    def give_back(self, taken: Iterable[tuple[Reader, Range]]) -> None:
        """Their connection ended before these reached its socket.

        All are back in their places before anybody who waits is served.
        """
        readers: dict[Reader, None] = {}
        for reader, one in taken:
            if reader.gone:
                self._counters.count("dropped", "disconnected", _messages(one))
            else:
                reader.give_back(one)
                readers[reader] = None
        for reader in readers:
            reader.wake()

    def disown(self, readers: Iterable[Reader]) -> None:
        """Their connection has closed; another may go on with them for a while."""
        for reader in readers:
            if not reader.gone:
                reader.is_owned = False
                reader.used_s = self._clock()
                self._unowned[reader] = None

    # --- what the rest of the bus does

    def collected(self, batch: Collected) -> None:
        """Messages of a push dialect for a name that is collected; whoever has no room loses."""
        topic = self._topics.get(batch.topic)
        if topic is None or topic.current is None:
            return
        buffering = TABLE[Verb.COLLECT, topic.state] is Action.BUFFER
        self._movement.take_in(
            topic.current, batch.first_id, batch.offsets, batch.bodies, buffering=buffering
        )

    def put_together(self, name: bytes, body: bytes) -> None:
        """A message of a push dialect that came in pieces: push readers have had those."""
        topic = self._topics.get(name)
        if topic is None or topic.current is None:
            return
        if topic.state is State.LIVE and not topic.current.readers:
            if not self._fanout.subscriber_count(name):
                self._counters.count("dropped", "no_subscriber")
            return  # those who wanted it whole have gone meanwhile
        first_id = self._fanout.next_id(name)
        self._fanout.set_next_id(name, first_id + 1)
        offsets = array("i", [0, len(body)]).tobytes()
        buffering = TABLE[Verb.COLLECT, topic.state] is Action.BUFFER
        self._movement.take_in(topic.current, first_id, offsets, body, buffering=buffering)

    def heard(self, name: bytes) -> None:
        """A push reader has come: a buffer that waited for its first reader goes to it."""
        topic = self._topics.get(name)
        if topic is not None and topic.state is State.AWAITING:
            self._succession.go_live(topic)

    def enforce(self) -> int:
        """Ends subscriptions that the policy allows no longer; says how many those were."""
        lost = [
            reader
            for reader in self._readers.values()
            if not self._policy.allows(reader.identity, "subscribe", reader.topic_name)
        ]
        for reader in lost:
            if not reader.gone:  # whoever is woken by one of these may end another itself
                self._end_reader(reader, "subscription_revoked")
        return len(lost)

    def tick(self) -> None:
        now_s = self._clock()
        if self.pulling is not None:
            self.pulling.tick()
        timeout_s = self._limits.subscriber_timeout_s
        for reader in [r for r in self._unowned if r.has_waiters]:
            reader.used_s = now_s
        for reader in [r for r in self._unowned if now_s - r.used_s >= timeout_s]:
            self._end_reader(reader, "abandoned")
        for one in self._succession.overdue(now_s):
            for reader in self._succession.give_up(one):
                self._end_reader(reader, "deletion_timeout")

    # --- inside

    def _remember(self, source: Source, name: bytes) -> None:
        """Where rules speak of producing, the short path needs their verdict on the class."""
        if self._policy.mentions(PRODUCE) and self._fanout.verdict(source.identity, name) is None:
            allowed = self._policy.may_produce(source.identity, name)
            self._fanout.remember(source.identity, name, allowed)

    def log_gone(self, kept: DurableTopic) -> None:
        """A durable topic was dropped: its readers are told as those of any deleted one."""
        if self.pulling is None:
            return
        for reader in self.pulling.readers(kept):
            self.pulling.remove(reader)
            name = reader.topic_name
            notice = Chunk.of_notice(2**63 - 1, NOTICE_PREFIX + name, self._wall_ns())
            put([reader], Range(notice, 0, 1))

    def _follow_log(
        self, pulling: Pulling, caller: Identity, kept: DurableTopic
    ) -> Outcome | Reader:
        creator = creator_of(kept)
        if not self._policy.allows(caller, "subscribe", kept.name.encode(), creator):
            return NO
        if not self._quotas.charge(caller, SUBSCRIPTIONS, 1):
            return over_quota(SUBSCRIPTIONS)
        reader = pulling.add(os.urandom(READER_ID_BYTES), caller, kept)
        reader.account = self._quotas.account(caller)
        self._readers[reader.id] = reader
        return reader

    def _sees_log(self, caller: Identity, kept: DurableTopic) -> bool:
        return self._may_know(caller, kept.name.encode(), creator_of(kept))

    def _sees(self, caller: Identity, topic: Topic) -> bool:
        return self._may_know(caller, topic.name, (topic.current or topic.marked[-1]).creator)

    def _may_know(self, caller: Identity, name: bytes, creator: Identity) -> bool:
        if caller.owns(creator):
            return True
        verbs = ("produce", "subscribe", "delete")
        return any(self._policy.allows(caller, verb, name, creator) for verb in verbs)

    def _add_reader(self, topic: Topic, current: Incarnation, caller: Identity) -> Reader:
        reader = Reader(os.urandom(READER_ID_BYTES), caller, current)
        reader.account = self._quotas.account(caller)
        self._readers[reader.id] = reader
        current.readers[reader.id] = reader
        self._succession.follow(topic)
        if topic.state is State.AWAITING:
            self._succession.go_live(topic)
        return reader

    def _end_reader(self, reader: Reader, reason: str) -> None:
        incarnation = reader.incarnation
        self._quotas.release(reader.identity, BYTES, reader.held_bytes)
        self._quotas.release(reader.identity, SUBSCRIPTIONS, 1)
        lost = reader.end()
        del self._readers[reader.id]
        self._unowned.pop(reader, None)
        if incarnation is None:  # what it has not read stays in the log
            if self.pulling is not None and isinstance(reader, LogReader):
                self.pulling.remove(reader)
            reader.wake()
            return
        self._counters.count("dropped", reason, lost)
        del incarnation.readers[reader.id]
        topic = self._topics[incarnation.name]
        if topic.current is incarnation:
            self._succession.follow(topic)
        else:
            self._succession.settle(topic, incarnation)
        reader.wake()


def _messages(taken: Range) -> int:
    return 0 if taken.chunk.notice else len(taken)


def _charged(taken: Range) -> int:
    return 0 if taken.chunk.notice else taken.size
