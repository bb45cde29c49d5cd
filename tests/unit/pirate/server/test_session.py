"""The pirate session without a loop."""

from __future__ import annotations

import pytest

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import GET, PUT, SUB, UNSUB, ClientRequest
from polybus.dialects.pirate.server.session import PirateSession
from polybus.model.identity import ANONYMOUS

ROOM = 3


class Lazy:
    """A peer that reads nothing, with room for a few replies."""

    identity, key = ANONYMOUS, None

    def __init__(self) -> None:
        self.got: list[codec.Reply] = []

    def is_full(self) -> bool:
        return len(self.got) >= ROOM

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        self.got.append(codec.decode_reply(frames))


class Hops:
    """A peer behind proxies, which reads all replies."""

    identity, key = ANONYMOUS, None

    def __init__(self) -> None:
        self.got: list[tuple[list[bytes], codec.Reply]] = []

    def is_full(self) -> bool:
        return False

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        self.got.append((envelope, codec.decode_reply(frames)))


REFUSED = {
    "STALE": ClientRequest(PUT, b"c", 1, 1, "t", (b"other",)),
    "FENCED": ClientRequest(PUT, b"c", 2, 9, "t", (b"x",)),
    "NO_TOPIC": ClientRequest(PUT, b"c", 1, 9, "no", (b"x",)),
    "NOT_SUBSCRIBED": ClientRequest(GET, b"c", 1, 0, "no"),
    "MALFORMED": ClientRequest(GET, b"c", 1, 0, "t", (), 99),
}


@pytest.mark.parametrize(("word", "request_"), REFUSED.items(), ids=list(REFUSED))
def test_refusals_have_a_code_a_counter_and_the_envelope(world, word, request_):
    client, peer = world.client(), Hops()
    client.sub("t")
    session = PirateSession(world.bus, world.counters)
    envelope = [b"routing", b"hop", b"another"]
    session.receive(peer, [*envelope, b"", *codec.encode_request(request_)])
    session.on_turn_end()
    world.settle()
    ((back, refusal),) = peer.got
    assert back == envelope
    assert isinstance(refusal, codec.ErrorReply)
    assert refusal.code == word
    assert world.counters.family("refused") == {f"pirate_{word.lower()}": 1}
    assert session.unanswered == 0


@pytest.mark.parametrize("op", [SUB, UNSUB, PUT, GET])
def test_replies_have_the_envelope_of_the_request(world, op):
    client, peer = world.client(), Hops()
    client.sub("t")
    session = PirateSession(world.bus, world.counters)
    request = ClientRequest(op, b"c", 1, 0 if op == GET else 9, "t", (b"x",) if op == PUT else ())
    session.receive(peer, [b"routing", b"hop", b"", *codec.encode_request(request)])
    session.on_turn_end()
    world.settle()
    ((back, reply),) = peer.got
    assert back == [b"routing", b"hop"]
    assert isinstance(reply, codec.EmptyReply if op == GET else codec.OkReply)


def test_message_without_envelope_is_dropped_and_counted(world):
    peer = Hops()
    session = PirateSession(world.bus, world.counters)
    session.receive(peer, [b"routing", b"PIR1"])
    assert world.counters.family("dropped") == {"pirate_no_envelope": 1}
    assert not peer.got


def test_concurrent_gets_are_bounded_when_answered(world):
    client, peer = world.client(), Lazy()
    client.sub("t")
    client.put("t", b"x")
    session = PirateSession(world.bus, world.counters)
    get = codec.encode_request(ClientRequest(GET, b"c", client.epoch, 0, "t"))
    for number in range(2 * ROOM):
        session.receive(peer, [b"%d" % number, b"", *get])  # none is answered yet
    session.on_turn_end()
    world.settle()
    full = codec.ErrorReply(codec.BUSY, "earlier replies have not been received yet")
    assert all(isinstance(one, codec.MessageReply) for one in peer.got[:ROOM])
    assert peer.got[ROOM:] == [full] * ROOM
    assert session.unanswered == 0
    assert session.totals.delivered == ROOM
