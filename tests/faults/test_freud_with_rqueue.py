"""Freud and rqueue on the same topic, on a live server."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess
from tests.faults.freud_live import begin, connect, serving
from tests.rig import rqueue_client
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    NOTHING_HAPPENED,
    NOTICE,
    NOTICE_FLAG,
    OK,
    Client,
    count,
    create,
    delete,
    get,
    get_record,
    number,
    produce,
    record,
)
from tests.rig.observer import count as counter
from tests.rig.observer import until

PART_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with serving(env={"POLYBUS_RQUEUE_PART_TIMEOUT_S": str(PART_TIMEOUT_S)}) as running:
        yield running


@pytest.fixture
def pusher(bus: BusProcess) -> Iterator[rqueue_client.Client]:
    with rqueue_client.connect(bus.address("rqueue")) as made:
        yield made


def publish(pusher: rqueue_client.Client, topic: bytes, *bodies: bytes) -> None:
    pusher.send(*(rqueue_client.publish(topic, body) for body in bodies))
    pusher.settle()


def listen(pusher: rqueue_client.Client, topic: bytes) -> None:
    pusher.send(rqueue_client.subscribe(topic))
    pusher.settle()


def parts_of(topic: bytes, body: bytes, size: int = 1500) -> list[bytes]:
    """Return the PART frames of a message, as the rqueue spec defines them."""
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    key = os.urandom(16)
    return [
        rqueue_client.publish_part(topic, key, index, len(chunks), chunk)
        for index, chunk in enumerate(chunks)
    ]


# --- both ways ---------------------------------------------------------------


def test_freud_subscriber_reads_rqueue_publishes(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    publish(pusher, topic, b"no subscriber yet")
    key = client.subscribe(topic)
    publish(pusher, topic, b"1", b"", b"3")
    assert number(client.ask(produce(topic, b"4"))) == 3
    client.send(*(get_record(key) for _ in range(4)), get(key))
    *found, nothing = client.answers(5)
    assert [(record(one).id, record(one).body) for one in found] == [
        (0, b"1"),
        (1, b""),
        (2, b"3"),
        (3, b"4"),
    ]
    times = [record(one).timestamp_ns for one in found]
    assert times == sorted(times)
    assert nothing.code == NOTHING_HAPPENED


def test_rqueue_subscriber_gets_freud_produces(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    assert client.ask(produce(topic, b"unheard")) == (NOTHING_HAPPENED, b"")
    listen(pusher, topic)
    assert number(client.ask(count(topic))) == 1
    bodies = [b"", b"one", bytes(range(256))]
    client.send(*(produce(topic, body) for body in bodies))
    assert [number(one) for one in client.answers(3)] == [0, 1, 2]
    assert pusher.messages(3) == [(topic, body) for body in bodies]
    pusher.send(rqueue_client.remove(topic))
    pusher.settle()
    assert number(client.ask(count(topic))) == 0
    assert client.ask(produce(topic, b"unheard")) == (NOTHING_HAPPENED, b"")


def test_rqueue_publish_ends_a_waiting_get(
    bus: BusProcess, client: Client, pusher: rqueue_client.Client, topic: bytes
):
    key = client.subscribe(topic)
    with connect(bus) as waiting:
        begin(waiting, get(key, FOR_EVER), get(key, FOR_EVER))
        publish(pusher, topic, b"1", b"2", b"3")
        assert waiting.answers(2) == [(OK, b"1"), (OK, b"2")]
    assert client.ask(get(key)) == (OK, b"3")


def test_forged_notice_from_rqueue_has_no_notice_flag(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    key = client.subscribe(topic)
    publish(pusher, topic, NOTICE + topic)
    client.ask(delete(topic))
    client.send(get_record(key), get_record(key))
    forged, real = (record(one) for one in client.answers(2))
    assert forged.body == real.body == NOTICE + topic
    assert (forged.flags, real.flags) == (0, NOTICE_FLAG)
    assert (forged.id, real.id) == (0, 1)


def test_topic_names_invalid_in_freud_work_in_rqueue(client: Client, pusher: rqueue_client.Client):
    for name in (b"a,b", b"_own", b"\xff"):
        listen(pusher, name)
        publish(pusher, name)
        assert pusher.messages(0) == []
        assert client.ask(create(name)).code == 4


# --- large messages ----------------------------------------------------------


@pytest.mark.parametrize("size", [1500, 1501, 100_000, 3_000_000])
def test_freud_reads_rqueue_parts_as_one_message(
    client: Client, pusher: rqueue_client.Client, topic: bytes, size: int
):
    key = client.subscribe(topic)
    body = os.urandom(size)
    pusher.send(*parts_of(topic, body))
    pusher.settle()
    found = record(client.ask(get_record(key, 10)))
    assert (found.id, found.flags, found.body) == (0, 0, body)
    assert client.ask(get(key)).code == NOTHING_HAPPENED
    assert number(client.ask(produce(topic, b"next"))) == 1


def test_parts_and_whole_messages_of_one_publisher_keep_their_order(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    """A large message has the position of its last PART."""
    key = client.subscribe(topic)
    first, second = parts_of(topic, b"A" * 5000), parts_of(topic, b"B" * 5000)
    pusher.send(
        rqueue_client.publish(topic, b"1"),
        *first[:-1],
        rqueue_client.publish(topic, b"2"),
        *second,
        rqueue_client.publish(topic, b"3"),
        first[-1],
        rqueue_client.publish(topic, b"4"),
    )
    pusher.settle()
    client.send(*(get_record(key) for _ in range(6)))
    found = [record(one) for one in client.answers(6)]
    assert [one.body[:1] for one in found] == [b"1", b"2", b"B", b"3", b"A", b"4"]
    assert [one.id for one in found] == list(range(6))


def test_interleaved_parts_in_any_order_are_joined(
    client: Client, bus: BusProcess, pusher: rqueue_client.Client, topic: bytes
):
    key = client.subscribe(topic)
    with rqueue_client.connect(bus.address("rqueue")) as other:
        one, two = parts_of(topic, b"1" * 4000), parts_of(topic, b"2" * 4000)
        pusher.send(one[2], one[0])
        other.send(two[1], two[2])
        pusher.settle()
        other.settle()
        assert client.ask(get(key)).code == NOTHING_HAPPENED
        other.send(two[0])
        assert client.ask(get(key, 10)) == (OK, b"2" * 4000)
        pusher.send(one[1])
        assert client.ask(get(key, 10)) == (OK, b"1" * 4000)


def test_incomplete_parts_expire_and_are_counted(
    bus: BusProcess, client: Client, pusher: rqueue_client.Client, topic: bytes
):
    lost = counter(bus, "dropped", "incomplete_parts")
    key = client.subscribe(topic)
    pusher.send(*parts_of(topic, bytes(4000))[:2])
    pusher.settle()
    until(lambda: counter(bus, "dropped", "incomplete_parts") == lost + 1, "they are let go")
    with rqueue_client.connect(bus.address("rqueue")) as dies:
        dies.send(*parts_of(topic, bytes(4000))[:2])
        dies.settle()
    until(lambda: counter(bus, "dropped", "incomplete_parts") == lost + 2, "with its publisher")
    assert client.ask(get(key)).code == NOTHING_HAPPENED


def test_large_body_reaches_rqueue_in_parts(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    listen(pusher, topic)
    body = os.urandom(100_000)
    client.send(produce(topic, b"before"), produce(topic, body), produce(topic, b"after"))
    assert [number(one) for one in client.answers(3)] == [0, 1, 2]
    assert pusher.messages(1) == [(topic, b"before")]
    chunks: dict[int, bytes] = {}
    keys = set()
    total = None
    while total is None or len(chunks) < total:
        kind, payload = pusher.frames(1)[0]
        assert kind == rqueue_client.PART
        assert len(payload) <= 2048
        assert payload[1 : 1 + payload[0]] == topic
        key, index, total = struct.unpack_from(">16sHH", payload, 1 + len(topic))
        keys.add(key)
        chunks[index] = payload[1 + len(topic) + 20 :]
    assert len(keys) == 1
    assert b"".join(chunks[index] for index in sorted(chunks)) == body
    assert pusher.messages(1) == [(topic, b"after")]


# --- deletion and recreation -------------------------------------------------


def test_rqueue_continues_on_a_topic_marked_as_deleted(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    """rqueue clients get no deletion notice, and Freud readers get none of their messages."""
    key = client.subscribe(topic)
    listen(pusher, topic)
    client.ask(delete(topic))
    assert client.ask(produce(topic, b"x")) == (DOESNT_EXIST, b"")
    publish_and_receive(pusher, topic, b"among us")
    client.send(get_record(key), get(key))
    notice, gone = client.answers(2)
    assert (record(notice).id, record(notice).body) == (0, NOTICE + topic)
    assert gone.code == DOESNT_EXIST
    publish_and_receive(pusher, topic, b"and still")


def publish_and_receive(pusher: rqueue_client.Client, topic: bytes, body: bytes) -> None:
    pusher.send(rqueue_client.publish(topic, body))
    assert pusher.messages(1) == [(topic, body)]


def test_rqueue_publish_enters_the_recreation_buffer(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    """rqueue readers get it at once, and the buffered messages of Freud later."""
    old = client.subscribe(topic)
    listen(pusher, topic)
    client.send(delete(topic), create(topic), produce(topic, b"freud"))
    client.answers(3)
    new = client.subscribe(topic)
    publish_and_receive(pusher, topic, b"rqueue")
    assert client.ask(get(new)).code == NOTHING_HAPPENED
    assert client.ask(get(old)) == (OK, NOTICE + topic)
    assert pusher.messages(1) == [(topic, b"freud")]
    client.send(get_record(new), get_record(new))
    found = [record(one) for one in client.answers(2)]
    assert [(one.id, one.body) for one in found] == [(0, b"freud"), (1, b"rqueue")]
    assert pusher.settle() == []


def test_first_rqueue_subscriber_gets_the_recreation_buffer(
    client: Client, pusher: rqueue_client.Client, topic: bytes
):
    old = client.subscribe(topic)
    client.send(delete(topic), create(topic), produce(topic, b"kept"), get(old))
    assert [one.code for one in client.answers(4)] == [OK] * 4
    pusher.send(rqueue_client.subscribe(topic))
    assert pusher.messages(1) == [(topic, b"kept")]
    assert client.ask(get(client.subscribe(topic))).code == NOTHING_HAPPENED
