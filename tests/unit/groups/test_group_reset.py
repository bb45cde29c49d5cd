"""Reset and removal of groups, and groups of dropped topics."""

from __future__ import annotations

import pytest

from polybus.errors import Conflict, DoesNotExist, Expired, Fenced, MalformedRequest
from polybus.groups.shard_progress import FailureReport


def lows(harness) -> list[int]:
    return [one["low"] for one in harness.info()["shards"]]


def used(harness):
    for shard in range(4):
        harness.produce(10, shard=shard)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 5), (7, 8), failed=(FailureReport(6),), emitted=6)
    return one


def test_reset_clears_progress(harness):
    one = used(harness)
    one.leave(one.entry(0, emitted=6))
    harness.groups.reset(harness.topic(), "g", "earliest")
    shard = harness.shard(0)
    assert lows(harness) == [0, 0, 0, 0]
    assert (shard["acked"], shard["ranges"], shard["attempts"]) == (0, 0, 0)
    assert (shard["emitted"], shard["lag"]) == (6, 10)
    harness.groups.reset(harness.topic(), "g", "latest")
    assert lows(harness) == [10, 10, 10, 10]
    assert harness.shard(0)["acked"] == 0


def test_reset_positions(harness):
    used(harness).leave()
    topic = harness.topic()
    moved = harness.groups.reset(topic, "g", {"offsets": {"1": 4, "2": 99}})
    assert moved == {1: 4, 2: 10}
    assert lows(harness) == [5, 4, 10, 0]
    harness.groups.reset(topic, "g", {"id": 15})  # the fifth message of shard 1
    assert lows(harness) == [10, 4, 0, 0]
    harness.groups.reset(topic, "g", {"id": 1 << 40})
    assert lows(harness) == [10, 10, 10, 10]
    harness.groups.reset(topic, "g", {"time_ns": 0})
    assert lows(harness) == [0, 0, 0, 0]
    rows = harness.store.read(topic.number, 2, 0, 1)
    harness.groups.reset(topic, "g", {"time_ns": int.from_bytes(rows.timestamps_ns, "little")})
    assert lows(harness)[2:] == [0, 0]
    harness.store.trim(topic.number, {3: 6})
    assert harness.groups.reset(topic, "g", {"offsets": {"3": 1}}) == {3: 6}


@pytest.mark.parametrize(
    "to",
    [
        "now",
        {},
        {"id": -1},
        {"id": True},
        {"id": 1, "time_ns": 1},
        {"offsets": {"9": 1}},
        {"offsets": {"x": 1}},
        {"offsets": {"0": -1}},
        {"offsets": []},
        {"when": 1},
    ],
)
def test_invalid_reset_positions_are_refused(harness, to):
    used(harness).leave()
    with pytest.raises(MalformedRequest):
        harness.groups.reset(harness.topic(), "g", to)
    assert lows(harness) == [5, 0, 0, 0]


def test_group_with_members_is_reset_only_by_force(harness):
    one = used(harness)
    with pytest.raises(Conflict):
        harness.groups.reset(harness.topic(), "g", "earliest")
    assert lows(harness)[0] == 5
    harness.groups.reset(harness.topic(), "g", "earliest", force=True)
    assert one.ack(0, (5, 6))["error"]["code"] == "fenced"
    result = one.fetch()
    assert result.lost == [0, 1, 2, 3]
    assert one.rows[0] == list(range(10))
    assert one.ack(0, (0, 10), emitted=10)["low"] == 10
    assert harness.shard(0)["emitted"] == 16


def test_a_group_is_removed_with_its_records(harness):
    one = used(harness)
    with pytest.raises(Conflict):
        harness.groups.remove(harness.topic(), "g")
    harness.groups.remove(harness.topic(), "g", force=True)
    assert list(harness.store.scan(b"group/") + harness.store.scan(b"groupshard/")) == []
    for call in (one.beat, one.look, lambda: one.ack(0, (5, 6))):
        with pytest.raises(Expired):
            call()
    for call in (harness.info, lambda: harness.groups.remove(harness.topic(), "g")):
        with pytest.raises(DoesNotExist):
            call()
    assert harness.groups.summarize(harness.topic(), "g") is None
    again = harness.join("a")
    again.fetch()
    assert again.rows[0] == list(range(10))


def test_member_of_a_removed_group_has_no_epoch_in_the_next(harness):
    zombie = used(harness)
    one = harness.join("b")
    zombie.release_all()
    one.release_all()  # epochs of some shards have risen
    for _ in range(2):
        harness.groups.remove(harness.topic(), "g", force=True)
        again = harness.join("a")
        again.fetch()
        assert again.epoch > zombie.epoch
        assert all(again.held[n].epoch > held.epoch for n, held in zombie.held.items())
        with pytest.raises(Fenced):
            zombie.ack(0, (0, 9))
        zombie = again
    assert harness.join("a", group="other").epoch > 1  # one mark for all groups of the topic


def test_dropping_a_topic_removes_its_groups(harness):
    one = used(harness)
    harness.join("a", group="h")
    harness.join("a", group="i")
    harness.groups.remove(harness.topic(), "i", force=True)
    topic = harness.topic()
    harness.store.drop("t")
    harness.durable.forget(topic)
    harness.woken.clear()
    harness.groups.drop(topic)
    assert harness.woken == [topic.number]
    with pytest.raises(Expired):
        harness.groups.heartbeat(topic, "g", "a", one.epoch, {})
    harness.groups.tick()
    assert list(harness.store.scan(b"group")) == []
    assert harness.groups.names(topic) == []
    assert harness.join("a").owns == [0, 1, 2, 3]  # of the recreated topic


def test_removal_of_dropped_topics_is_retried(harness, monkeypatch, caplog):
    from polybus.errors import StoreFull

    harness.join("a")
    topic = harness.topic()
    harness.store.drop("t")
    harness.groups.drop(topic)

    def full(commit):
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(harness.store, "commit", full)
        harness.groups.tick()
    assert "not removed: no room" in caplog.text
    assert list(harness.store.scan(b"group"))
    harness.groups.tick()
    assert list(harness.store.scan(b"group")) == []
