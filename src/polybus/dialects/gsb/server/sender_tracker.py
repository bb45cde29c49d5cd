"""The senders of committed messages, for encodings that name them (GSB's).

A sender is not stored with its message, because any producer could then forge it (ADR 0030).
Push readers receive only messages that this bus commits while they are subscribed, so the bus
remembers the sender of each message until they have read it.

A message gets its id with its commit, and a reader may read it before the loop has processed
the commit. Rows that were read therefore wait until all messages in flight at that time are
committed or have failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Protocol

from polybus.durable.durable_bus import durable_bus

if TYPE_CHECKING:
    from polybus.bus.broker import Broker
    from polybus.model.rows import Rows

# Senders remembered per topic, some 100 bytes each. More are unread only if a subscriber has
# fallen behind; it then gets the oldest messages without a sender.
MAX_KNOWN = 65_536


class SenderEncoding(Protocol):
    """An encoding that writes the sender of each message."""

    caller: bytes


class TopicSenders:
    """The known senders of one topic."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}  # by message id
        self.in_flight: dict[int, None] = {}  # numbers of uncommitted messages, in order
        # Callbacks; each waits for the message with this number and all before it.
        self.waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self.known or self.in_flight)


class SenderTracker:
    def __init__(self) -> None:
        self.encodings: list[SenderEncoding] = []
        # Whether a topic is read by push; without a store none is.
        self.has_push_reader: Callable[[bytes], bool] = lambda name: False
        self._topics: dict[bytes, TopicSenders] = {}
        self._numbers = count(1)

    @classmethod
    def install(cls, broker: Broker, encodings: Iterable[SenderEncoding]) -> SenderTracker:
        """Make the tracker of a broker. Its store, if it has one, must be attached already."""
        senders = cls()
        senders.encodings += encodings
        durable = durable_bus(broker)
        if durable is not None:
            durable.push_readers.senders = senders
            senders.has_push_reader = durable.push_readers.is_read_by_push
        return senders

    def __len__(self) -> int:
        """Return the number of topics with known senders."""
        return len(self._topics)

    def names_senders(self, encoding: object) -> bool:
        """Return True if an encoding writes senders."""
        return any(encoding is known for known in self.encodings)

    @contextmanager
    def sending_as(self, caller: bytes) -> Iterator[None]:
        """Set the sender of all messages encoded within the block."""
        for encoding in self.encodings:
            encoding.caller = caller
        try:
            yield
        finally:
            for encoding in self.encodings:
                encoding.caller = b""

    def track(self, name: bytes, caller: bytes) -> Callable[[int], None]:
        """Track a message in flight. Returns a callback for its id; 0 means that it failed."""
        number = next(self._numbers)
        topic = self._topics.setdefault(name, TopicSenders())
        topic.in_flight[number] = None
        return partial(self._on_committed, name, topic, number, caller)

    def when_resolved(self, name: bytes, then: Callable[[], None]) -> None:
        """Call `then` once all messages now in flight are committed or have failed."""
        topic = self._topics.get(name)
        if topic is None or not topic.in_flight:
            then()
        else:
            topic.waiting.append((next(reversed(topic.in_flight)), then))

    def split_by_sender(self, name: bytes, rows: Rows) -> list[tuple[int, int, bytes]]:
        """Split rows into runs of one sender. Returns (start, end (exclusive), sender) for each."""
        topic = self._topics.get(name)
        if topic is None or not topic.known:
            return [(0, rows.count, b"")]
        ids = memoryview(rows.ids).cast("B").cast("q")
        runs, start = [], 0
        for caller, run in groupby(topic.known.get(number, b"") for number in ids):
            end = start + sum(1 for _ in run)
            runs.append((start, end, caller))
            start = end
        return runs

    def forget_before(self, name: bytes, before_id: int) -> None:
        """Forget the senders of messages before this id, which all readers have passed."""
        topic = self._topics.get(name)
        if topic is None:
            return
        for number in list(takewhile(before_id.__gt__, topic.known)):  # ids are in ascending order
            del topic.known[number]
        self._drop_if_empty(name, topic)

    def _on_committed(
        self, name: bytes, topic: TopicSenders, number: int, caller: bytes, message_id: int
    ) -> None:
        del topic.in_flight[number]
        if message_id and self.has_push_reader(name):
            topic.known[message_id] = caller
            if len(topic.known) > MAX_KNOWN:
                del topic.known[next(iter(topic.known))]
        waiting = topic.waiting
        while waiting and (not topic.in_flight or waiting[0][0] < next(iter(topic.in_flight))):
            waiting.popleft()[1]()
        self._drop_if_empty(name, topic)

    def _drop_if_empty(self, name: bytes, topic: TopicSenders) -> None:
        if not topic and self._topics.get(name) is topic:
            del self._topics[name]
