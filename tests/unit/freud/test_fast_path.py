"""The fast path beside the slow path: which requests take it, with the same results.

Two buses get the same requests; on one of them every request takes the slow path, through
`receive_slow_path`. Answers, counters and the unread messages of all readers must be equal.
"""

from __future__ import annotations

import os
from itertools import count
from random import Random

import pytest

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.session import FreudSession
from polybus.model.access_rule import Rule
from polybus.model.identity import Identity
from polybus.model.limits import QuotaLimits
from tests.rig import freud_client, rqueue_client
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe

ALICE = Identity(1, groups=frozenset(), service="a")
BOB = Identity(2, groups=frozenset(), service="b")
NAME = b"t"


@pytest.fixture
def slow_path_inputs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the input that took the slow path."""
    seen: list[bytes] = []
    plain = FreudSession.receive_slow_path

    def receive_slow_path(self: FreudSession, buffer: bytes, start: int, end: int) -> int:
        seen.append(bytes(buffer[start:end]))
        return plain(self, buffer, start, end)

    monkeypatch.setattr(FreudSession, "receive_slow_path", receive_slow_path)
    return seen


def bus_with(**options: object) -> MemoryBus:
    return MemoryBus(**options)  # type: ignore[arg-type]


def say(pipe: MemoryPipe, *requests: bytes) -> list[freud_client.Answer]:
    before = len(pipe.taken)
    for one in requests:
        pipe.deliver(one)
    return freud_client.answers_in(pipe.taken[before:])[0]


def subscribed(bus: MemoryBus, who: Identity = ALICE) -> tuple[MemoryPipe, bytes]:
    pipe = bus.connect_freud(identity=who)
    say(pipe, freud_client.create(NAME))
    return pipe, say(pipe, freud_client.subscribe(NAME))[0].payload


def test_produce_and_get_take_the_fast_path(slow_path_inputs: list[bytes]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    slow_path_inputs.clear()
    assert freud_client.number(say(pipe, freud_client.produce(NAME, b"one"))[0]) == 0
    assert freud_client.number(say(pipe, freud_client.produce(NAME, b""))[0]) == 1
    assert bus.broker.quotas.used(1, "quota_bytes") == 3
    assert say(pipe, freud_client.get(key))[0].payload == b"one"
    found = freud_client.record(say(pipe, freud_client.get_record(key, -1))[0])
    assert (found.id, found.timestamp_ns, found.flags, found.body) == (1, bus.wall_ns(), 0, b"")
    assert slow_path_inputs == []
    assert bus.broker.quotas.used(1, "quota_bytes") == 0
    messages = bus.broker.stats()["messages"]
    assert messages == {
        "received": 2,
        "received_bytes": 3,
        "delivered": 2,
        "delivered_bytes": 3,
    }


def test_waiting_get_is_woken(slow_path_inputs: list[bytes]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    waiting = bus.connect_freud(identity=ALICE)
    waiting.deliver(freud_client.get(key, -1))
    slow_path_inputs.clear()
    say(pipe, freud_client.produce(NAME, b"one"))
    assert slow_path_inputs == []
    assert freud_client.answers_in(waiting.taken)[0][0].payload == b"one"


@pytest.mark.parametrize(
    "request_",
    [
        freud_client.produce(b"other", b"x"),
        freud_client.produce(b"", b"x"),
        freud_client.frame(4, b"\x09\0\0\0t"),
        freud_client.frame(4, b"\x01\0"),
        freud_client.produce(NAME, bytes(1 << 16)),
        freud_client.produce(NAME, b"a") + freud_client.produce(NAME, b"b"),
        freud_client.produce(NAME, b"a")[:-1],
        freud_client.get(bytes(16)),
        freud_client.frame(5, bytes(19)),
        freud_client.frame(5, bytes(21)),
        freud_client.list_topics(),
        freud_client.frame(99),
        freud_client.frame(99)[:7],
    ],
)
def test_other_requests_take_the_slow_path(slow_path_inputs: list[bytes], request_: bytes):
    pipe, _ = subscribed(bus_with())
    slow_path_inputs.clear()
    pipe.deliver(request_)
    assert slow_path_inputs == [request_]


def test_body_that_needs_an_escape_takes_the_slow_path(slow_path_inputs: list[bytes]):
    pipe, key = subscribed(bus_with())
    body = freud_client.NOTICE + NAME
    for request in (freud_client.get(key), freud_client.get_record(key)):
        say(pipe, freud_client.produce(NAME, body))
        slow_path_inputs.clear()
        payload = say(pipe, request)[0].payload
        if request == freud_client.get(key):
            assert slow_path_inputs == [request]
            assert payload == b"\0FREUD\0BODY\0" + body
        else:
            assert slow_path_inputs == []
            assert payload[20:] == body


def test_frame_over_the_limit_takes_the_slow_path(slow_path_inputs: list[bytes]):
    pipe, _ = subscribed(bus_with(freud=FreudLimits(max_frame_bytes=40)))
    slow_path_inputs.clear()
    assert say(pipe, freud_client.produce(NAME, bytes(35)))[0].code == freud_client.OK
    assert slow_path_inputs == []
    assert say(pipe, freud_client.produce(NAME, bytes(36)))[0].code == freud_client.MALFORMED
    assert slow_path_inputs != []


@pytest.mark.parametrize(
    "second",
    [
        "reader",
        pytest.param("push reader", marks=pytest.mark.needs(dialect="rqueue")),
        "no reader",
    ],
)
def test_topic_without_exactly_one_reader_takes_the_slow_path(
    slow_path_inputs: list[bytes], second: str
):
    bus = bus_with()
    pipe, key = subscribed(bus)
    if second == "reader":
        say(pipe, freud_client.subscribe(NAME))
    elif second == "push reader":
        bus.connect().deliver(rqueue_client.subscribe(NAME))
    else:
        say(pipe, freud_client.unsubscribe(key))
    slow_path_inputs.clear()
    say(pipe, freud_client.produce(NAME, b"x"))
    assert len(slow_path_inputs) == 1


def test_exceeded_limits_take_the_slow_path(slow_path_inputs: list[bytes]):
    bus = bus_with(freud=FreudLimits(max_unread_messages=2), quotas=QuotaLimits(quota_bytes=10))
    pipe, _ = subscribed(bus)
    say(pipe, freud_client.produce(NAME, bytes(9)))
    slow_path_inputs.clear()
    assert say(pipe, freud_client.produce(NAME, bytes(2)))[0].payload == b"quota_bytes"
    assert say(pipe, freud_client.produce(NAME, bytes(1)))[0].code == freud_client.OK
    assert say(pipe, freud_client.produce(NAME, b""))[0].payload == b"max_unread_messages"
    assert len(slow_path_inputs) == 2


def test_foreign_and_disconnected_subscribers_take_the_slow_path(slow_path_inputs: list[bytes]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    other, same = bus.connect_freud(identity=BOB), bus.connect_freud(identity=ALICE)
    say(pipe, freud_client.produce(NAME, b"1"), freud_client.produce(NAME, b"2"))
    slow_path_inputs.clear()
    assert say(other, freud_client.get(key))[0].code == freud_client.DOESNT_EXIST
    assert len(slow_path_inputs) == 1
    assert say(same, freud_client.get(key))[0].payload == b"1"
    assert len(slow_path_inputs) == 1
    pipe.hang_up()
    slow_path_inputs.clear()
    assert say(same, freud_client.get(key))[0].payload == b"2"  # a use, and that is noted
    assert len(slow_path_inputs) == 1


def rules(text: str) -> list[PlacedRule]:
    rule = Rule.parse(text)
    return [PlacedRule(rule, "test", rule.who.number)]


def test_policy_verdict_is_cached_until_the_rules_change(slow_path_inputs: list[bytes]):
    policy = Policy()
    policy.replace(rules("allow user:1 produce t"))
    bus = bus_with(policy=policy)
    pipe, _ = subscribed(bus)
    bob = bus.connect_freud(identity=BOB)
    assert say(pipe, freud_client.produce(NAME))[0].code == freud_client.OK
    slow_path_inputs.clear()
    assert say(pipe, freud_client.produce(NAME))[0].code == freud_client.OK
    assert slow_path_inputs == []
    assert (
        say(bob, freud_client.produce(NAME), freud_client.produce(NAME))[1].code == freud_client.NO
    )
    policy.replace(rules("deny user:1 produce t"))
    assert say(pipe, freud_client.produce(NAME))[0].code == freud_client.NO


def test_dead_letters_are_judged_without_any_rule(slow_path_inputs: list[bytes]):
    bus, letters = bus_with(), b"t.dlq"
    reader, admin = bus.connect_freud(identity=ALICE), bus.connect_freud(identity=Identity(0))
    say(reader, freud_client.create(letters))
    say(reader, freud_client.subscribe(letters))
    forged = [freud_client.produce(letters, b"x")] * 2
    assert [one.code for one in say(reader, *forged)] == [freud_client.NO] * 2
    assert say(admin, freud_client.produce(letters))[0].code == freud_client.OK
    slow_path_inputs.clear()
    assert say(admin, freud_client.produce(letters))[0].code == freud_client.OK
    assert slow_path_inputs == []
    assert [one.code for one in say(reader, *forged)] == [freud_client.NO] * 2


def test_message_that_does_not_fit_the_socket_is_not_consumed(slow_path_inputs: list[bytes]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    slow = bus.connect_freud(identity=ALICE)
    say(pipe, freud_client.produce(NAME, b"12345"), freud_client.produce(NAME, b"67890"))
    slow.appetite = 12
    slow_path_inputs.clear()
    slow.deliver(freud_client.get(key))
    assert slow_path_inputs == []
    assert bus.broker.quotas.used(1, "quota_bytes") == 10
    slow.hang_up()
    assert say(pipe, freud_client.get(key))[0].payload == b"12345"
    assert bus.broker.quotas.used(1, "quota_bytes") == 5


def test_message_for_a_broken_connection_becomes_unread_again():
    bus = bus_with()
    pipe, key = subscribed(bus)
    broken = bus.connect_freud(identity=ALICE)
    say(pipe, freud_client.produce(NAME, b"one"))
    broken.broken = True
    broken.deliver(freud_client.get(key))
    assert say(pipe, freud_client.get(key))[0].payload == b"one"


def test_fast_and_slow_path_give_the_same_results(monkeypatch: pytest.MonkeyPatch):
    """Two buses get the same requests, one at a time; one of them has only the slow path."""
    for seed in range(60):
        ids = count()
        monkeypatch.setattr(os, "urandom", lambda size, ids=ids: next(ids).to_bytes(size, "big"))
        first = story(Random(seed), FreudSession.receive)
        ids = count()
        monkeypatch.setattr(os, "urandom", lambda size, ids=ids: next(ids).to_bytes(size, "big"))
        assert first == story(Random(seed), FreudSession.receive_slow_path)


def story(chance: Random, receive: object) -> object:
    limits = FreudLimits(max_unread_messages=5)
    bus = bus_with(freud=limits, quotas=QuotaLimits(quota_bytes=60))
    pipes = [bus.connect_freud(identity=who) for who in (ALICE, ALICE, BOB)]
    for pipe in pipes:
        session = pipe._session
        pipe.attach(Detour(session, receive))  # type: ignore[arg-type]
    for _ in range(150):
        bus.now_s += 0.25
        pipe = chance.choice(pipes)
        pipe.deliver(request(chance))
        bus.turn()
    held = sorted(bus.broker.quotas.accounts(), key=repr)
    return [bytes(pipe.taken) for pipe in pipes], bus.broker.stats(), held


class Detour:
    """A session that passes its input to the given function."""

    def __init__(self, session: FreudSession, receive: object) -> None:
        self._session = session
        self._receive = receive

    def receive(self, buffer: bytes, start: int, end: int) -> int:
        return self._receive(self._session, buffer, start, end)  # type: ignore[operator]

    def __getattr__(self, name: str) -> object:
        return getattr(self._session, name)


def request(chance: Random) -> bytes:
    name = chance.choice((b"t", b"t", b"u"))
    key = chance.randrange(4).to_bytes(16, "big")
    return chance.choice(
        (
            freud_client.create(name),
            freud_client.subscribe(name),
            *[freud_client.produce(name, bytes(chance.choice((0, 1, 20))))] * 8,
            *[freud_client.get(key), freud_client.get_record(key)] * 4,
            freud_client.get(key, 1),
            freud_client.unsubscribe(key) if chance.random() < 0.3 else freud_client.create(name),
            freud_client.delete(name) if chance.random() < 0.3 else freud_client.create(name),
        )
    )
