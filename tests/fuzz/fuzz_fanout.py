"""Fuzzes the fan-out with programs: bytes are operations on a bus and its messages.

The invariant, for any program:

- nothing crashes;
- every answer and every error of the registry is the oracle's;
- every buffer gives each reader at most one output, and that output, the collected
  batches, the fragments, the blocking readers and all counters are the oracle's;
- the policy is asked exactly where the oracle asks it.

A program is a list of operations, an opcode and its operands, a byte each; past
its end all bytes are 0. Numbers of readers, topics and so on count modulo how many
there are, so that every program means something.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.property.kernel import frames
from tests.property.kernel.twins import EncodingPair, ReaderPair, Twins
from tests.rig.oracle.fanout import CONTROL_FRAME, FRAGMENTS_FIRST

CAPS = (frames.SMALL_CAP, frames.MIDDLE_CAP, frames.LARGE_CAP)
IDENTITIES = (0, 1, 300)
MAX_OPERATIONS = 64  # enough for any two to meet; longer programs only run longer


class Program:
    def __init__(self, code: bytes) -> None:
        self.code = code
        self.at = 0
        self.denied: set[tuple[int, bytes]] = set()
        self.twins = Twins(lambda identity, topic: (identity, topic) not in self.denied)
        self.encodings = [EncodingPair(number * 15, cap) for number, cap in enumerate(CAPS)]
        self.sources = [self.twins.source(identity) for identity in IDENTITIES]
        self.sources.append(self.twins.source(IDENTITIES[0], trusted=True))

    def run(self) -> None:
        for _ in range(MAX_OPERATIONS):
            if self.at >= len(self.code):
                break
            OPERATIONS[self.byte() % len(OPERATIONS)](self)
        self.twins.check((*frames.TOPICS, numbered(0), numbered(255)))

    # --- operands ------------------------------------------------------------

    def byte(self) -> int:
        self.at += 1
        return self.code[self.at - 1] if self.at <= len(self.code) else 0

    def topic(self) -> bytes:
        number = self.byte()
        return frames.TOPICS[number] if number < len(frames.TOPICS) else numbered(number)

    def reader(self) -> ReaderPair:
        if not self.twins.readers:
            self.join()
        return self.twins.readers[self.byte() % len(self.twins.readers)]

    def body(self) -> bytes:
        return frames.filler(4 * self.byte())

    # --- operations ----------------------------------------------------------

    def join(self) -> None:
        self.twins.join(self.encodings[self.byte() % len(CAPS)])

    def leave(self) -> None:
        self.twins.leave(self.reader())

    def subscribe(self) -> None:
        self.twins.call("subscribe", self.reader(), self.topic())

    def unsubscribe(self) -> None:
        self.twins.call("unsubscribe", self.reader(), self.topic())

    def unsubscribe_all(self) -> None:
        self.twins.call("unsubscribe_all", self.reader())

    def subscribe_to_many(self) -> None:
        reader, first = self.reader(), self.byte()
        for number in range(first, 256):
            self.twins.call("subscribe", reader, numbered(number))

    def unsubscribe_from_many(self) -> None:
        reader, step = self.reader(), 1 + self.byte()
        for number in range(0, 256, step):
            self.twins.call("unsubscribe", reader, numbered(number))

    def set_full(self) -> None:
        self.twins.call("set_full", self.reader(), self.byte() % 2 > 0)

    def set_collect(self) -> None:
        self.twins.call("set_collect", self.topic(), self.byte() % 2 > 0)

    def set_hold(self) -> None:
        self.twins.call("set_hold", self.topic(), self.byte() % 2 > 0)

    def set_next_id(self) -> None:
        self.twins.call("set_next_id", self.topic(), self.byte() << 56)

    def change_policy(self) -> None:
        """Change the policy, with or without forgetting cached verdicts."""
        self.denied ^= {(IDENTITIES[self.byte() % len(IDENTITIES)], self.topic())}
        if self.byte() % 2:
            self.twins.call("forget_verdicts")

    def has_produce_rules(self) -> None:
        self.twins.set_judge_unheard(self.byte() % 2 > 0)

    def bad_name(self) -> None:
        self.twins.call("subscribe", self.reader(), bytes(256))
        self.twins.call("set_collect", b"", True)

    def route_messages(self) -> None:
        self.route(b"".join(self.frame() for _ in range(1 + self.byte() % 8)))

    def route_bytes(self) -> None:
        size = self.byte()
        raw, self.at = self.code[self.at : self.at + size], self.at + size
        self.route(raw)

    def route(self, stream: bytes) -> None:
        own = self.encodings[self.byte() % 2]
        source = self.sources[self.byte() % len(self.sources)]
        at, stop = 0, CONTROL_FRAME
        while stop in (CONTROL_FRAME, FRAGMENTS_FIRST):
            routed = self.twins.route(own, source, stream, at, len(stream))
            at, stop = at + routed.consumed, routed.stop

    def frame(self) -> bytes:
        form = self.byte() % 8
        if form == 0:
            return frames.publish_part(self.topic(), self.byte() % 4, 3, b"chunk")
        if form == 1:
            return frames.remove(self.topic())
        return frames.publish(self.topic(), self.body())

    def publish(self) -> None:
        source, topic = self.sources[self.byte() % len(self.sources)], self.topic()
        skip = (None, None, *self.encodings)[self.byte() % 5]
        self.twins.publish(source, topic, [self.body() for _ in range(self.byte() % 4)], skip)


def numbered(number: int) -> bytes:
    """A name for each number, of very different sizes."""
    return bytes([number]) * max(1, number)


OPERATIONS: tuple[Callable[[Program], None], ...] = (
    Program.route_messages,
    Program.join,
    Program.subscribe,
    Program.publish,
    Program.route_messages,
    Program.leave,
    Program.subscribe,
    Program.unsubscribe,
    Program.unsubscribe_all,
    Program.subscribe_to_many,
    Program.unsubscribe_from_many,
    Program.set_full,
    Program.set_collect,
    Program.set_next_id,
    Program.change_policy,
    Program.has_produce_rules,
    Program.route_bytes,
    Program.bad_name,
    Program.set_hold,
)


def target(data: bytes) -> None:
    Program(data).run()


def code(operation: Callable[[Program], None], *operands: int) -> bytes:
    return bytes([OPERATIONS.index(operation), *operands])


READERS = b"".join(
    code(Program.join, number) + code(Program.subscribe, number, topic)
    for number in (0, 1, 2)
    for topic in (0, number)
)
MESSAGES = code(Program.route_messages, 3, 2, 0, 1, 3, 1, 80, 4, 0, 2, 5, 2, 9, 0, 0)
RAW = frames.publish(b"a", b"raw") + frames.subscribe(b"b")
SEEDS = [
    READERS + MESSAGES,
    READERS + code(Program.set_full, 1, 1) + MESSAGES + code(Program.set_full, 1, 0) + MESSAGES,
    READERS + code(Program.set_collect, 0, 1) + code(Program.set_next_id, 0, 1) + MESSAGES,
    READERS + code(Program.change_policy, 0, 0, 1) + MESSAGES * 2,
    code(Program.set_hold, 0, 1) + code(Program.set_next_id, 0, 1) + MESSAGES + READERS + MESSAGES,
    READERS
    + code(Program.has_produce_rules, 1)
    + code(Program.route_messages, 1, 2, 40, 1, 2, 41, 1),
    READERS + code(Program.publish, 0, 0, 2, 2, 3, 90) + code(Program.publish, 1, 0, 0, 1, 1),
    READERS + code(Program.subscribe_to_many, 0, 3) + code(Program.unsubscribe_from_many, 0, 2),
    READERS + code(Program.leave, 0) + code(Program.join, 2) + code(Program.unsubscribe_all, 1),
    READERS + code(Program.route_bytes, len(RAW)) + RAW + code(Program.bad_name),
]
WORDS = [MESSAGES, *(bytes([number]) for number in range(len(OPERATIONS)))]
