"""From one incarnation of a topic to the next: marked, settled, live again, or given up.

The states and their names are `lifecycle.py`'s. Whatever changes here, the fan-out is
told (`follow`): it holds the name while there is a current incarnation, and collects
what push dialects publish while somebody pulls or a buffer waits.


The states of an ephemeral topic, and what each request does in each of them.

    gone ──create──▶ live ──delete──▶ deleting ──create──▶ recreating
     ▲                │ ▲                │ ▲                   │  │
     │  no readers    │ │ first reader,  │ └──────delete───────┘  │
     └────────────────┘ │ or time is up  │                        │
     ▲                awaiting ◀─────────┼── last old reader gone, buffer not empty, nobody there
     └───────────────────────────────────┘   last old reader gone

    live        takes messages and readers
    awaiting    live, but what was buffered for it waits for its first reader
    deleting    marked: readers read what they have and then the notice
    recreating  marked, and the next incarnation already takes readers and buffers messages
    gone        no such topic

The table is the whole truth about which request means what; `topics.py` carries
it out. A cell names a method of `EphemeralTopics`.

One life of an ephemeral topic: from its Create until every reader has read its end.

An incarnation that was created while an earlier one still waits for its readers
is *pending*: what is produced is buffered until the earlier ones have gone.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from polybus.bus.quotas import TOPICS
from polybus.dialects.freud.server.ephemeral_delivery import put_and_wake
from polybus.dialects.freud.server.ephemeral_topic import Life, Lives
from polybus.dialects.freud.server.unread_queue import Chunk, Range

if TYPE_CHECKING:
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.ephemeral_delivery import EphemeralDelivery
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.dialects.freud.server.unread_queue import Range
    from polybus.kernel.fanout import Fanout
    from polybus.model.identity import Identity


class LifecycleState(Enum):
    GONE = "gone"
    LIVE = "live"
    AWAITING = "awaiting"
    DELETING = "deleting"
    RECREATING = "recreating"


class TopicVerb(Enum):
    CREATE = "create"
    DELETE = "delete"
    SUBSCRIBE = "subscribe"
    PRODUCE = "produce"
    COUNT = "count"
    COLLECT = "collect"  # a push dialect published to the name


class TopicAction(Enum):
    NOTHING = "nothing_happens"
    MISSING = "does_not_exist"
    OPEN = "open_incarnation"
    MARK = "mark_for_deletion"
    JOIN = "add_reader"
    DELIVER = "deliver"
    BUFFER = "hold_back"
    COUNT = "count_readers"
    IGNORE = "ignore"


_A = TopicAction
_COLUMNS = (
    LifecycleState.GONE,
    LifecycleState.LIVE,
    LifecycleState.AWAITING,
    LifecycleState.DELETING,
    LifecycleState.RECREATING,
)
_ROWS = {
    #                gone        live        awaiting    deleting    recreating
    TopicVerb.CREATE: (_A.OPEN, _A.NOTHING, _A.NOTHING, _A.OPEN, _A.NOTHING),
    TopicVerb.DELETE: (_A.NOTHING, _A.MARK, _A.MARK, _A.NOTHING, _A.MARK),
    TopicVerb.SUBSCRIBE: (_A.MISSING, _A.JOIN, _A.JOIN, _A.MISSING, _A.JOIN),
    TopicVerb.PRODUCE: (_A.MISSING, _A.DELIVER, _A.BUFFER, _A.MISSING, _A.BUFFER),
    TopicVerb.COUNT: (_A.MISSING, _A.COUNT, _A.COUNT, _A.COUNT, _A.COUNT),
    TopicVerb.COLLECT: (_A.IGNORE, _A.DELIVER, _A.BUFFER, _A.IGNORE, _A.BUFFER),
}
TABLE: dict[tuple[TopicVerb, LifecycleState], TopicAction] = {
    (verb, state): action
    for verb, row in _ROWS.items()
    for state, action in zip(_COLUMNS, row, strict=True)
}


class BufferedRange(NamedTuple):
    """`relayed`: push readers have had it already, because it came from one of theirs."""

    found: Range
    relayed: bool


class Incarnation(Life):
    buffer: list[BufferedRange]
    readers: dict[bytes, PullReader]

    def __init__(self, name: bytes, creator: Identity) -> None:
        self.creator = creator
        self.buffered_bytes = 0
        self.buffered_messages = 0
        self.deadline_s: float | None = None  # of its end, or of its buffer

    def append_buffer(self, found: Range, *, relayed: bool) -> None:
        self.buffered_bytes += found.size
        self.buffered_messages += len(found)
        last = self.buffer[-1] if self.buffer else None
        if last is None or last.relayed != relayed or not last.found.extend(found):
            self.buffer.append(BufferedRange(found, relayed))

    def take_buffer(self) -> list[BufferedRange]:
        buffered, self.buffer = self.buffer, []
        self.buffered_bytes = self.buffered_messages = 0
        return buffered


NOTICE_PREFIX = b"\0FREUD\0DELETED\0"


class EphemeralTopic(Lives):
    current: Incarnation | None
    marked: list[Incarnation]

    @property
    def state(self) -> LifecycleState:
        if self.marked:
            return LifecycleState.RECREATING if self.current else LifecycleState.DELETING
        if self.current is None:
            return LifecycleState.GONE
        return LifecycleState.AWAITING if self.current.buffer else LifecycleState.LIVE


class TopicLifecycle:
    def __init__(
        self,
        topics: dict[bytes, EphemeralTopic],
        fanout: Fanout,
        movement: EphemeralDelivery,
        quotas: Quotas,
        limits: FreudLimits,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._fanout = fanout
        self._movement = movement
        self._quotas = quotas
        self._limits = limits
        self._clock = clock
        self._wall_ns = wall_ns
        self._timed: dict[Incarnation, None] = {}  # those with a deadline

    def create_incarnation(self, topic: EphemeralTopic, creator: Identity) -> None:
        self._topics[topic.name] = topic
        topic.current = Incarnation(topic.name, creator)
        self.update_fanout(topic)
        self._fanout.set_next_id(topic.name, 0)

    def mark_for_deletion(self, topic: EphemeralTopic, current: Incarnation) -> None:
        self._movement.drop_buffer(current, "topic_deleted")
        notice = Chunk.of_notice(
            self._fanout.next_id(topic.name),
            NOTICE_PREFIX + topic.name,
            current.writer.time(self._wall_ns()),
        )
        topic.current = None
        topic.marked.append(current)
        self._set_deadline(current, self._clock() + self._limits.subscriber_timeout_s)
        self.update_fanout(topic)
        put_and_wake(current.readers.values(), Range(notice, 0, 1))
        self.remove_if_read(topic, current)

    def remove_if_read(self, topic: EphemeralTopic, marked: Incarnation) -> None:
        """A marked incarnation without readers has gone; the last one makes way for the next."""
        if marked.readers or marked not in topic.marked:
            return
        topic.marked.remove(marked)
        self._set_deadline(marked, None)
        self._quotas.release(marked.creator, TOPICS, 1)
        if topic.marked:
            return
        if topic.current is None:
            del self._topics[topic.name]
        else:
            self._activate_next(topic, topic.current)

    def on_reader_ended(self, reader: PullReader, incarnation: Incarnation) -> None:
        """A reader has ended: nobody may be left."""
        del incarnation.readers[reader.id]
        topic = self._topics[incarnation.name]
        if topic.current is incarnation:
            self.update_fanout(topic)
        else:
            self.remove_if_read(topic, incarnation)

    def go_live(self, topic: EphemeralTopic) -> None:
        current = topic.current
        assert current is not None
        self._set_deadline(current, None)
        self._movement.flush_buffer(current)
        self.update_fanout(topic)

    def find_overdue(self, now_s: float) -> list[Incarnation]:
        return [i for i in self._timed if i.deadline_s is not None and i.deadline_s <= now_s]

    def expire(self, one: Incarnation) -> list[PullReader]:
        """Time is up: for a buffer nobody came for, or for these, the readers of a marked one."""
        topic = self._topics[one.name]
        self._set_deadline(one, None)
        if one is not topic.current:
            return list(one.readers.values())
        self._movement.drop_buffer(one, "no_subscriber")
        self.update_fanout(topic)
        return []

    def update_fanout(self, topic: EphemeralTopic) -> None:
        """Tells the fan-out what the topic wants of it now."""
        current = topic.current
        buffering = topic.state in (LifecycleState.RECREATING, LifecycleState.AWAITING)
        collect = current is not None and (bool(current.readers) or buffering)
        if current is not None:
            self._fanout.set_hold(topic.name, True)
        self._fanout.set_collect(topic.name, collect)
        if current is None:
            self._fanout.set_hold(topic.name, False)

    def _set_deadline(self, one: Incarnation, deadline_s: float | None) -> None:
        one.deadline_s = deadline_s
        if deadline_s is None:
            self._timed.pop(one, None)
        else:
            self._timed[one] = None

    def _activate_next(self, topic: EphemeralTopic, current: Incarnation) -> None:
        """The old ones have gone: what was buffered goes out, or waits for somebody to come."""
        if current.readers or self._fanout.subscriber_count(topic.name):
            self.go_live(topic)
        elif current.buffer:
            self._set_deadline(current, self._clock() + self._limits.subscriber_timeout_s)
        self.update_fanout(topic)
