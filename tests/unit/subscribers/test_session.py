"""Pirate's session on a world without a loop."""

from __future__ import annotations

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import GET, Request
from polybus.dialects.pirate.session import PirateSession
from polybus.model.identity import ANONYMOUS

ROOM = 3


class Lazy:
    """A peer that takes nothing of what it is sent, and has room for some of it."""

    identity, key = ANONYMOUS, None

    def __init__(self) -> None:
        self.got: list[codec.Reply] = []

    def is_full(self) -> bool:
        return len(self.got) >= ROOM

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        self.got.append(codec.decode(frames))


def test_gets_that_were_asked_for_at_once_are_bounded_when_they_are_answered(world):
    client, peer = world.client(), Lazy()
    client.sub("t")
    client.put("t", b"x")
    session = PirateSession(world.bus, world.counters)
    get = codec.encode(Request(GET, b"c", client.epoch, 0, "t"))
    for number in range(2 * ROOM):
        session.receive(peer, [b"%d" % number, b"", *get])  # none is answered yet
    session.turn_over()
    world.settle()
    full = codec.Refusal(codec.BUSY, "answers sent before were not taken yet")
    assert all(isinstance(one, codec.Message) for one in peer.got[:ROOM])
    assert peer.got[ROOM:] == [full] * ROOM
    assert session.unanswered == 0
    assert session.totals.delivered == ROOM
