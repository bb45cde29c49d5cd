"""The short path of puts beside the long one: whatever comes, both do and say the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.rule_table import PlacedRule
from polybus.dialects.pirate import codec
from polybus.dialects.pirate.client_id import fingerprint
from polybus.dialects.pirate.codec import u64
from polybus.dialects.pirate.limits import PirateLimits
from polybus.dialects.pirate.server.session import PirateSession
from polybus.model.access_rule import Rule
from polybus.model.identity import ANONYMOUS
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers

OFF = -1  # so many bytes may be on their way by the short path: none goes by it
CLIENT, TOPIC = b"client", "topic"


class Peer:
    identity = ANONYMOUS
    key: bytes | None = None

    def __init__(self) -> None:
        self.told: list[list[bytes]] = []

    def is_full(self) -> bool:
        return False

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        self.told.append([*envelope, b"", *frames])


class Side:
    """A bus with one client that has subscribed and put once, by one path or by both."""

    def __init__(self, *, short: bool = True, **limits: Any) -> None:
        self.world = MemorySubscribers(**limits)
        self.session = PirateSession(self.world.bus, self.world.counters)
        self.peer = Peer()
        self.client = self.world.client(CLIENT)
        self.client.sub(TOPIC)
        self.puts = self.world.bus._put_handler.fast_path
        if not short:
            self.puts.max_uncommitted = OFF
        self.say([b"r", b"", *put(2)])

    def say(self, *messages: list[bytes]) -> list[list[bytes]]:
        """What is answered to messages of one turn."""
        self.peer.told = []
        for message in messages:
            self.session.receive(self.peer, list(message))
        self.session.on_turn_end()
        self.world.settle()
        return self.peer.told

    def goes_short(self, message: list[bytes], only: bytes | None = None) -> bool:
        before = len(self.peer.told)
        taken = self.puts.take(self.session, self.peer, message, only)
        self.session.unanswered += taken
        self.session.on_turn_end()
        self.world.settle()
        assert len(self.peer.told) == before + taken
        return taken

    def state(self) -> tuple[Any, ...]:
        known = self.world.bus.clients.find(CLIENT)
        assert known is not None
        totals = self.session.totals
        return (
            self.world.bodies(TOPIC),
            known.counter,
            known.in_flight,
            totals.received,
            totals.received_bytes,
            self.session.requests,
            self.session.unanswered,
            self.puts.uncommitted_bytes,
        )


def put(count: int, data: bytes = b"body", **changed: bytes) -> list[bytes]:
    names = ("version", "op", "client", "epoch", "counter", "topic", "body")
    frames = (b"PIR1", b"PUT", CLIENT, u64(1), u64(count), TOPIC.encode(), data)
    return [changed.get(name, frame) for name, frame in zip(names, frames, strict=True)]


ODD: dict[str, list[bytes]] = {
    "no envelope": put(3),
    "a long envelope": [b"r"] * 9 + [b"", *put(3)],
    "an envelope that is large": [b"r" * 256, b"", *put(3)],
    "two bodies": [b"r", b"", *put(3), b"more"],
    "no body": [b"r", b"", *put(3)[:-1]],
    "another version": [b"r", b"", *put(3, version=b"PIR2")],
    "another op": [b"r", b"", *put(3, op=b"GET")],
    "somebody unknown": [b"r", b"", *put(3, client=b"x")],
    "an old epoch": [b"r", b"", *put(3, epoch=u64(0))],
    "an epoch to come": [b"r", b"", *put(3, epoch=u64(2))],
    "the highest epoch": [b"r", b"", *put(3, epoch=b"\xff" * 8)],
    "a short epoch": [b"r", b"", *put(3, epoch=b"\x01")],
    "counter 0": [b"r", b"", *put(0)],
    "a long counter": [b"r", b"", *put(3, counter=bytes(9))],
    "no such topic": [b"r", b"", *put(3, topic=b"other")],
    "a large body": [b"r", b"", *put(3, bytes((256 << 10) + 1))],
}


@pytest.mark.parametrize("message", ODD.values(), ids=list(ODD))
def test_whatever_is_not_plain_goes_the_long_way_and_nothing_is_done(message):
    side = Side()
    before = side.state()
    assert not side.goes_short(message)
    assert side.state() == before


@pytest.mark.parametrize("envelope", [[], [b"r"], [b"r", b"hop"], [b"r" * 255] * 8])
def test_a_plain_one_goes_by_it_and_is_told_its_id(envelope):
    side = Side()
    side.peer.told = []
    assert side.goes_short([*envelope, b"", *put(2**64 - 1)])
    assert side.peer.told == [[*envelope, b"", b"OK", u64(2**64 - 1), u64(2)]]
    assert side.world.bodies(TOPIC) == [1, 2]


def test_only_the_owner_of_a_key_goes_by_it():
    side = Side()
    assert not side.goes_short([b"r", b"", *put(3)], b"somebody")
    assert side.goes_short([b"r", b"", *put(3)], CLIENT)
    side.peer.key = b"k" * 32
    (told,) = side.say([b"r", b"", *put(4)])
    assert told[2:4] == [b"ERR", b"DENIED"]
    assert fingerprint(side.peer.key) != CLIENT


def test_rules_a_topic_that_leaves_and_a_client_that_is_busy_are_the_long_ways():
    side = Side()
    known = side.world.bus.clients.find(CLIENT)
    assert known is not None
    known.alone = True
    assert not side.goes_short([b"r", b"", *put(3)])
    known.alone = False
    side.world.policy.replace([PlacedRule(Rule.parse("deny user:1 produce x"), "test", 1)])
    assert not side.goes_short([b"r", b"", *put(3)])


def test_a_topic_that_was_made_again_is_another():
    side = Side()
    assert side.client.world.ask(codec.Request(codec.UNSUB, CLIENT, 1, 3, TOPIC)) == 1
    side.world.settle()
    assert not side.goes_short([b"r", b"", *put(4)])
    (told,) = side.say([b"r", b"", *put(4)])
    assert told[2:4] == [b"ERR", b"NO_TOPIC"]
    side.client.world.ask(codec.Request(codec.SUB, CLIENT, 1, 5, TOPIC))
    assert not side.goes_short([b"r", b"", *put(6)])
    side.say([b"r", b"", *put(6)])
    assert side.goes_short([b"r", b"", *put(7)])


def test_what_is_on_its_way_is_bounded_on_both_ways():
    side = Side(max_uncommitted_bytes=600)
    told = side.say(*[[b"r", b"", *put(number, bytes(100))] for number in range(3, 8)])
    words = sorted(one[2:4] if one[2] == b"ERR" else one[2:3] for one in told)
    assert words.count([b"ERR", b"BUSY"]) > 0
    assert words.count([b"OK"]) > 0
    assert side.puts.uncommitted_bytes == 0
    assert side.puts.max_uncommitted == 600 != PirateLimits().max_uncommitted_bytes


counters = st.integers(1, 9).map(u64)
bodies = st.binary(max_size=3)
plain = st.tuples(counters, bodies).map(lambda one: [b"r", b"", *put(1, one[1], counter=one[0])])
odd = st.sampled_from(list(ODD.values()))


@given(st.lists(st.lists(st.one_of(plain, plain, odd), max_size=5), max_size=5))
def test_both_ways_do_and_say_the_same(turns):
    """Counters repeat, with other bodies and with the same, in one turn and in several."""
    both, long_alone = Side(), Side(short=False)
    for turn in turns:
        assert sorted(both.say(*turn)) == sorted(long_alone.say(*turn))
        assert both.state() == long_alone.state()
