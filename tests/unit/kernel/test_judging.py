"""The policy callback: called once per topic, may fail, and may not change the table."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import Fanout, Source
from tests.property.kernel.frames import notification, publish

OWN = RqueueEncoding(0, 2048)
FRAMING = RqueueFraming(OWN)
STREAM = publish(b"x", b"1") + publish(b"y", b"2") + publish(b"x", b"3")


class Bus:
    """One reader of x and y; `judge` may be changed at any time."""

    def __init__(self, judge: Callable[[int, bytes], Any] = lambda identity, topic: True) -> None:
        self.judge = judge
        self.asked: list[tuple[int, bytes]] = []
        self.fanout = Fanout(self._ask)
        self.reader = self.fanout.add_subscriber("reader", OWN)
        self.fanout.subscribe(self.reader, b"x")
        self.fanout.subscribe(self.reader, b"y")

    def _ask(self, identity: int, topic: bytes) -> Any:
        self.asked.append((identity, topic))
        return self.judge(identity, topic)

    def route(self, identity: int = 0, stream: Any = STREAM) -> Any:
        return self.fanout.route(FRAMING, Source(identity), stream, 0, len(stream))


def test_verdict_is_requested_once_per_identity_class_and_topic() -> None:
    bus = Bus()
    for _ in range(3):
        bus.route(0)
        bus.route(1)
    assert bus.asked == [(0, b"x"), (0, b"y"), (1, b"x"), (1, b"y")]


def test_deny_is_cached_like_allow() -> None:
    bus = Bus(lambda identity, topic: identity == 0)
    assert bus.route(0).outputs
    assert not bus.route(1).outputs
    bus.judge = lambda identity, topic: identity == 1
    assert bus.route(0).outputs
    assert not bus.route(1).outputs
    bus.fanout.forget_verdicts()
    assert not bus.route(0).outputs
    assert bus.route(1).outputs
    assert len(bus.asked) == 8


def test_unread_topic_is_judged_only_on_request() -> None:
    bus, unread = Bus(lambda identity, topic: False), publish(b"unread", b"")
    bus.route(stream=unread)
    assert (bus.asked, bus.fanout.unheard) == ([], 1)
    bus.fanout.has_produce_rules = True
    for _ in range(2):
        bus.route(stream=unread)
    assert (bus.asked, bus.fanout.denied) == ([(0, b"unread")], 2)
    assert not bus.fanout.has_topic(b"unread")
    assert bus.fanout.topic_count == 2


def test_trusted_source_is_not_judged() -> None:
    bus = Bus(lambda identity, topic: False)
    bus.fanout.has_produce_rules = True
    stream = publish(b"x", b"1") + publish(b"unread", b"2")
    source = Source(0, trusted=True)
    assert bus.fanout.route(FRAMING, source, stream, 0, len(stream)).outputs
    assert (bus.asked, source.denied, source.unheard) == ([], 0, 1)
    assert not bus.route(stream=stream).outputs
    assert bus.asked == [(0, b"x"), (0, b"unread")]
    assert bus.fanout.route(FRAMING, source, stream, 0, len(stream)).outputs


def test_source_may_change_its_identity_class() -> None:
    bus, source = Bus(lambda identity, topic: identity == 9), Source(0)
    assert not bus.fanout.route(FRAMING, source, STREAM, 0, len(STREAM)).outputs
    source.reclassify(9)
    assert source.identity == 9
    assert bus.fanout.route(FRAMING, source, STREAM, 0, len(STREAM)).outputs
    with pytest.raises(ValueError, match="identity class"):
        source.reclassify(65536)
    assert (source.identity, source.messages) == (9, 6)


def test_failing_policy_leaves_the_fanout_usable() -> None:
    def broken(identity: int, topic: bytes) -> bool:
        raise LookupError("the policy is gone")

    bus = Bus()
    bus.fanout.set_collect(b"x", True)
    bus.route()
    bus.fanout.forget_verdicts()
    bus.judge = lambda identity, topic: topic == b"x" or broken(identity, topic)
    buffer = bytearray(STREAM)
    for _ in range(3):
        with pytest.raises(LookupError, match="the policy is gone"):
            bus.route(stream=buffer)
    with pytest.raises(LookupError):
        bus.fanout.publish(Source(0), b"y", array("i", [0, 1]), b"1")
    buffer.clear()
    bus.judge = lambda identity, topic: True
    routed = bus.route()
    inner = notification(b"x", b"1") + notification(b"y", b"2") + notification(b"x", b"3")
    assert routed.outputs == [("reader", inner)]
    assert [batch.bodies for batch in routed.collected] == [b"13"]
    bus.fanout.subscribe(bus.reader, b"z")


@pytest.mark.parametrize("judge", [lambda identity, topic: BrokenTruth(), lambda: True])
def test_invalid_verdict_is_rejected(judge: Any) -> None:
    bus = Bus(judge)
    with pytest.raises(TypeError):
        bus.route()
    bus.judge = lambda identity, topic: True
    assert bus.route().outputs


class BrokenTruth:
    def __bool__(self) -> bool:
        raise TypeError("neither yes nor no")


FORBIDDEN: dict[str, Callable[[Fanout], object]] = {
    "add_subscriber": lambda fanout: fanout.add_subscriber("new", OWN),
    "remove_subscriber": lambda fanout: fanout.remove_subscriber(0),
    "subscribe": lambda fanout: fanout.subscribe(0, b"new"),
    "unsubscribe": lambda fanout: fanout.unsubscribe(0, b"x"),
    "unsubscribe_all": lambda fanout: fanout.unsubscribe_all(0),
    "set_full": lambda fanout: fanout.set_full(0, True),
    "set_collect": lambda fanout: fanout.set_collect(b"x", True),
    "set_hold": lambda fanout: fanout.set_hold(b"x", True),
    "set_next_id": lambda fanout: fanout.set_next_id(b"x", 9),
    "forget_verdicts": lambda fanout: fanout.forget_verdicts(),
    "route": lambda fanout: fanout.route(FRAMING, Source(0), STREAM, 0, len(STREAM)),
    "publish": lambda fanout: fanout.publish(Source(0), b"x", array("i", [0]), b""),
}


@pytest.mark.parametrize("verb", FORBIDDEN)
def test_table_cannot_change_while_a_buffer_is_routed(verb: str) -> None:
    bus = Bus(lambda identity, topic: bool(FORBIDDEN[verb](bus.fanout)) or True)
    with pytest.raises(RuntimeError, match="routed"):
        bus.route()
    bus.judge = lambda identity, topic: True
    assert bus.route().outputs
    FORBIDDEN[verb](bus.fanout)


@pytest.mark.parametrize("verb", FORBIDDEN)
def test_policy_that_ignores_the_refusal_changes_nothing(verb: str) -> None:
    def judge(identity: int, topic: bytes) -> bool:
        with pytest.raises(RuntimeError, match="routed"):
            FORBIDDEN[verb](bus.fanout)
        return True

    bus = Bus(judge)
    (output,) = bus.route().outputs
    assert output[1].count(b"\x07") == 3
    assert bus.fanout.topics_of(bus.reader) == {b"x", b"y"}
    assert bus.fanout.next_id(b"x") == 2
    assert bus.fanout.messages == 3


def test_queries_are_allowed_while_routing() -> None:
    seen: list[object] = []

    def judge(identity: int, topic: bytes) -> bool:
        seen.append((bus.fanout.has_topic(topic), bus.fanout.subscriber_count(topic)))
        return True

    bus = Bus(judge)
    bus.route()
    assert seen == [(True, 1), (True, 1)]
