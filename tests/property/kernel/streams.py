"""A connection's received bytes, offered to the twins as a transport would.

They come in cuts. What is not consumed is kept and put in front of what comes
next, as transports/inbox does; a bad frame ends it all. The story is everything
that came out, in a form that does not show where the cuts were.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polybus.testing.oracle.fanout import CONTROL_FRAME, Routed
from tests.property.kernel.twins import EncodingPair, SourcePair, Twins


@dataclass
class Story:
    outputs: dict[int, bytes] = field(default_factory=dict)
    # Each control frame with what all readers had got by then: it takes effect in its place.
    controls: list[tuple[int, bytes, int]] = field(default_factory=list)
    collected: dict[bytes, tuple[int, list[bytes]]] = field(default_factory=dict)
    fragments: list[tuple[bytes, bytes]] = field(default_factory=list)
    reason: str | None = None
    consumed: int = 0

    def add(self, routed: Routed) -> None:
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
            routed = self._twins.route(self._encoding, self._source, buffer, at, len(buffer))
            at += routed.consumed
            self.story.add(routed)
            if routed.stop != CONTROL_FRAME:
                break
        self._held = bytes(buffer[at:])


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
