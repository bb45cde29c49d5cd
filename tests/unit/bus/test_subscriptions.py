"""Subscribing within limits: every bound is exact, and probes are free, but not endless."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.bus.policy import Policy
from polybus.bus.subscriptions import FREE_PROBES
from polybus.model.limits import Limits
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.rqueue_client import deregister, notification, publish, remove, subscribe

# One user for all connections, so it needs the whole table.
LIMITS = Limits(max_topics=5, max_subscriptions_per_connection=3, user_share=1.0, admin_reserve=0.0)


def probe(number: int | None = None) -> bytes:
    return b"_probe/" + (os.urandom(16) if number is None else number.to_bytes(16, "big"))


def subscribe_to(pipe: MemoryPipe, *topics: bytes) -> None:
    pipe.deliver(b"".join(map(subscribe, topics)))


def is_open(pipe: MemoryPipe) -> bool:
    return not pipe.closed


def counted(bus: MemoryBus) -> tuple[int, int]:
    return bus.stats("topics"), bus.stats("subscriptions")


def heard(bus: MemoryBus, pipe: MemoryPipe, topic: bytes) -> int:
    """Publish a message. Returns the number of copies that reach the pipe."""
    before = len(pipe.taken)
    bus.connect().deliver(publish(topic, b"!"))
    bus.turn()
    return pipe.taken[before:].count(notification(topic, b"!"))


def test_second_subscribe_has_no_effect():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    subscribe_to(pipe, b"t", b"t", b"t", b"t", b"t")
    assert counted(bus) == (1, 1)
    assert heard(bus, pipe, b"t") == 1
    pipe.deliver(remove(b"t"))
    assert counted(bus) == (0, 0)
    assert heard(bus, pipe, b"t") == 0


def test_unsubscribe_without_subscription_is_ignored():
    bus = MemoryBus(LIMITS)
    pipe, other = bus.connect(), bus.connect()
    subscribe_to(other, b"t")
    pipe.deliver(remove(b"t") + remove(b"unknown"))
    assert counted(bus) == (1, 1)
    assert heard(bus, other, b"t") == 1
    assert is_open(pipe)


def test_deregister_ends_subscriptions_of_one_connection():
    bus = MemoryBus(LIMITS)
    pipe, other = bus.connect(), bus.connect()
    subscribe_to(pipe, b"a", b"b", probe())
    subscribe_to(other, b"a")
    pipe.deliver(deregister())
    assert counted(bus) == (1, 1)
    assert heard(bus, pipe, b"a") == 0
    assert heard(bus, other, b"a") == 1
    subscribe_to(pipe, b"b")
    assert heard(bus, pipe, b"b") == 1


def test_disconnect_ends_all_subscriptions():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    subscribe_to(pipe, b"a", b"b", probe())
    pipe.hang_up()
    assert counted(bus) == (0, 0)


def test_limit_of_subscriptions_per_connection_is_exact():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    subscribe_to(pipe, b"a", b"b", b"c")
    assert is_open(pipe)
    subscribe_to(pipe, b"a")  # has it already: no new one
    assert is_open(pipe)
    subscribe_to(pipe, b"d")
    assert pipe.closed
    assert bus.stats("connections", "closed") == {"max_subscriptions_per_connection": 1}
    assert counted(bus) == (0, 0)


def test_unsubscribe_frees_a_place():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    for number in range(20):
        subscribe_to(pipe, b"%d" % number)
        if number >= 2:
            pipe.deliver(remove(b"%d" % (number - 2)))
    assert is_open(pipe)
    assert counted(bus) == (2, 2)


def test_limit_of_topics_is_exact():
    bus = MemoryBus(LIMITS)
    first, second, third = (bus.connect() for _ in range(3))
    subscribe_to(first, b"a", b"b", b"c")
    subscribe_to(second, b"d", b"e")
    assert counted(bus) == (5, 5)
    subscribe_to(third, b"a")  # a topic that is there costs nothing
    assert is_open(third)
    subscribe_to(third, b"f")
    assert third.closed
    assert bus.stats("connections", "closed") == {"max_topics": 1}
    assert counted(bus) == (5, 5)
    second.hang_up()
    subscribe_to(bus.connect(), b"f", b"g")
    assert counted(bus) == (5, 5)


def test_frames_after_a_refused_subscribe_have_no_effect():
    bus = MemoryBus(LIMITS)
    reader, pipe = bus.connect(), bus.connect()
    subscribe_to(reader, b"a")
    pipe.deliver(publish(b"a", b"1"))
    pipe.deliver(b"".join(map(subscribe, (b"b", b"c", b"d", b"e"))) + publish(b"a", b"2"))
    bus.turn()
    assert pipe.closed
    assert reader.taken == notification(b"a", b"1")


def test_probes_are_exempt_from_limits():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    subscribe_to(pipe, *(probe() for _ in range(FREE_PROBES)), b"a", b"b", b"c")
    assert is_open(pipe)
    assert counted(bus) == (3, FREE_PROBES + 3)
    assert heard(bus, pipe, b"c") == 1


def test_probe_is_accepted_at_the_limit():
    bus = MemoryBus(LIMITS)
    subscribe_to(bus.connect(), b"a", b"b", b"c")
    subscribe_to(bus.connect(), b"d", b"e")
    pipe, topic = bus.connect(), probe()
    subscribe_to(pipe, topic)
    pipe.deliver(publish(topic))
    assert pipe.taken == notification(topic)


def test_probes_beyond_free_probes_count_as_topics():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    subscribe_to(pipe, *(probe() for _ in range(FREE_PROBES + 3)))
    assert is_open(pipe)
    assert counted(bus) == (3, FREE_PROBES + 3)
    subscribe_to(pipe, probe())
    assert pipe.closed


def test_removed_probe_frees_a_place():
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    for _ in range(10 * FREE_PROBES):
        topic = probe()
        pipe.deliver(subscribe(topic) + remove(topic))
    assert is_open(pipe)
    assert counted(bus) == (0, 0)


def test_shared_probe_is_one_topic():
    """Else each of them would make room for a topic that the limit forbids."""
    bus = MemoryBus(LIMITS)
    pipes = [bus.connect() for _ in range(10)]
    for pipe in pipes:
        subscribe_to(pipe, probe(1))
    assert counted(bus) == (0, 10)
    subscribe_to(pipes[0], b"a", b"b", b"c")
    subscribe_to(pipes[1], b"d", b"e", b"f")
    assert pipes[1].closed
    for pipe in pipes[2:]:
        pipe.deliver(remove(probe(1)))
    assert counted(bus) == (3, 4)
    pipes[0].hang_up()
    assert counted(bus) == (0, 0)


@pytest.mark.parametrize("topic", [b"_probe/", b"_probe/" + bytes(15), b"_probe/" + bytes(17)])
def test_only_a_complete_probe_name_is_exempt(topic: bytes):
    bus = MemoryBus(LIMITS)
    subscribe_to(bus.connect(), topic)
    assert counted(bus) == (1, 1)


def test_denied_subscribe_is_ignored_and_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Policy, "may_subscribe", lambda self, who, topic: topic != b"secret")
    bus = MemoryBus(LIMITS)
    pipe = bus.connect()
    subscribe_to(pipe, b"secret", b"open")
    assert is_open(pipe)
    assert counted(bus) == (1, 1)
    assert heard(bus, pipe, b"secret") == 0
    assert bus.stats("refused") == {"subscribe_denied": 1}


def test_denied_publish_is_ignored_and_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Policy, "may_produce", lambda self, who, topic: topic != b"secret")
    bus = MemoryBus(LIMITS)
    reader, writer = bus.connect(), bus.connect()
    subscribe_to(reader, b"secret", b"open")
    writer.deliver(publish(b"secret", b"x") + publish(b"open", b"y"))
    assert reader.taken == notification(b"open", b"y")
    assert bus.stats("dropped") == {"denied": 1}
    assert not writer.closed


VERBS = st.tuples(
    st.integers(0, 2),  # client
    st.sampled_from(["subscribe", "subscribe", "subscribe", "remove", "deregister", "leave"]),
    st.one_of(st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), st.integers(0, 20).map(probe)),
)


@given(st.lists(VERBS, max_size=80))
def test_counts_agree_with_a_plain_model(verbs: list[tuple[int, str, bytes]]):
    bus = MemoryBus(Limits(max_topics=1000, max_subscriptions_per_connection=1000))
    pipes = [bus.connect() for _ in range(3)]
    model: list[set[bytes]] = [set() for _ in pipes]
    for who, verb, topic in verbs:
        if verb == "subscribe":
            pipes[who].deliver(subscribe(topic))
            model[who].add(topic)
        elif verb == "remove":
            pipes[who].deliver(remove(topic))
            model[who].discard(topic)
        else:
            if verb == "deregister":
                pipes[who].deliver(deregister())
            else:
                pipes[who].hang_up()
                pipes[who] = bus.connect()
            model[who].clear()
        assert bus.stats("subscriptions") == sum(map(len, model))
        named = {topic for topics in model for topic in topics if not topic.startswith(b"_probe/")}
        assert len(named) <= bus.stats("topics") <= len(set().union(*model))
