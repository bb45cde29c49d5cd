"""Consumers of one topic: members of a group share it, groups are independent."""

import threading
from typing import Any

from tests.interop.consumers.consumer_fixture import (
    Seen,
    acked,
    fdq_bus,
    numbered,
    produce,
    spread,
    total,
    unhurried,
)
from tests.rig.observer import until


def test_two_consumers_share_shards_and_drain_before_release(url, topic):
    """The first consumer runs a message of every shard when the second one joins."""
    running, overlaps, seen = set(), [], Seen()
    lock = threading.Lock()

    def handle(envelope):
        with lock:
            if envelope.shard_key in running:
                overlaps.append(envelope)
            running.add(envelope.shard_key)
        threading.Event().wait(0.002)
        with lock:
            running.discard(envelope.shard_key)
            seen(envelope)

    produce(url, topic, *numbered(1200, keys=40))
    settings: dict[str, Any] = {"executors": 4}
    with unhurried(url) as one, unhurried(url) as two:
        one.consume(topic, "one", handle, **settings)
        until(lambda: len(seen) > 100, "one is at work")
        two.consume(topic, "two", handle, **settings)
        until(lambda: spread(url, topic) == [8, 8], "shards are shared evenly")
        until(lambda: len(seen) >= 1200, "all is done")
    assert not overlaps
    numbers = [int(one.message) for one in seen]
    assert sorted(numbers) == list(range(1200)), "nothing is lost, and nothing comes twice"
    for key in {one.shard_key for one in seen}:
        mine = [int(one.message) for one in seen if one.shard_key == key]
        assert mine == sorted(mine)
    assert (acked(url, topic), total(url, topic, "emitted")) == (1200, 1200)


def test_groups_are_independent(url, topic, consumer):
    produce(url, topic, *numbered(20))
    one, two = Seen(), Seen()
    consumer.consume(topic, "same", one, group="first")
    consumer.consume(topic, "same", two, group="second")
    until(lambda: len(one) == len(two) == 20, "each gets all")


def test_more_shards_than_one_call_takes(url, topic, consumer):
    with fdq_bus(url) as bus:
        bus.act("topic.create", topic=topic, shards=300)
    produce(url, topic, *numbered(900, keys=900))
    seen = Seen()
    consumer.consume(topic, "one", seen)
    until(lambda: len(seen) == 900, "all")
    consumer.close()
    assert (acked(url, topic), total(url, topic, "emitted")) == (900, 900)
