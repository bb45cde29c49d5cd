"""The lifecycle of an ephemeral topic: a table of states and events, and its actions.

    gone ──create──▶ live ──delete──▶ deleting ──create──▶ recreating
                      ▲                │    ▲                │  │
                      │   marked_read  │    └────delete──────┘  │ marked_read
                      │       gone ◀───┘                        │
                      └──release or expire── awaiting ◀─────────┘

    gone        the topic does not exist
    live        accepts messages and readers
    deleting    marked: its readers read the unread messages and then the notice
    recreating  marked, and the next incarnation already accepts readers and buffers messages
    awaiting    no marked incarnation is left; the buffer waits for its first reader

An *incarnation* is one life of a topic, from its Create until every reader has read the
deletion notice. A topic has at most one current incarnation, which accepts messages and
readers, and any number of marked ones, whose readers have yet to read their notice.

`TABLE` decides: requests look their action up (`TopicLifecycle.find_action`), and every
change of state is `TopicLifecycle.apply`, which takes action and next state from the table.
After a change the fan-out is updated: it holds the name while there is a current
incarnation, so that its ids go on, and collects messages of push dialects while a pull
reader is subscribed or a buffer waits.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.bus.quotas import TOPICS
from polybus.dialects.freud.codec import deletion_notice
from polybus.dialects.freud.server.plain_delivery import LIVE, IncarnationBase, TopicBase
from polybus.dialects.freud.server.unread_queue import Chunk, Range, put_and_wake

if TYPE_CHECKING:
    from polybus.bus.quotas import Quotas
    from polybus.dialects.freud.limits import FreudLimits
    from polybus.dialects.freud.server.ephemeral_delivery import EphemeralDelivery
    from polybus.dialects.freud.server.pull_reader import PullReader
    from polybus.kernel.fanout import Fanout
    from polybus.model.identity import Identity


# --- the table ---------------------------------------------------------------


class TopicState(IntEnum):
    GONE = 0
    LIVE = LIVE
    AWAITING = 2
    DELETING = 3
    RECREATING = 4


class TopicEvent(IntEnum):
    # Requests
    CREATE = auto()
    DELETE = auto()
    SUBSCRIBE = auto()
    PRODUCE = auto()
    COUNT = auto()
    # From the rest of the bus
    COLLECT = auto()  # a push dialect published to the name
    MARKED_READ = auto()  # the last marked incarnation has no reader left
    RELEASE = auto()  # the buffer has a reader, or is empty
    EXPIRE = auto()  # no reader subscribed before the buffer's deadline


class TopicAction(Enum):
    # Answers without a change
    NOTHING = auto()
    MISSING = auto()
    COUNT = auto()
    # Ways of a message
    DELIVER = auto()
    BUFFER = auto()
    # Changes, each a method of TopicLifecycle
    OPEN = auto()
    MARK = auto()
    JOIN = auto()
    ACTIVATE = auto()
    FLUSH = auto()
    DROP = auto()
    REMOVE = auto()


class Transition(NamedTuple):
    action: TopicAction
    state: TopicState


_A, _S, _E = TopicAction, TopicState, TopicEvent
_COLUMNS = (_S.GONE, _S.LIVE, _S.AWAITING, _S.DELETING, _S.RECREATING)
_ACTIONS = {
    #               gone         live         awaiting     deleting     recreating
    _E.CREATE: (_A.OPEN, _A.NOTHING, _A.NOTHING, _A.OPEN, _A.NOTHING),
    _E.DELETE: (_A.NOTHING, _A.MARK, _A.MARK, _A.NOTHING, _A.MARK),
    _E.SUBSCRIBE: (_A.MISSING, _A.JOIN, _A.JOIN, _A.MISSING, _A.JOIN),
    _E.PRODUCE: (_A.MISSING, _A.DELIVER, _A.BUFFER, _A.MISSING, _A.BUFFER),
    _E.COUNT: (_A.MISSING, _A.COUNT, _A.COUNT, _A.COUNT, _A.COUNT),
    _E.COLLECT: (_A.NOTHING, _A.DELIVER, _A.BUFFER, _A.NOTHING, _A.BUFFER),
    _E.MARKED_READ: (_A.NOTHING, _A.NOTHING, _A.NOTHING, _A.REMOVE, _A.ACTIVATE),
    _E.RELEASE: (_A.NOTHING, _A.NOTHING, _A.FLUSH, _A.NOTHING, _A.NOTHING),
    _E.EXPIRE: (_A.NOTHING, _A.NOTHING, _A.DROP, _A.NOTHING, _A.NOTHING),
}
# The cells that change the state; every other one keeps it.
_NEXT_STATES = {
    (_E.CREATE, _S.GONE): _S.LIVE,
    (_E.CREATE, _S.DELETING): _S.RECREATING,
    (_E.DELETE, _S.LIVE): _S.DELETING,
    (_E.DELETE, _S.AWAITING): _S.DELETING,
    (_E.DELETE, _S.RECREATING): _S.DELETING,
    (_E.MARKED_READ, _S.DELETING): _S.GONE,
    (_E.MARKED_READ, _S.RECREATING): _S.AWAITING,
    (_E.RELEASE, _S.AWAITING): _S.LIVE,
    (_E.EXPIRE, _S.AWAITING): _S.LIVE,
}
TABLE: dict[tuple[int, int], Transition] = {
    (event, state): Transition(action, _NEXT_STATES.get((event, state), state))
    for event, row in _ACTIONS.items()
    for state, action in zip(_COLUMNS, row, strict=True)
}


# --- topics and incarnations -------------------------------------------------


class BufferedRange(NamedTuple):
    """`relayed`: push readers received it already, because a push dialect published it."""

    messages: Range
    relayed: bool


class Incarnation(IncarnationBase):
    """One life of a topic. Messages for a later time wait in `buffer`."""

    buffer: list[BufferedRange]
    readers: dict[bytes, PullReader]

    def __init__(self, name: bytes, creator: Identity) -> None:
        self.creator = creator
        self.buffered_bytes = 0
        self.buffered_messages = 0
        # Of the buffer while the topic is awaiting, of the readers once it is marked.
        self.deadline_s: float | None = None

    def append_buffer(self, messages: Range, *, relayed: bool) -> None:
        self.buffered_bytes += messages.size
        self.buffered_messages += len(messages)
        last = self.buffer[-1] if self.buffer else None
        if last is None or last.relayed != relayed or not last.messages.extend(messages):
            self.buffer.append(BufferedRange(messages, relayed))

    def take_buffer(self) -> list[BufferedRange]:
        """Return the buffer, and leave an empty one."""
        buffered, self.buffer = self.buffer, []
        self.buffered_bytes = self.buffered_messages = 0
        return buffered


class EphemeralTopic(TopicBase):
    current: Incarnation | None
    marked: list[Incarnation]


# --- running the table -------------------------------------------------------


class TopicLifecycle:
    """Applies events to topics. `topics` holds every topic that is not gone."""

    def __init__(
        self,
        topics: dict[bytes, EphemeralTopic],
        fanout: Fanout,
        delivery: EphemeralDelivery,
        quotas: Quotas,
        limits: FreudLimits,
        clock: Callable[[], float],
        wall_ns: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._fanout = fanout
        self._delivery = delivery
        self._quotas = quotas
        self._timeout_s = limits.subscriber_timeout_s
        self._clock = clock
        self._wall_ns = wall_ns
        self._timed: dict[Incarnation, None] = {}  # incarnations with a deadline
        self._actions: dict[TopicAction, Callable[..., None]] = {
            TopicAction.OPEN: self._open,
            TopicAction.MARK: self._mark,
            TopicAction.JOIN: self._join,
            TopicAction.ACTIVATE: self._activate,
            TopicAction.FLUSH: self._flush,
            TopicAction.DROP: self._drop,
            TopicAction.REMOVE: self._remove,
        }

    def find_action(self, event: TopicEvent, topic: EphemeralTopic | None) -> TopicAction:
        """Return the table's action; a topic that is None is gone."""
        return TABLE[event, TopicState.GONE if topic is None else topic.state].action

    def apply(self, event: TopicEvent, topic: EphemeralTopic, *arguments: Any) -> None:
        """Change the state by the table and run its action, if it has one."""
        action, state = TABLE[event, topic.state]
        # First the state: an action may wake a reader whose request is the next event.
        topic.state = state
        run = self._actions.get(action)
        if run is not None:
            run(topic, *arguments)

    def on_reader_ended(self, reader: PullReader, incarnation: Incarnation) -> None:
        del incarnation.readers[reader.id]
        topic = self._topics[incarnation.name]
        if topic.current is incarnation:
            self._update_fanout(topic)
        else:
            self._settle_marked(topic, incarnation)

    def find_overdue(self, now_s: float) -> list[Incarnation]:
        return [i for i in self._timed if i.deadline_s is not None and i.deadline_s <= now_s]

    def expire(self, incarnation: Incarnation) -> list[PullReader]:
        """Handle a passed deadline. Returns the readers that the caller must end."""
        # The buffer of another topic that expired may have evicted its last reader.
        if incarnation not in self._timed:
            return []
        topic = self._topics[incarnation.name]
        self._set_deadline(incarnation, None)
        if incarnation is not topic.current:
            return list(incarnation.readers.values())
        self.apply(TopicEvent.EXPIRE, topic)
        return []

    # --- actions

    def _open(self, topic: EphemeralTopic, creator: Identity) -> None:
        self._topics[topic.name] = topic
        topic.current = Incarnation(topic.name, creator)
        self._update_fanout(topic)
        self._fanout.set_next_id(topic.name, 0)

    def _mark(self, topic: EphemeralTopic) -> None:
        """Mark the current incarnation for deletion and put the notice to its readers."""
        marked = topic.current
        assert marked is not None
        self._delivery.drop_buffer(marked, "topic_deleted")
        notice = Chunk.of_notice(
            self._fanout.next_id(topic.name),
            deletion_notice(topic.name),
            marked.writer.time(self._wall_ns()),
        )
        topic.current = None
        topic.marked.append(marked)
        self._set_deadline(marked, self._clock() + self._timeout_s)
        self._update_fanout(topic)
        put_and_wake(marked.readers.values(), Range(notice, 0, 1))
        self._settle_marked(topic, marked)

    def _join(self, topic: EphemeralTopic, reader: PullReader) -> None:
        assert topic.current is not None
        topic.current.readers[reader.id] = reader
        self._update_fanout(topic)
        self.apply(TopicEvent.RELEASE, topic)

    def _activate(self, topic: EphemeralTopic) -> None:
        """The marked incarnations are gone: the buffer goes out, or waits for a reader."""
        current = topic.current
        assert current is not None
        has_reader = current.readers or self._fanout.subscriber_count(topic.name)
        if has_reader or not current.buffer:
            self.apply(TopicEvent.RELEASE, topic)
        else:
            self._set_deadline(current, self._clock() + self._timeout_s)
            self._update_fanout(topic)

    def _flush(self, topic: EphemeralTopic) -> None:
        current = topic.current
        assert current is not None
        self._set_deadline(current, None)
        self._delivery.flush_buffer(current)
        self._update_fanout(topic)

    def _drop(self, topic: EphemeralTopic) -> None:
        assert topic.current is not None
        self._delivery.drop_buffer(topic.current, "no_subscriber")
        self._update_fanout(topic)

    def _remove(self, topic: EphemeralTopic) -> None:
        del self._topics[topic.name]

    # --- helpers

    def _settle_marked(self, topic: EphemeralTopic, marked: Incarnation) -> None:
        """Forget a marked incarnation that has no readers; the last one is an event."""
        # Waking a reader in _mark may have ended the last one, and settled it already.
        if marked.readers or marked not in topic.marked:
            return
        topic.marked.remove(marked)
        self._set_deadline(marked, None)
        self._quotas.release(marked.creator, TOPICS, 1)
        if not topic.marked:
            self.apply(TopicEvent.MARKED_READ, topic)

    def _update_fanout(self, topic: EphemeralTopic) -> None:
        """Hold the name and collect its messages as the state of the topic requires."""
        current = topic.current
        buffers = self.find_action(TopicEvent.COLLECT, topic) is TopicAction.BUFFER
        collect = current is not None and (bool(current.readers) or buffers)
        # Hold before collecting and release after: without either the fan-out forgets the ids.
        if current is not None:
            self._fanout.set_hold(topic.name, True)
        self._fanout.set_collect(topic.name, collect)
        if current is None:
            self._fanout.set_hold(topic.name, False)

    def _set_deadline(self, incarnation: Incarnation, deadline_s: float | None) -> None:
        incarnation.deadline_s = deadline_s
        if deadline_s is None:
            self._timed.pop(incarnation, None)
        else:
            self._timed[incarnation] = None
