"""Oracle of kernel/subscriber_table: subscriptions in dicts and sets.

A topic exists while it has a reader (a subscription or the collect flag), is held, or is
durable; then its ids and verdicts are forgotten. A detached reader stays subscribed, but is
not a reader. Verdicts on other names are kept in `unread`; the caller bounds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.rig.oracle.rqueue import Encoding

ENCODINGS = 32


@dataclass
class Topic:
    readers: set[int] = field(default_factory=set)
    collect: bool = False
    hold: bool = False
    durable: bool = False
    next_id: int = 0
    verdicts: dict[int, bool] = field(default_factory=dict)  # identity class -> allowed

    @property
    def is_read(self) -> bool:
        return bool(self.readers) or self.collect


@dataclass
class Reader:
    outbox: object
    encoding: Encoding
    topics: set[bytes] = field(default_factory=set)
    detached: set[bytes] = field(default_factory=set)  # of these topics
    full: bool = False
    messages: int = 0
    bytes: int = 0


class SubscriberTable:
    def __init__(self) -> None:
        self.topics: dict[bytes, Topic] = {}
        self.unread: dict[bytes, dict[int, bool]] = {}
        self.readers: dict[int, Reader] = {}
        self._encodings: dict[int, Encoding] = {}
        self._joined = 0

    def add_subscriber(self, outbox: object, encoding: Encoding) -> int:
        if self._encodings.setdefault(encoding.number, encoding) is not encoding:
            raise ValueError("number")
        self._joined += 1
        self.readers[self._joined] = Reader(outbox, encoding)
        return self._joined

    def remove_subscriber(self, number: int) -> int:
        ended = self.unsubscribe_all(number)
        del self.readers[number]
        return ended

    def subscribe(self, number: int, topic: bytes) -> bool:
        reader = self.readers[number]
        if topic in reader.topics:
            return False
        self._open(topic).readers.add(number)
        reader.topics.add(topic)
        return True

    def unsubscribe(self, number: int, topic: bytes) -> bool:
        reader = self.readers[number]
        if topic not in reader.topics:
            return False
        reader.topics.remove(topic)
        if topic in reader.detached:
            reader.detached.remove(topic)
        else:
            self.topics[topic].readers.remove(number)
            self._close_if_unneeded(topic)
        return True

    def detach(self, number: int, topic: bytes) -> None:
        reader = self.readers[number]
        if topic not in reader.topics - reader.detached:
            raise KeyError(topic)
        reader.detached.add(topic)
        self.topics[topic].readers.remove(number)
        self._close_if_unneeded(topic)

    def attach(self, number: int, topic: bytes) -> None:
        self.readers[number].detached.remove(topic)
        self._open(topic).readers.add(number)

    def unsubscribe_all(self, number: int) -> int:
        return sum(self.unsubscribe(number, topic) for topic in self.topics_of(number))

    def is_subscribed(self, number: int, topic: bytes) -> bool:
        return topic in self.readers[number].topics

    def topics_of(self, number: int) -> frozenset[bytes]:
        return frozenset(self.readers[number].topics)

    def subscription_count(self, number: int) -> int:
        return len(self.readers[number].topics)

    def subscriber_count(self, topic: bytes) -> int:
        return len(self.topics[topic].readers) if topic in self.topics else 0

    def set_full(self, number: int, full: bool) -> None:
        self.readers[number].full = full

    def set_collect(self, topic: bytes, collect: bool) -> None:
        self._open(topic).collect = collect
        self._close_if_unneeded(topic)

    def set_hold(self, topic: bytes, hold: bool) -> None:
        self._open(topic).hold = hold
        self._close_if_unneeded(topic)

    def set_durable(self, topic: bytes, durable: bool) -> None:
        self._open(topic).durable = durable
        self._close_if_unneeded(topic)

    def has_topic(self, topic: bytes) -> bool:
        return topic in self.topics

    def next_id(self, topic: bytes) -> int:
        return self.topics[topic].next_id if topic in self.topics else 0

    def set_next_id(self, topic: bytes, next_id: int) -> None:
        self.topics[topic].next_id = next_id

    def sent_totals(self, number: int) -> tuple[int, int]:
        return self.readers[number].messages, self.readers[number].bytes

    def forget_verdicts(self) -> None:
        for verdicts in self.unread.values():
            verdicts.clear()
        for topic in self.topics.values():
            topic.verdicts.clear()

    @property
    def topic_count(self) -> int:
        return len(self.topics)

    @property
    def set_count(self) -> int:
        return len({frozenset(topic.readers) for topic in self.topics.values() if topic.readers})

    def _open(self, name: bytes) -> Topic:
        if not 1 <= len(name) <= 255:
            raise ValueError("topic")
        if name not in self.topics:
            self.topics[name] = Topic(verdicts=self.unread.pop(name, {}))
        return self.topics[name]

    def _close_if_unneeded(self, name: bytes) -> None:
        topic = self.topics[name]
        if not topic.is_read and not topic.hold and not topic.durable:
            del self.topics[name]
