"""Shapes of publish/subscribe load, turned into plans for whichever server is measured.

  Streams    one publisher, n subscribers, sent as fast as the server takes it
  Pairs      n publishers, each with a topic and a subscriber of its own, the same way
  Crowd      many publishers, one message in each send
  OneByOne   one message at a time, for latency

Messages are numbered and filled with fixed pseudo-random bytes; the order of topics and the choice
of subscriptions come from a fixed seed. So every run and every server sees the same messages.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.harness.load import Party, Plan
from bench.harness.peer import Peer, Running, Wire

CYCLE_BYTES = 256 * 1024  # of content; fits the second-level cache of common machines
SEED = 6567
FILLER = random.Random(SEED).randbytes(4096)
CROWD_FRAMES = 20  # of each publisher, in one cycle
LATENCY_FRAMES = 1000  # in one cycle
LATENCY_WARMUP = 500  # the first of a measurement, not counted
LATENCY_CYCLES = 5  # at least: a 99th percentile needs thousands


@dataclass(frozen=True)
class Work:
    """A plan and how many messages one cycle of it delivers to all subscribers together."""

    plan: Plan
    delivered_per_cycle: int
    least_cycles: int = 1


class Workload(Protocol):
    @property
    def is_latency(self) -> bool:
        """Whether it is measured in microseconds a message, or in messages a second."""

    def work(self, peer: Peer, running: Running) -> Work:
        """The plan for one server."""


Message = tuple[bytes, bytes]  # topic, content


def content(tag: bytes, size: int) -> bytes:
    """A content of this size that begins with the tag; `size` is at least as long."""
    start = int.from_bytes(tag[-2:], "big") % 1024
    return tag + FILLER[start : start + size - len(tag)]


@dataclass(frozen=True)
class Streams:
    """`sizes` are drawn at random; with many topics each subscriber takes a random half of them.

    A server that does not select topics sends all of them to each: twice as many messages from the
    same input."""

    subscribers: int
    sizes: tuple[int, ...]
    topics: int = 1
    is_latency: bool = field(default=False, init=False)

    def _topics(self) -> list[bytes]:
        return [b"bench"] if self.topics == 1 else [b"t%04d" % n for n in range(self.topics)]

    def _subscriptions(self, peer: Peer) -> list[list[bytes]]:
        chance, topics = random.Random(SEED), self._topics()
        if not peer.selects_topics:
            return [topics] * self.subscribers
        half = max(1, len(topics) // 2)
        return [sorted(chance.sample(topics, half)) for _ in range(self.subscribers)]

    def messages(self) -> list[Message]:
        chance, topics = random.Random(SEED + 1), self._topics()
        messages: list[Message] = []
        total_bytes = 0
        while total_bytes < CYCLE_BYTES:
            tag = b"%08d" % len(messages)
            messages.append((chance.choice(topics), content(tag, chance.choice(self.sizes))))
            total_bytes += len(messages[-1][1])
        return messages

    def work(self, peer: Peer, running: Running) -> Work:
        wire, messages, subscriptions = peer.wire, self.messages(), self._subscriptions(peer)
        sent = b"".join(wire.publish(topic, body) for topic, body in messages)
        publisher = Party(running.publish_port, wire.publisher(subscriptions, 1), sent)
        different = {tuple(topics) for topics in subscriptions}
        frames = {topics: _delivered(wire, messages, topics) for topics in different}
        received = [frames[tuple(topics)] for topics in subscriptions]
        subscribers = tuple(
            Party(running.subscribe_port, wire.subscriber(topics), b"".join(own))
            for topics, own in zip(subscriptions, received, strict=True)
        )
        plan = Plan("stream", (publisher,), subscribers, wire.aside)
        return Work(plan, sum(map(len, received)))


def _delivered(wire: Wire, messages: Sequence[Message], topics: Sequence[bytes]) -> list[bytes]:
    numbers = {topic: number for number, topic in enumerate(topics)}
    wanted = (message for message in messages if message[0] in numbers)
    return [wire.deliver(topic, numbers[topic], body) for topic, body in wanted]


@dataclass(frozen=True)
class Pairs:
    """For servers that select topics: no subscriber gets what another publisher has sent."""

    pairs: int
    size: int
    is_latency: bool = field(default=False, init=False)

    def work(self, peer: Peer, running: Running) -> Work:
        wire, count = peer.wire, CYCLE_BYTES // self.size
        topics = [b"pair%02d" % number for number in range(self.pairs)]
        bodies = [content(b"%08d" % number, self.size) for number in range(count)]
        subscriptions = [[topic] for topic in topics]
        publishers = tuple(
            Party(
                running.publish_port,
                wire.publisher(subscriptions, self.pairs),
                b"".join(wire.publish(topic, body) for body in bodies),
            )
            for topic in topics
        )
        subscribers = tuple(
            Party(
                running.subscribe_port,
                wire.subscriber([topic]),
                b"".join(wire.deliver(topic, 0, body) for body in bodies),
            )
            for topic in topics
        )
        return Work(Plan("pairs", publishers, subscribers, wire.aside), count * self.pairs)


@dataclass(frozen=True)
class Crowd:
    """`in_turns`: a publisher sends its next message when the one before was received."""

    publishers: int
    size: int
    in_turns: bool
    is_latency: bool = field(default=False, init=False)

    def work(self, peer: Peer, running: Running) -> Work:
        wire, topic = peer.wire, b"bench"
        bodies = [
            [content(b"%04d%04d" % (who, frame), self.size) for frame in range(CROWD_FRAMES)]
            for who in range(self.publishers)
        ]
        publishers = tuple(
            Party(
                running.publish_port,
                wire.publisher([[topic]], self.publishers),
                b"".join(wire.publish(topic, body) for body in own),
            )
            for own in bodies
        )
        frames = b"".join(wire.deliver(topic, 0, body) for own in bodies for body in own)
        subscriber = Party(running.subscribe_port, wire.subscriber([topic]), frames)
        settings = {"frame": _frame_setting(wire, topic, bodies[0][0])}
        mode = "turns" if self.in_turns else "frames"
        plan = Plan(mode, publishers, (subscriber,), wire.aside, settings)
        return Work(plan, self.publishers * CROWD_FRAMES)


def _frame_setting(wire: Wire, topic: bytes, body: bytes) -> str:
    sent, received = wire.publish(topic, body), wire.deliver(topic, 0, body)
    return f"{len(sent)} {len(received)} {received.index(body)}"


@dataclass(frozen=True)
class OneByOne:
    size: int
    is_latency: bool = field(default=True, init=False)

    def work(self, peer: Peer, running: Running) -> Work:
        wire, topic = peer.wire, b"bench"
        bodies = [content(b"%08d" % frame, self.size) for frame in range(LATENCY_FRAMES)]
        sent = b"".join(wire.publish(topic, body) for body in bodies)
        received = b"".join(wire.deliver(topic, 0, body) for body in bodies)
        settings = {"frame": _frame_setting(wire, topic, bodies[0]), "warmup": str(LATENCY_WARMUP)}
        plan = Plan(
            "latency",
            (Party(running.publish_port, wire.publisher([[topic]], 1), sent),),
            (Party(running.subscribe_port, wire.subscriber([topic]), received),),
            wire.aside,
            settings,
        )
        return Work(plan, LATENCY_FRAMES, LATENCY_CYCLES)
