"""Commits wake the loop only for topics that something on the loop follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.durable.followed_topics import FollowedTopics
from polybus.model.commit import Append, Commit
from polybus.testing.conformance.sample_blocks import block
from tests.rig import freud_client
from tests.rig.memory_bus import MemoryBus
from tests.rig.rqueue_client import deregister, notification, remove, subscribe


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(durable=True)


def commit_directly(bus: MemoryBus, topic: int, body: bytes = b"x") -> int:
    """Commit as another thread does, past the registry. Returns the callbacks for the loop."""
    before = len(bus._soon)
    bus.store.commit(Commit((Append(topic, 0, block(body)),)))
    bus.commit()
    return len(bus._soon) - before


def test_commit_that_nothing_follows_does_not_wake_the_loop(bus: MemoryBus):
    topic, other = bus.make("t").number, bus.make("u").number
    assert commit_directly(bus, topic) == 0
    reader = bus.connect()
    reader.deliver(subscribe(b"u"))
    assert commit_directly(bus, topic) == 0
    assert commit_directly(bus, other) == 1


@pytest.mark.parametrize("how", ["remove", "deregister", "hang_up", "drop"])
def test_topic_is_not_followed_after_its_last_reader(bus: MemoryBus, how: str):
    topic = bus.make("t")
    readers = [bus.connect(), bus.connect()]
    for reader in readers:
        reader.deliver(subscribe(b"t"))
    if how == "drop":
        bus.drop(topic)
        topic = bus.make("t")  # the subscribers follow the new one
        assert commit_directly(bus, topic.number) == 1
        return
    for reader in readers:
        assert commit_directly(bus, topic.number) == 1
        bus.settle()
        if how == "hang_up":
            reader.hang_up()
        else:
            reader.deliver(remove(b"t") if how == "remove" else deregister())
        bus.settle()
    assert commit_directly(bus, topic.number) == 0


def test_commit_before_the_registry_knows_its_id_reaches_a_new_reader(bus: MemoryBus):
    """The reader starts at the next id of the registry, which lies before that commit."""
    topic = bus.make("t")
    assert commit_directly(bus, topic.number, b"early") == 0
    reader = bus.connect()
    reader.deliver(subscribe(b"t"))
    bus.settle()
    assert bytes(reader.taken) == notification(b"t", b"early")


def test_pull_reader_follows_its_topic(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(freud_client.subscribe(b"t"))
    bus.settle()
    assert commit_directly(bus, topic.number) == 1
    client.hang_up()
    bus.settle()


# follow: add; unfollow: end the oldest; commit: of both topics
ACTIONS = st.lists(st.tuples(st.sampled_from(("follow", "end", "commit")), st.integers(0, 1)))


@given(ACTIONS)
def test_no_commit_is_lost_between_two_followers(actions: list[tuple[str, int]]):
    """A follower is notified of a commit, or the next follower is asked to read once."""
    followed = FollowedTopics(lambda number: True)
    count, left_out = [0, 0], [False, False]
    for action, number in actions:
        if action == "follow":
            assert followed.follow(number) == left_out[number]
            count[number], left_out[number] = count[number] + 1, False
        elif action == "end" and count[number]:
            followed.unfollow(number)
            count[number] -= 1
        elif action == "commit":
            assert followed.select((0, 1)) == {n for n in (0, 1) if count[n]}
            left_out = [is_out or not count[n] for n, is_out in enumerate(left_out)]


def test_removed_topics_leave_nothing_behind():
    registered = {1}
    followed = FollowedTopics(registered.__contains__)
    assert followed.select((1,)) == set()
    registered.clear()
    followed.forget(1)
    assert followed.select((1,)) == set()  # a notice that comes late
    assert not followed.follow(1)
