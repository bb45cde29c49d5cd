"""Produces and Gets that are executed without Python, and those that are not plain.

The rules are one text for a request alone and for a group: the last test sends the same
requests to two buses, one at a time and together. `tests/property/bus` compares both with the
model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from random import Random

import pytest

from polybus.bus.policy import Policy
from polybus.bus.rule_table import PlacedRule
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.request_scanner import (
    GetRun,
    Group,
    MalformedFrame,
    ProduceRun,
    SingleRequest,
)
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
def others(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Return the runs that were not plain, as they are executed."""
    seen: list[Group] = []
    execute = FreudSession.execute_other

    def execute_other(self: FreudSession, run: Group) -> bool:
        seen.append(run)
        return execute(self, run)

    monkeypatch.setattr(FreudSession, "execute_other", execute_other)
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


def test_produce_and_get_are_plain(others: list[Group]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    others.clear()
    assert freud_client.number(say(pipe, freud_client.produce(NAME, b"one"))[0]) == 0
    assert freud_client.number(say(pipe, freud_client.produce(NAME, b""))[0]) == 1
    assert bus.broker.quotas.used(1, "quota_bytes") == 3
    assert say(pipe, freud_client.get(key))[0].payload == b"one"
    found = freud_client.record(say(pipe, freud_client.get_record(key, -1))[0])
    assert (found.id, found.timestamp_ns, found.flags, found.body) == (1, bus.wall_ns(), 0, b"")
    assert others == []
    assert bus.broker.quotas.used(1, "quota_bytes") == 0
    messages = bus.broker.stats()["messages"]
    assert messages == {
        "received": 2,
        "received_bytes": 3,
        "delivered": 2,
        "delivered_bytes": 3,
    }


def test_pipelined_requests_are_plain(others: list[Group]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    others.clear()
    bodies = [b"%d" % number for number in range(200)]
    requests = [freud_client.produce(NAME, body) for body in bodies]
    answers = say(pipe, b"".join([*requests, freud_client.get(key) * 150]))
    assert [freud_client.number(one) for one in answers[:200]] == list(range(200))
    assert [one.payload for one in answers[200:]] == bodies[:150]
    assert others == []
    assert bus.broker.stats()["messages"]["received"] == 200
    assert bus.broker.quotas.used(1, "quota_bytes") == sum(map(len, bodies[150:]))


def test_waiting_get_is_woken(others: list[Group]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    waiting = bus.connect_freud(identity=ALICE)
    waiting.deliver(freud_client.get(key, -1))
    others.clear()
    say(pipe, freud_client.produce(NAME, b"one"))
    assert others == []
    assert freud_client.answers_in(waiting.taken)[0][0].payload == b"one"


@pytest.mark.parametrize(
    ("request_", "kinds"),
    [
        (freud_client.produce(NAME, bytes(1 << 16)), []),
        (freud_client.produce(NAME, b"a") + freud_client.produce(NAME, b"b"), []),
        (freud_client.produce(NAME, b"a")[:-1], []),
        (freud_client.frame(99)[:7], []),
        (freud_client.produce(b"other", b"x"), [ProduceRun]),
        (freud_client.get(bytes(16)), [GetRun]),
        (freud_client.list_topics(), [SingleRequest]),
        (freud_client.produce(b"", b"x"), [MalformedFrame]),
        (freud_client.frame(4, b"\x09\0\0\0t"), [MalformedFrame]),
        (freud_client.frame(4, b"\x01\0"), [MalformedFrame]),
        (freud_client.frame(5, bytes(19)), [MalformedFrame]),
        (freud_client.frame(5, bytes(21)), [MalformedFrame]),
        (freud_client.frame(99), [MalformedFrame]),
        (freud_client.list_topics() + freud_client.produce(NAME, b"a"), [SingleRequest]),
    ],
)
def test_only_other_requests_call_python(
    others: list[Group], request_: bytes, kinds: list[type[Group]]
):
    pipe, _ = subscribed(bus_with())
    others.clear()
    pipe.deliver(request_)
    assert [type(run) for run in others] == kinds


def test_only_get_message_escapes_a_body(others: list[Group]):
    pipe, key = subscribed(bus_with())
    body = freud_client.NOTICE + NAME
    requests = [freud_client.produce(NAME, body) * 2, freud_client.get(key)]
    others.clear()
    escaped, plain = say(pipe, *requests, freud_client.get_record(key))[2:]
    assert escaped.payload == b"\0FREUD\0BODY\0" + body
    assert plain.payload[20:] == body
    assert others == []


def test_frame_over_the_limit_is_refused(others: list[Group]):
    pipe, _ = subscribed(bus_with(freud=FreudLimits(max_frame_bytes=40)))
    others.clear()
    assert say(pipe, freud_client.produce(NAME, bytes(35)))[0].code == freud_client.OK
    assert others == []
    assert say(pipe, freud_client.produce(NAME, bytes(36)))[0].code == freud_client.MALFORMED
    assert [type(run) for run in others] == [MalformedFrame]


def test_every_pull_reader_gets_a_plain_message(others: list[Group]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    second, waiting = bus.connect_freud(identity=BOB), bus.connect_freud(identity=BOB)
    keys = [key, *(say(second, freud_client.subscribe(NAME))[0].payload for _ in range(2))]
    waiting.deliver(freud_client.get(keys[2], -1))
    others.clear()
    say(pipe, freud_client.produce(NAME, b"abc"))
    assert others == []
    assert [bus.broker.quotas.used(uid, "quota_bytes") for uid in (1, 2)] == [3, 3]
    assert freud_client.answers_in(waiting.taken)[0][0].payload == b"abc"
    assert say(pipe, freud_client.get(keys[0]))[0].payload == b"abc"
    assert say(second, freud_client.get(keys[1]))[0].payload == b"abc"
    assert [bus.broker.quotas.used(uid, "quota_bytes") for uid in (1, 2)] == [0, 0]


@pytest.mark.parametrize(
    "readers",
    [pytest.param("push reader", marks=pytest.mark.needs(dialect="rqueue")), "no reader"],
)
def test_topic_with_push_readers_or_none_is_not_plain(others: list[Group], readers: str):
    bus = bus_with()
    pipe, key = subscribed(bus)
    if readers == "push reader":
        bus.connect().deliver(rqueue_client.subscribe(NAME))
    else:
        say(pipe, freud_client.unsubscribe(key))
    others.clear()
    say(pipe, freud_client.produce(NAME, b"x"))
    assert len(others) == 1


def test_all_readers_are_charged_or_none(others: list[Group]):
    bus = bus_with(freud=FreudLimits(max_unread_messages=3), quotas=QuotaLimits(quota_bytes=10))
    pipe, key = subscribed(bus)
    second = bus.connect_freud(identity=BOB)
    say(second, freud_client.subscribe(NAME))
    say(pipe, freud_client.produce(NAME, bytes(9)), freud_client.get(key))
    others.clear()
    # The first reader has room, the second has not.
    assert say(pipe, freud_client.produce(NAME, bytes(2)))[0].payload == b"quota_bytes"
    assert [bus.broker.quotas.used(uid, "quota_bytes") for uid in (1, 2)] == [0, 9]
    pipelined = freud_client.produce(NAME, b"") * 3
    answers = say(pipe, pipelined)
    assert [one.code for one in answers] == [freud_client.OK] * 2 + [freud_client.SERVER_ERROR]
    assert answers[2].payload == b"max_unread_messages"
    # The run of three was split in two, and its rest once more.
    assert [run.count for run in others if isinstance(run, ProduceRun)] == [1, 3, 2, 1]


def test_exceeded_limits_are_refused_with_their_names(others: list[Group]):
    bus = bus_with(freud=FreudLimits(max_unread_messages=2), quotas=QuotaLimits(quota_bytes=10))
    pipe, _ = subscribed(bus)
    say(pipe, freud_client.produce(NAME, bytes(9)))
    others.clear()
    assert say(pipe, freud_client.produce(NAME, bytes(2)))[0].payload == b"quota_bytes"
    assert say(pipe, freud_client.produce(NAME, bytes(1)))[0].code == freud_client.OK
    assert say(pipe, freud_client.produce(NAME, b""))[0].payload == b"max_unread_messages"
    assert len(others) == 2


def test_foreign_and_detached_subscriptions_are_not_plain(others: list[Group]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    other, same = bus.connect_freud(identity=BOB), bus.connect_freud(identity=ALICE)
    say(pipe, freud_client.produce(NAME, b"1"), freud_client.produce(NAME, b"2"))
    others.clear()
    assert say(other, freud_client.get(key))[0].code == freud_client.DOESNT_EXIST
    assert len(others) == 1
    assert say(same, freud_client.get(key))[0].payload == b"1"
    assert len(others) == 1
    pipe.hang_up()
    others.clear()
    assert say(same, freud_client.get(key))[0].payload == b"2"  # a use, and that is noted
    assert len(others) == 1


def rules(text: str) -> list[PlacedRule]:
    rule = Rule.parse(text)
    return [PlacedRule(rule, "test", rule.who.number)]


def test_policy_verdict_is_cached_until_the_rules_change(others: list[Group]):
    policy = Policy()
    policy.replace(rules("allow user:1 produce t"))
    bus = bus_with(policy=policy)
    pipe, _ = subscribed(bus)
    bob = bus.connect_freud(identity=BOB)
    assert say(pipe, freud_client.produce(NAME))[0].code == freud_client.OK
    others.clear()
    assert say(pipe, freud_client.produce(NAME))[0].code == freud_client.OK
    assert others == []
    assert (
        say(bob, freud_client.produce(NAME), freud_client.produce(NAME))[1].code == freud_client.NO
    )
    policy.replace(rules("deny user:1 produce t"))
    assert say(pipe, freud_client.produce(NAME))[0].code == freud_client.NO


def test_dead_letters_are_judged_without_any_rule(others: list[Group]):
    bus, letters = bus_with(), b"t.dlq"
    reader, admin = bus.connect_freud(identity=ALICE), bus.connect_freud(identity=Identity(0))
    say(reader, freud_client.create(letters))
    say(reader, freud_client.subscribe(letters))
    forged = [freud_client.produce(letters, b"x")] * 2
    assert [one.code for one in say(reader, *forged)] == [freud_client.NO] * 2
    assert say(admin, freud_client.produce(letters))[0].code == freud_client.OK
    others.clear()
    assert say(admin, freud_client.produce(letters))[0].code == freud_client.OK
    assert others == []
    assert [one.code for one in say(reader, *forged)] == [freud_client.NO] * 2


def test_message_that_does_not_fit_the_socket_is_not_consumed(others: list[Group]):
    bus = bus_with()
    pipe, key = subscribed(bus)
    slow = bus.connect_freud(identity=ALICE)
    say(pipe, freud_client.produce(NAME, b"12345"), freud_client.produce(NAME, b"67890"))
    slow.appetite = 12
    others.clear()
    slow.deliver(freud_client.get(key))
    assert others == []
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


# --- one at a time, and together ---------------------------------------------


def test_requests_have_the_same_results_alone_and_together(monkeypatch: pytest.MonkeyPatch):
    for seed in range(60):
        alone, together = (results(monkeypatch, seed, joins) for joins in (False, True))
        assert alone == together, seed


def results(monkeypatch: pytest.MonkeyPatch, seed: int, joins: bool) -> object:
    """Return the answers, the counters and the charges after the requests of a seed."""
    ids = count()
    monkeypatch.setattr(os, "urandom", lambda size: next(ids).to_bytes(size, "big"))
    limits = FreudLimits(max_unread_messages=5)
    bus = bus_with(freud=limits, quotas=QuotaLimits(quota_bytes=60))
    pipes = [bus.connect_freud(identity=who) for who in (ALICE, ALICE, BOB)]
    for place, request, times in story(Random(seed)):
        for data in [request * times] if joins else [request] * times:
            pipes[place].deliver(data)
            bus.turn()
        bus.now_s += 0.25
    held = sorted(bus.broker.quotas.accounts(), key=repr)
    return [bytes(pipe.taken) for pipe in pipes], bus.broker.stats(), held


def story(chance: Random) -> Iterator[tuple[int, bytes, int]]:
    """Yield connections, a request of each, and how often it is sent.

    Only equal requests are joined: a Get frees room for a later Produce when it is answered,
    which is at the end of the buffer.
    """
    for _ in range(300):
        yield chance.randrange(3), any_request(chance), chance.choice((1, 1, 2, 4, 7))


def any_request(chance: Random) -> bytes:
    name = chance.choice((b"t", b"t", b"u"))
    key = chance.randrange(4).to_bytes(16, "big")
    return chance.choice(
        (
            freud_client.create(name),
            freud_client.subscribe(name),
            *[freud_client.produce(name, bytes(chance.choice((0, 1, 20))))] * 8,
            *[freud_client.get(key), freud_client.get_record(key)] * 4,
            freud_client.unsubscribe(key) if chance.random() < 0.3 else freud_client.create(name),
            freud_client.delete(name) if chance.random() < 0.3 else freud_client.create(name),
        )
    )
