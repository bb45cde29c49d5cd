"""A connection's received bytes, passed to the twins as a transport does.

They arrive in pieces. Unconsumed bytes are kept and put in front of the next piece, as
kernel/receive_buffer does; a bad frame ends the stream. The story is the whole output in a
form that does not depend on the pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from typing_extensions import Buffer

from tests.property.kernel import frames
from tests.property.kernel.twins import EncodingPair, SourcePair, Twins
from tests.rig.oracle.fanout import CONTROL_FRAME, FRAGMENTS_FIRST, RouteResult


@dataclass
class Story:
    outputs: dict[int, bytes] = field(default_factory=dict)
    # Each control frame with the bytes sent before it: it must take effect in order.
    controls: list[tuple[int, bytes, int]] = field(default_factory=list)
    collected: dict[bytes, tuple[int, list[bytes]]] = field(default_factory=dict)
    fragments: list[tuple[bytes, bytes]] = field(default_factory=list)
    reason: str | None = None
    consumed: int = 0

    def add(self, routed: RouteResult) -> None:
        self.consumed += routed.consumed
        self.fragments += routed.fragments
        self.reason = routed.reason
        for number, data in routed.outputs.items():
            self.outputs[number] = self.outputs.get(number, b"") + data
        for batch in routed.collected.values():
            self.collected.setdefault(batch.topic, (batch.first_id, []))[1].extend(batch.bodies)
        if routed.control is not None:
            self.controls.append((*routed.control, sum(map(len, self.outputs.values()))))


class Connection:
    def __init__(self, twins: Twins, encoding: EncodingPair, source: SourcePair) -> None:
        self.story = Story()
        self._twins = twins
        self._encoding = encoding
        self._source = source
        self._held = b""

    def receive(self, data: bytes) -> None:
        buffer = bytearray(self._held + data)
        at = 0
        while self.story.reason is None:
            routed = self.route(buffer, at, len(buffer))
            at += routed.consumed
            self.story.add(routed)
            if routed.stop not in (CONTROL_FRAME, FRAGMENTS_FIRST):
                break
        self._held = bytes(buffer[at:])

    def route(self, buffer: Buffer, start: int, end: int) -> RouteResult:
        return self._twins.route(self._encoding, self._source, buffer, start, end)


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The data in pieces, cut at these places (taken modulo its size)."""
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def told(connection: Connection, cuts: Iterable[bytes]) -> Story:
    for data in cuts:
        connection.receive(data)
    return connection.story


def audience(max_payload: int) -> Connection:
    """A connection on a bus where some topics are read in kind, some collected, some both."""
    twins = Twins(lambda identity, topic: True)
    own = EncodingPair(0, max_payload)
    for spread in (1, 2, 3):
        reader = twins.join(own)
        for topic in frames.TOPICS[::spread]:
            twins.call("subscribe", reader, topic)
    for topic in frames.TOPICS[::4]:
        twins.call("set_collect", topic, True)
    return Connection(twins, own, twins.source(0))


def whole(data: bytes, max_payload: int) -> Story:
    return told(audience(max_payload), [data])
