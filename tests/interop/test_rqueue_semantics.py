"""The rules of the rqueue spec, tested with a client written from the spec alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess, rqueue
from tests.rig.observer import check_unharmed, connections, count, stats
from tests.rig.rqueue_client import (
    NOTIFICATION,
    PART,
    REMOVE,
    Client,
    connect,
    deregister,
    frame,
    publish,
    publish_part,
    remove,
    subscribe,
    with_topic,
)

CAP = 2048


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with rqueue("--admin") as running:
        yield running
        check_unharmed(running)


@pytest.fixture
def client(bus: BusProcess) -> Iterator[Client]:
    with connect(bus.address()) as one:
        yield one


@pytest.fixture
def other(bus: BusProcess) -> Iterator[Client]:
    with connect(bus.address()) as one:
        yield one


def test_subscribed_publisher_gets_its_own_messages(client: Client):
    client.send(subscribe(b"t"), publish(b"t", b"hello"))
    assert client.messages(1) == [(b"t", b"hello")]


def test_each_subscriber_gets_a_message_once(client: Client, other: Client):
    for one in (client, other):
        one.send(subscribe(b"t"))
        one.settle()
    client.send(publish(b"t", b"1"), publish(b"u", b"2"), publish(b"t", b"3"))
    for one in (client, other):
        assert one.messages(2) == [(b"t", b"1"), (b"t", b"3")]
        assert one.settle() == []


def test_later_subscriber_gets_no_earlier_message(client: Client, other: Client):
    client.send(publish(b"t", b"early"))
    client.settle()
    other.send(subscribe(b"t"))
    assert other.settle() == []


def test_repeated_subscribe_has_no_effect(client: Client):
    client.send(subscribe(b"t") * 3, publish(b"t", b"once"))
    assert client.messages(1) == [(b"t", b"once")]
    assert client.settle() == []
    client.send(remove(b"t"), publish(b"t", b"none"))
    assert client.settle() == []


def test_remove_ends_one_subscription(client: Client, other: Client):
    other.send(subscribe(b"a"))
    other.settle()
    client.send(subscribe(b"a"), subscribe(b"b"), remove(b"a"))
    client.send(publish(b"a", b"1"), publish(b"b", b"2"))
    assert client.messages(1) == [(b"b", b"2")]
    assert client.settle() == []
    assert other.messages(1) == [(b"a", b"1")]


def test_remove_of_an_unsubscribed_topic_is_ignored(client: Client):
    client.send(remove(b"never"), subscribe(b"t"), remove(b"T"), publish(b"t", b"x"))
    assert client.messages(1) == [(b"t", b"x")]


def test_deregister_ends_all_subscriptions(client: Client, other: Client):
    other.send(subscribe(b"a"))
    other.settle()
    client.send(deregister(), subscribe(b"a"), subscribe(b"b"), deregister(), deregister())
    client.send(publish(b"a", b"1"), publish(b"b", b"2"))
    assert client.settle() == []
    assert other.messages(1) == [(b"a", b"1")]
    client.send(subscribe(b"b"), publish(b"b", b"again"))
    assert client.messages(1) == [(b"b", b"again")]


def test_empty_frame_of_type_2_is_a_deregister(client: Client):
    client.send(subscribe(b"a"), subscribe(b"b"), frame(REMOVE), publish(b"a", b"1"))
    client.send(publish(b"b", b"2"))
    assert client.settle() == []
    client.send(subscribe(b"b"), publish(b"b", b"again"))
    assert client.messages(1) == [(b"b", b"again")]


def test_frames_take_effect_in_order(client: Client):
    client.send(
        publish(b"t", b"before"),
        subscribe(b"t"),
        publish(b"t", b"in"),
        remove(b"t"),
        publish(b"t", b"out"),
        subscribe(b"t"),
        publish(b"t", b"in again"),
    )
    assert client.messages(2) == [(b"t", b"in"), (b"t", b"in again")]
    assert client.settle() == []


def test_subscription_is_active_once_the_own_probe_returns(client: Client, other: Client):
    for at in range(300):
        topic = b"%d" % at
        client.send(subscribe(topic))
        assert client.settle() == []
        other.send(publish(topic, b"at once"))
        assert client.messages(1) == [(topic, b"at once")]


@pytest.mark.parametrize(
    "topic",
    [b"\0", bytes(255), bytes(range(256))[1:], b"\xff\xfe", "späte Größe".encode(), b"_", b"a,*"],
    ids=repr,
)
def test_topic_may_be_any_bytes(client: Client, topic: bytes):
    client.send(subscribe(topic), publish(topic, b"x"), publish(topic + b"!" * (len(topic) < 255)))
    received = client.messages(2 if len(topic) == 255 else 1)
    assert received[0] == (topic, b"x")
    client.send(remove(topic), publish(topic, b"y"))
    assert client.settle() == []


def test_topics_that_differ_in_one_byte_are_distinct(client: Client):
    topics = [bytes([first, second]) for first in range(64) for second in (0, 1, 255)]
    client.send(*(subscribe(topic) for topic in topics[::2]))
    client.send(*(publish(topic, topic) for topic in topics))
    assert client.messages(len(topics[::2])) == [(topic, topic) for topic in topics[::2]]
    assert client.settle() == []


def test_content_may_be_empty_or_any_bytes(client: Client):
    contents = [b"", b"\0", bytes(range(256)), publish(b"t", b"a frame inside")]
    client.send(subscribe(b"t"), *(publish(b"t", content) for content in contents))
    assert client.messages(4) == [(b"t", content) for content in contents]


@pytest.mark.parametrize("topic", [b"t", b"t" * 255])
def test_max_payload_is_exact_for_content(bus: BusProcess, client: Client, topic: bytes):
    largest = CAP - 6 - len(topic)
    content = os.urandom(largest)
    client.send(subscribe(topic), publish(topic, content))
    assert client.messages(1) == [(topic, content)]
    client.send(publish(topic, bytes(largest + 1)))
    assert client.to_the_end() == []


@pytest.mark.parametrize("topic", [b"t", b"t" * 255])
def test_max_payload_is_exact_for_parts(bus: BusProcess, client: Client, topic: bytes):
    largest = CAP - 26 - len(topic)
    chunk, message_id = os.urandom(largest), os.urandom(16)
    client.send(subscribe(topic), publish_part(topic, message_id, 0, 1, chunk))
    expected = with_topic(topic, message_id + b"\0\0\0\1" + chunk)
    assert client.frames(1) == [(PART, expected)]
    client.send(publish_part(topic, message_id, 0, 1, bytes(largest + 1)))
    assert client.to_the_end() == []


def test_parts_are_relayed_unchanged(client: Client, other: Client):
    """Readers join the parts: the bus neither waits for parts nor orders them."""
    other.send(subscribe(b"t"))
    other.settle()
    message_id = os.urandom(16)
    numbers = [(2, 3), (0, 3), (2, 3), (65534, 65535)]
    client.send(publish(b"t", b"between"))
    client.send(*(publish_part(b"t", message_id, at, of, b"chunk") for at, of in numbers))
    client.send(publish_part(b"t", message_id, 0, 1))
    assert other.messages(1) == [(b"t", b"between")]
    fields = [message_id + at.to_bytes(2, "big") + of.to_bytes(2, "big") for at, of in numbers]
    expected = [(PART, with_topic(b"t", field + b"chunk")) for field in fields]
    expected.append((PART, with_topic(b"t", message_id + b"\0\0\0\1")))
    assert other.frames(5) == expected


def test_closed_connection_loses_its_subscriptions(bus: BusProcess, client: Client):
    with connect(bus.address()) as leaving:
        leaving.send(subscribe(b"mine"))
        leaving.settle()
        assert count(bus, "topics") == 1
    client.send(publish(b"mine", b"unread"))
    client.settle()
    assert client.settle() == []
    while count(bus, "connections", "open") > 1:
        client.settle()
    assert count(bus, "topics") == 0


def test_counters_equal_the_delivered_messages(bus: BusProcess, client: Client, other: Client):
    client.send(subscribe(b"t"), subscribe(b"u"))
    client.settle()
    before = stats(bus)
    other.send(publish(b"t", b"12345"), publish(b"u", b""), publish(b"unread", b"!"))
    other.settle()
    assert client.frames(2) == [
        (NOTIFICATION, with_topic(b"t", b"12345")),
        (NOTIFICATION, with_topic(b"u")),
    ]
    after = stats(bus)
    probe = 5 + 1 + 7 + 16
    grown = {name: after["messages"][name] - before["messages"][name] for name in after["messages"]}
    assert grown == {
        "received": 4,
        "received_bytes": 6,
        "delivered": 3,
        "delivered_bytes": (5 + 2 + 5) + (5 + 2) + probe,
    }
    lost = {name: n - before["dropped"].get(name, 0) for name, n in after["dropped"].items()}
    assert lost == {"no_subscriber": 1}
    mine = next(one for one in connections(bus) if one["peer"] == client.name)
    assert mine["subscriptions"] == 2
    assert mine["sent_messages"] == 3  # its own probe, and these two
