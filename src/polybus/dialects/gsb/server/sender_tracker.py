"""Who sent a message, for readers who are told: GSB's subscribers.

It is not stored with the message: there it could be written by whoever may produce (ADR
0030). Readers by push hear only what is committed while they are there, through this bus,
and it remembers who sent what until they have heard it.

A message gets its id with its commit, and may be read before the loop has heard of that.
So what was read waits until all that was on its way by then has been heard of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polybus.model.rows import Rows

# Remembered of one topic, some 100 bytes each: more are unread only if a subscriber that is
# full has fallen behind, and then it is not told of the oldest.
MAX_KNOWN = 65_536


class SenderEncoding(Protocol):
    """An encoding that tells who sent what it writes."""

    caller: bytes


class TopicSenders:
    """What is known of the senders on one topic."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}  # by id
        self.in_flight: dict[int, None] = {}  # in the order they were sent
        self.waiting: deque[tuple[int, Callable[[], None]]] = deque()  # until all up to this

    def __bool__(self) -> bool:
        return bool(self.known or self.in_flight)


class SenderTracker:
    def __init__(self) -> None:
        self.encodings: list[SenderEncoding] = []
        self.has_push_reader: Callable[[bytes], bool] = lambda name: False  # by push, from its log
        self._topics: dict[bytes, TopicSenders] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        """Of how many topics something is remembered."""
        return len(self._topics)

    def names_senders(self, encoding: object) -> bool:
        """To readers who have this encoding?"""
        return any(encoding is one for one in self.encodings)

    @contextmanager
    def sending_as(self, caller: bytes) -> Iterator[None]:
        """What is written meanwhile is from this caller; empty: from another dialect."""
        for encoding in self.encodings:
            encoding.caller = caller
        try:
            yield
        finally:
            for encoding in self.encodings:
                encoding.caller = b""

    def track(self, name: bytes, caller: bytes) -> Callable[[int], None]:
        """A message is on its way to the disk; to be told of its id, 0: it was not kept."""
        number = next(self._numbers)
        topic = self._topics.setdefault(name, TopicSenders())
        topic.in_flight[number] = None
        return partial(self._on_committed, name, topic, number, caller)

    def when_resolved(self, name: bytes, then: Callable[[], None]) -> None:
        """Goes on once all that is on its way now has been heard of."""
        topic = self._topics.get(name)
        if topic is None or not topic.in_flight:
            then()
        else:
            topic.waiting.append((next(reversed(topic.in_flight)), then))

    def split_by_sender(self, name: bytes, rows: Rows) -> list[tuple[int, int, bytes]]:
        """Messages of one sender behind each other: start, end (exclusive), who."""
        topic = self._topics.get(name)
        if topic is None or not topic.known:
            return [(0, rows.count, b"")]
        ids = memoryview(rows.ids).cast("B").cast("q")
        found, start = [], 0
        for caller, run in groupby(topic.known.get(number, b"") for number in ids):
            end = start + sum(1 for _ in run)
            found.append((start, end, caller))
            start = end
        return found

    def forget_before(self, name: bytes, before_id: int) -> None:
        """Nobody will read what comes before this."""
        topic = self._topics.get(name)
        if topic is None:
            return
        for number in list(takewhile(before_id.__gt__, topic.known)):  # they came in this order
            del topic.known[number]
        self._drop_if_empty(name, topic)

    def _on_committed(
        self, name: bytes, topic: TopicSenders, number: int, caller: bytes, found: int
    ) -> None:
        del topic.in_flight[number]
        if found and self.has_push_reader(name):
            topic.known[found] = caller
            if len(topic.known) > MAX_KNOWN:
                del topic.known[next(iter(topic.known))]
        waiting = topic.waiting
        while waiting and (not topic.in_flight or waiting[0][0] < next(iter(topic.in_flight))):
            waiting.popleft()[1]()
        self._drop_if_empty(name, topic)

    def _drop_if_empty(self, name: bytes, topic: TopicSenders) -> None:
        if not topic and self._topics.get(name) is topic:
            del self._topics[name]
