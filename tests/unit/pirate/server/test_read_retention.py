"""Retention trims messages that every reader has read, and no others."""

from __future__ import annotations

import pytest

from polybus.groups import group_records as groups
from polybus.groups.group_records import ShardProgress
from polybus.model.commit import Commit, RecordChange
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


def group(world: MemorySubscribers, topic: str, name: str, lows: dict[int, int]) -> None:
    """Create a group with these low marks by shard."""
    number = world.durable.get(topic).number
    changes = [RecordChange(groups.roster_key(number, name), b"{}")]
    for shard, low in lows.items():
        value = groups.encode_progress(ShardProgress(low=low))
        changes.append(RecordChange(groups.shard_key(number, name, shard), value))
    world.store.commit(Commit(changes=tuple(changes))).result(20)


def test_messages_read_by_every_subscriber_are_trimmed(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    second.sub("t")
    for _ in range(6):
        first.put("t")
    first.get("t", 4)
    world.collect()
    assert world.bodies("t") == [1, 2, 3, 4, 5, 6]
    second.get("t", 2)
    world.collect()
    assert world.bodies("t") == [3, 4, 5, 6]
    second.get("t", 6)
    first.get("t", 6)
    world.collect()
    assert world.bodies("t") == []
    assert world.bus.stats()["collected"] == 6
    assert first.put("t") == 7


def test_unsubscribed_client_holds_back_no_messages(world):
    first, second = world.client(b"a"), world.client(b"b")
    first.sub("t")
    second.sub("t")
    for _ in range(3):
        first.put("t")
    first.get("t", 3)
    second.unsub("t")
    world.collect()
    assert world.bodies("t") == []


def test_retention_continues_after_a_restart(world):
    client = world.client()
    client.sub("t")
    for _ in range(3):
        client.put("t")
    client.get("t", 2)
    again = world.again()
    again.collect()
    assert again.bodies("t") == [3]


@pytest.mark.parametrize("shards", [1, 5])
def test_messages_unread_by_a_group_are_kept(world, shards):
    world.store.create("t", shards, {"keep": "read"})
    world = world.again()
    client = world.client()
    client.sub("t")
    for _ in range(30):
        client.put("t")
    group(world, "t", "g", {})
    client.get("t", 30)
    world.collect()
    assert len(world.bodies("t")) == 30, "a group without progress in a shard has read none of it"
    bounds = world.store.bounds(world.durable.get("t").number).shards
    group(world, "t", "g", {number: one.end - 1 for number, one in enumerate(bounds)})
    world.collect()
    assert len(world.bodies("t")) == shards
    group(world, "t", "g", {number: one.end for number, one in enumerate(bounds)})
    world.collect()
    assert world.bodies("t") == []


@pytest.mark.parametrize("shards", [1, 2, 7])
@pytest.mark.parametrize("read", [0, 1, 13, 39, 40])
def test_trim_offset_is_correct_in_every_shard(world, shards, read):
    world.store.create("t", shards, {"keep": "read"})
    world = world.again()
    client = world.client()
    client.sub("t")
    for _ in range(40):
        client.put("t")
    client.get("t", read)
    world.collect()
    assert world.bodies("t") == list(range(read + 1, 41))


def test_offsets_may_differ_from_ids(world):
    """The ids of a name that had more shards before are ahead of its offsets."""
    world.store.create("t", 4, {"keep": "read"})
    before = world.again()
    writer = before.client()
    writer.sub("t")
    for _ in range(10):
        writer.put("t")
    world.store.drop("t")
    world = before.again()
    client = world.client(b"other")
    assert client.sub("t") == 10
    for _ in range(4):
        client.put("t")
    client.get("t", 12)
    world.collect()
    assert world.bodies("t") == [13, 14]


def test_topic_without_keep_read_is_not_trimmed(world):
    world.store.create("t", 1, {})
    world = world.again()
    client = world.client()
    client.sub("t")
    client.put("t")
    client.get("t", 1)
    world.collect()
    assert world.bodies("t") == [1]


def test_topic_without_readers_keeps_all_until_a_group_reads_it(world):
    world.store.create("t", 1, {"keep": "read"})
    world = world.again()
    client = world.client()
    for _ in range(4):
        client.put("t")
    world.collect()
    assert world.bodies("t") == [1, 2, 3, 4]
    group(world, "t", "g", {0: 3})
    world.collect()
    assert world.bodies("t") == [4]


def test_topic_dropped_during_retention_does_not_stop_others(world):
    client = world.client()
    client.sub("t")
    client.sub("u")
    for topic in ("t", "u"):
        client.put(topic)
        client.get(topic, 1)
    world.store.drop("t")
    world.collect()
    assert world.bodies("u") == []


def test_failed_trim_is_retried(world, monkeypatch):
    client = world.client()
    client.sub("t")
    client.put("t")
    client.get("t", 1)

    def fails(*_: object) -> None:
        raise OSError("no disk")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "trim", fails)
        world.collect()
    assert world.bodies("t") == [1]
    world.collect()
    assert world.bodies("t") == []


@pytest.mark.parametrize("keep", ["all", "read"])
def test_round_begins_only_if_a_topic_keeps_messages_until_they_are_read(world, keep):
    world.store.create("t", 1, {"keep": keep})
    again = world.again()
    again.now_s += 1
    again.bus.tick(again.now_s)
    assert bool(again._steps) == (keep == "read")  # the result of a thread's work
