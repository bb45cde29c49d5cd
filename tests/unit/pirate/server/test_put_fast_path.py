"""The fast path of PUT compared with the slow path: same results, same replies."""

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

OFF = -1  # the most uncommitted bytes of the fast path: it takes no PUT
CLIENT, TOPIC = b"client", "topic"


class Peer:
    identity = ANONYMOUS
    key: bytes | None = None

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def is_full(self) -> bool:
        return False

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        self.sent.append([*envelope, b"", *frames])


class Side:
    """A bus with a client that has subscribed and put once, on the slow path or on both."""

    def __init__(self, *, fast: bool = True, **limits: Any) -> None:
        self.world = MemorySubscribers(**limits)
        self.session = PirateSession(self.world.bus, self.world.counters)
        self.peer = Peer()
        self.client = self.world.client(CLIENT)
        self.client.sub(TOPIC)
        self.puts = self.world.bus._put_handler.fast_path
        if not fast:
            self.puts.max_uncommitted = OFF
        self.receive([b"r", b"", *put(2)])

    def receive(self, *messages: list[bytes]) -> list[list[bytes]]:
        """Return the replies to messages of one turn."""
        self.peer.sent = []
        for message in messages:
            self.session.receive(self.peer, list(message))
        self.session.on_turn_end()
        self.world.settle()
        return self.peer.sent

    def takes_fast_path(self, message: list[bytes], only: bytes | None = None) -> bool:
        before = len(self.peer.sent)
        taken = self.puts.take(self.session, self.peer, message, only)
        self.session.unanswered += taken
        self.session.on_turn_end()
        self.world.settle()
        assert len(self.peer.sent) == before + taken
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
    "an unknown client": [b"r", b"", *put(3, client=b"x")],
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
def test_fast_path_leaves_unusual_messages_untouched(message):
    side = Side()
    before = side.state()
    assert not side.takes_fast_path(message)
    assert side.state() == before


@pytest.mark.parametrize("envelope", [[], [b"r"], [b"r", b"hop"], [b"r" * 255] * 8])
def test_fast_path_takes_a_plain_put_and_answers_its_id(envelope):
    side = Side()
    side.peer.sent = []
    assert side.takes_fast_path([*envelope, b"", *put(2**64 - 1)])
    assert side.peer.sent == [[*envelope, b"", b"OK", u64(2**64 - 1), u64(2)]]
    assert side.world.bodies(TOPIC) == [1, 2]


def test_fast_path_requires_the_id_of_the_key():
    side = Side()
    assert not side.takes_fast_path([b"r", b"", *put(3)], b"another")
    assert side.takes_fast_path([b"r", b"", *put(3)], CLIENT)
    side.peer.key = b"k" * 32
    (reply,) = side.receive([b"r", b"", *put(4)])
    assert reply[2:4] == [b"ERR", b"DENIED"]
    assert fingerprint(side.peer.key) != CLIENT


def test_rules_and_busy_clients_take_the_slow_path():
    side = Side()
    known = side.world.bus.clients.find(CLIENT)
    assert known is not None
    known.alone = True
    assert not side.takes_fast_path([b"r", b"", *put(3)])
    known.alone = False
    side.world.policy.replace([PlacedRule(Rule.parse("deny user:1 produce x"), "test", 1)])
    assert not side.takes_fast_path([b"r", b"", *put(3)])


def test_recreated_topic_takes_the_slow_path_once():
    side = Side()
    assert side.client.world.ask(codec.ClientRequest(codec.UNSUB, CLIENT, 1, 3, TOPIC)) == 1
    side.world.settle()
    assert not side.takes_fast_path([b"r", b"", *put(4)])
    (reply,) = side.receive([b"r", b"", *put(4)])
    assert reply[2:4] == [b"ERR", b"NO_TOPIC"]
    side.client.world.ask(codec.ClientRequest(codec.SUB, CLIENT, 1, 5, TOPIC))
    assert not side.takes_fast_path([b"r", b"", *put(6)])
    side.receive([b"r", b"", *put(6)])
    assert side.takes_fast_path([b"r", b"", *put(7)])


def test_uncommitted_bytes_are_bounded_on_both_paths():
    side = Side(max_uncommitted_bytes=600)
    replies = side.receive(*[[b"r", b"", *put(number, bytes(100))] for number in range(3, 8)])
    words = sorted(one[2:4] if one[2] == b"ERR" else one[2:3] for one in replies)
    assert words.count([b"ERR", b"BUSY"]) > 0
    assert words.count([b"OK"]) > 0
    assert side.puts.uncommitted_bytes == 0
    assert side.puts.max_uncommitted == 600 != PirateLimits().max_uncommitted_bytes


counters = st.integers(1, 9).map(u64)
bodies = st.binary(max_size=3)
plain = st.tuples(counters, bodies).map(lambda one: [b"r", b"", *put(1, one[1], counter=one[0])])
odd = st.sampled_from(list(ODD.values()))


@given(st.lists(st.lists(st.one_of(plain, plain, odd), max_size=5), max_size=5))
def test_both_paths_have_the_same_results_and_replies(turns):
    """Counters repeat, with other bodies and with the same, in one turn and in several."""
    both, slow_only = Side(), Side(fast=False)
    for turn in turns:
        assert sorted(both.receive(*turn)) == sorted(slow_only.receive(*turn))
        assert both.state() == slow_only.state()
