"""The subscriber table: results and documented errors."""

from __future__ import annotations

import pytest

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding
from polybus.kernel.fanout import Fanout
from polybus.kernel.framing import Encoding
from polybus.kernel.subscriber_table import SubscriberTable

BAD_NAMES = [b"", b"t" * 256, b"t" * 70_000]


@pytest.fixture
def registry() -> SubscriberTable:
    return Fanout(lambda identity, topic: True)


@pytest.fixture
def encoding() -> Encoding:
    return RqueueEncoding(0, 2048)


def test_subscribing_twice_is_one_subscription(
    registry: SubscriberTable, encoding: Encoding
) -> None:
    number = registry.add_subscriber("reader", encoding)
    assert registry.subscribe(number, b"t") is True
    assert registry.subscribe(number, b"t") is False
    assert registry.subscriber_count(b"t") == registry.subscription_count(number) == 1
    assert registry.unsubscribe(number, b"t") is True
    assert registry.unsubscribe(number, b"t") is False
    assert registry.subscriber_count(b"t") == registry.subscription_count(number) == 0


def test_topic_exists_while_it_has_subscribers(
    registry: SubscriberTable, encoding: Encoding
) -> None:
    number = registry.add_subscriber("reader", encoding)
    registry.subscribe(number, b"t")
    registry.set_collect(b"t", True)
    registry.unsubscribe(number, b"t")
    assert registry.has_topic(b"t")
    registry.set_collect(b"t", False)
    assert not registry.has_topic(b"t")
    assert registry.topic_count == 0


def test_held_topic_keeps_its_ids(registry: SubscriberTable, encoding: Encoding) -> None:
    number = registry.add_subscriber("reader", encoding)
    registry.subscribe(number, b"t")
    registry.set_hold(b"t", True)
    registry.set_next_id(b"t", 5)
    registry.unsubscribe(number, b"t")
    assert registry.has_topic(b"t")
    assert (registry.topic_count, registry.next_id(b"t")) == (1, 5)
    registry.set_next_id(b"t", 6)
    registry.set_hold(b"t", False)
    assert not registry.has_topic(b"t")
    assert (registry.topic_count, registry.next_id(b"t")) == (0, 0)


def test_ids_are_discarded_with_the_last_subscriber(
    registry: SubscriberTable, encoding: Encoding
) -> None:
    first, second = (registry.add_subscriber(name, encoding) for name in "ab")
    registry.subscribe(first, b"t")
    registry.set_next_id(b"t", 2**64 - 1)
    registry.subscribe(second, b"t")
    registry.unsubscribe(first, b"t")
    assert registry.next_id(b"t") == 2**64 - 1
    registry.unsubscribe(second, b"t")
    registry.subscribe(first, b"t")
    assert registry.next_id(b"t") == 0


def test_topics_with_the_same_subscribers_share_a_set(
    registry: SubscriberTable, encoding: Encoding
) -> None:
    one, two = (registry.add_subscriber(name, encoding) for name in "ab")
    for topic in (b"x", b"y", b"z"):
        registry.subscribe(one, topic)
        registry.subscribe(two, topic)
    assert registry.set_count == 1
    registry.unsubscribe(one, b"y")
    assert registry.set_count == 2
    registry.remove_subscriber(two)
    assert (registry.set_count, registry.topic_count) == (1, 2)
    registry.remove_subscriber(one)
    assert (registry.set_count, registry.topic_count) == (0, 0)


def test_set_that_changed_in_place_is_not_taken_for_its_former_self(
    registry: SubscriberTable, encoding: Encoding
) -> None:
    first, second, third = (registry.add_subscriber(name, encoding) for name in "abc")
    for topic in (b"x", b"y"):
        registry.subscribe(first, topic)
    registry.subscribe(second, b"x")
    registry.subscribe(third, b"y")
    registry.subscribe(second, b"y")
    assert registry.subscriber_count(b"x") == 2
    assert registry.subscriber_count(b"y") == 3
    assert registry.set_count == 2


def test_removing_a_subscriber_returns_its_subscription_count(
    registry: SubscriberTable, encoding: Encoding
) -> None:
    number = registry.add_subscriber("reader", encoding)
    for topic in (b"x", b"y", b"z"):
        registry.subscribe(number, topic)
    assert registry.topics_of(number) == {b"x", b"y", b"z"}
    assert registry.unsubscribe_all(number) == 3
    registry.subscribe(number, b"x")
    assert registry.remove_subscriber(number) == 1


def test_reused_number_has_no_subscriptions(registry: SubscriberTable, encoding: Encoding) -> None:
    number = registry.add_subscriber("old", encoding)
    registry.subscribe(number, b"t")
    registry.set_full(number, True)
    registry.remove_subscriber(number)
    assert registry.add_subscriber("new", encoding) == number
    assert registry.topics_of(number) == frozenset()
    assert registry.sent_totals(number) == (0, 0)


@pytest.mark.parametrize("name", BAD_NAMES, ids=len)
def test_invalid_names_are_rejected(
    registry: SubscriberTable, encoding: Encoding, name: bytes
) -> None:
    number = registry.add_subscriber("reader", encoding)
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        registry.subscribe(number, name)
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        registry.set_collect(name, True)
    with pytest.raises(ValueError, match="1 to 255 bytes"):
        registry.set_hold(name, True)
    with pytest.raises(KeyError):
        registry.set_next_id(name, 1)
    assert registry.unsubscribe(number, name) is False
    assert registry.has_topic(name) is False
    assert registry.subscriber_count(name) == registry.next_id(name) == 0
    assert registry.topic_count == 0


OF_A_READER = (
    ("remove_subscriber", ()),
    ("subscribe", (b"t",)),
    ("unsubscribe", (b"t",)),
    ("unsubscribe_all", ()),
    ("is_subscribed", (b"t",)),
    ("topics_of", ()),
    ("subscription_count", ()),
    ("set_full", (True,)),
    ("sent_totals", ()),
)


@pytest.mark.parametrize(("verb", "arguments"), OF_A_READER, ids=lambda value: str(value))
def test_unknown_subscribers_are_rejected(
    registry: SubscriberTable, encoding: Encoding, verb: str, arguments: tuple[object, ...]
) -> None:
    gone = registry.add_subscriber("reader", encoding)
    registry.remove_subscriber(gone)
    for number in (gone, gone + 1, 63, 64, 2**32 - 1):
        with pytest.raises(KeyError):
            getattr(registry, verb)(number, *arguments)
    for number in (-1, 2**32):
        with pytest.raises(OverflowError):
            getattr(registry, verb)(number, *arguments)


@pytest.mark.parametrize("topic", [None, "text", 1, bytearray(b"t")], ids=repr)
def test_topics_are_bytes(registry: SubscriberTable, encoding: Encoding, topic: object) -> None:
    number = registry.add_subscriber("reader", encoding)
    with pytest.raises(TypeError):
        registry.subscribe(number, topic)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        registry.set_collect(topic, True)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        registry.has_topic(topic)  # type: ignore[arg-type]


def test_ids_can_be_set_only_for_topics_with_subscribers(registry: SubscriberTable) -> None:
    with pytest.raises(KeyError):
        registry.set_next_id(b"t", 5)
    registry.set_collect(b"t", True)
    registry.set_next_id(b"t", 5)
    assert registry.next_id(b"t") == 5
    with pytest.raises(OverflowError):
        registry.set_next_id(b"t", -1)


def test_encoding_numbers_are_unique(registry: SubscriberTable, encoding: Encoding) -> None:
    registry.add_subscriber("reader", encoding)
    registry.add_subscriber("another", encoding)
    with pytest.raises(ValueError, match="number"):
        registry.add_subscriber("third", RqueueEncoding(0, 2048))
    registry.add_subscriber("third", RqueueEncoding(1, 2048))


@pytest.mark.parametrize("encoding", [None, object(), 0], ids=["None", "object", "0"])
def test_subscriber_must_have_an_encoding(registry: SubscriberTable, encoding: object) -> None:
    with pytest.raises(TypeError):
        registry.add_subscriber("reader", encoding)  # type: ignore[arg-type]
