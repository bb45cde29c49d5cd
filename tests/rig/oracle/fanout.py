"""Oracle of kernel/fanout: one message after the other, in dicts and lists.

For each message it checks the verdict, the readers and whether one of them is full, and
appends the message to the output of each reader. It gathers and shares nothing. The order
of `outputs` and `collected` is not significant; that of `fragments` is.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.rig.oracle import rqueue
from tests.rig.oracle.registry import SubscriberTable, Topic

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tests.rig.oracle.rqueue import Encoding

END, CONTROL_FRAME, BLOCKED, BAD_FRAME = "end", "control", "blocked", "bad"
FRAGMENTS_FIRST = "fragments first"
MAX_UNREAD = 4096  # names without a reader whose verdicts are kept


@dataclass
class Tally:
    """Counters of the messages of one source, or of all."""

    messages: int = 0
    bytes: int = 0
    denied: int = 0
    unheard: int = 0


@dataclass
class Source(Tally):
    identity: int = 0
    trusted: bool = False  # the policy has checked its messages already


@dataclass
class CollectedBatch:
    topic: bytes
    first_id: int
    bodies: list[bytes] = field(default_factory=list)


@dataclass
class RouteResult:
    consumed: int = 0
    stop: str = END
    reason: str | None = None  # BAD_FRAME
    control: tuple[int, bytes] | None = None  # CONTROL_FRAME
    blockers: list[object] = field(default_factory=list)  # BLOCKED: any of these may be named
    outputs: dict[int, bytes] = field(default_factory=dict)  # by reader
    collected: dict[bytes, CollectedBatch] = field(default_factory=dict)
    fragments: list[tuple[bytes, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class Message:
    topic: bytes
    body: bytes
    raw: bytes | None = None  # the received frame, for readers of the encoding `own`
    own: Encoding | None = None
    skip: Encoding | None = None  # whose readers have it already
    is_fragment: bool = False


class Fanout(SubscriberTable):
    def __init__(self, judge: Callable[[int, bytes], bool]) -> None:
        super().__init__()
        self.has_produce_rules = False
        self.total = Tally()
        self.delivered = 0
        self.delivered_bytes = 0
        self.too_large = 0
        self._judge = judge

    def route(
        self, own: Encoding, source: Source, buffer: Buffer, start: int, end: int
    ) -> RouteResult:
        """Route the bytes of a client whose dialect has the encoding `own`."""
        data = bytes(memoryview(buffer))
        if not 0 <= start <= end <= len(data):
            raise ValueError("window")
        routed = RouteResult()
        rest = data[start:end]
        while routed.stop == END:
            try:
                found = rqueue.first_frame(rest, own.max_payload)
            except rqueue.Bad as bad:
                routed.stop, routed.reason = BAD_FRAME, str(bad)
                break
            if found is None:
                break
            if isinstance(found, rqueue.Published) and not found.is_part and routed.fragments:
                routed.stop = FRAGMENTS_FIRST  # it must not overtake the message that they complete
                break
            if isinstance(found, rqueue.Control):
                routed.stop, routed.control = CONTROL_FRAME, (found.kind, found.topic)
            else:
                message = Message(
                    found.topic, found.body, found.inner, own, is_fragment=found.is_part
                )
                if not self._offer(source, message, routed):
                    break
            routed.consumed += found.size
            rest = rest[found.size :]
        return routed

    def publish(
        self,
        source: Source,
        topic: bytes,
        offsets: Buffer,
        bodies: Buffer,
        skip: Encoding | None = None,
    ) -> RouteResult:
        if not 1 <= len(topic) <= 255:
            raise ValueError("topic")
        data = bytes(memoryview(bodies))
        bounds = _bounds(bytes(memoryview(offsets)), len(data))
        routed = RouteResult()
        for start, end in itertools.pairwise(bounds):
            if not self._offer(source, Message(topic, data[start:end], skip=skip), routed):
                break
            routed.consumed += 1
        return routed

    def encode_for(self, number: int, topic: bytes, offsets: Buffer, bodies: Buffer) -> bytes:
        reader = self.readers[number]
        if not 1 <= len(topic) <= 255:
            raise ValueError("topic")
        data = bytes(memoryview(bodies))
        bounds = _bounds(bytes(memoryview(offsets)), len(data))
        encoded = [
            reader.encoding.encode(topic, data[start:end])
            for start, end in itertools.pairwise(bounds)
        ]
        whole = b"".join(encoded)
        count = sum(1 for one in encoded if one)
        reader.messages += count
        reader.bytes += len(whole)
        self.delivered += count
        self.delivered_bytes += len(whole)
        self.too_large += len(encoded) - count
        return whole

    def _offer(self, source: Source, message: Message, routed: RouteResult) -> bool:
        """Count and route a message. Returns False if a reader is full."""
        allowed = source.trusted or self._verdict(source, message.topic)
        topic = self.topics.get(message.topic)
        if topic is not None and topic.durable and allowed and not source.trusted:
            self._keep(topic, message, routed)
            for tally in (source, self.total):
                tally.messages += 1
                tally.bytes += len(message.body)
            return True
        heard = allowed and topic is not None and topic.is_read
        if topic is not None and heard:
            routed.blockers = self._full_readers(topic, message)
            if routed.blockers:
                routed.stop = BLOCKED
                return False
            self._pass_on(topic, message, routed)
        for tally in (source, self.total):
            tally.messages += 1
            tally.bytes += len(message.body)
            tally.denied += not allowed
            tally.unheard += allowed and not heard
        return True

    def _verdict(self, source: Source, name: bytes) -> bool:
        """Return the verdict; asks the policy once. A topic without reader or verdict is allowed,
        unless `has_produce_rules` is set."""
        if name in self.topics:
            verdicts = self.topics[name].verdicts
        elif name in self.unread:
            verdicts = self.unread[name]
        elif self.has_produce_rules:
            if len(self.unread) >= MAX_UNREAD:
                self.unread.clear()
            verdicts = self.unread[name] = {}
        else:
            return True
        if source.identity not in verdicts:
            verdicts[source.identity] = self._judge(source.identity, name)
        return verdicts[source.identity]

    def _full_readers(self, topic: Topic, message: Message) -> list[object]:
        readers = [self.readers[number] for number in topic.readers]
        return [one.outbox for one in readers if one.full and one.encoding is not message.skip]

    def _pass_on(self, topic: Topic, message: Message, routed: RouteResult) -> None:
        encodings = {self.readers[number].encoding for number in topic.readers}
        for number in topic.readers:
            self._hand_out(number, message, routed)
        if message.is_fragment:
            if topic.collect or encodings - {message.own}:
                routed.fragments.append((message.topic, message.body))
            return
        if topic.collect:
            self._collect(topic, message, routed)
        topic.next_id += 1

    def _keep(self, topic: Topic, message: Message, routed: RouteResult) -> None:
        """Collect a message of a durable topic for the bus; the log assigns its id."""
        if message.is_fragment:
            routed.fragments.append((message.topic, message.body))
        else:
            self._collect(topic, message, routed)

    def _collect(self, topic: Topic, message: Message, routed: RouteResult) -> None:
        first = CollectedBatch(message.topic, topic.next_id)
        routed.collected.setdefault(message.topic, first).bodies.append(message.body)

    def _hand_out(self, number: int, message: Message, routed: RouteResult) -> None:
        reader = self.readers[number]
        if reader.encoding is message.skip:
            return
        if reader.encoding is message.own and message.raw is not None:
            encoded = message.raw
        elif message.is_fragment:
            return
        else:
            encoded = reader.encoding.encode(message.topic, message.body)
        if encoded:
            routed.outputs[number] = routed.outputs.get(number, b"") + encoded
            reader.messages += 1
            reader.bytes += len(encoded)
            self.delivered += 1
            self.delivered_bytes += len(encoded)
        else:
            self.too_large += 1


def _bounds(offsets: bytes, limit: int) -> list[int]:
    """Return the offsets. Raises ValueError unless they split `limit` bytes into messages."""
    if len(offsets) % 4 or not offsets:
        raise ValueError("offsets")
    bounds = array("i", offsets).tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > limit:
        raise ValueError("offsets")
    return bounds
