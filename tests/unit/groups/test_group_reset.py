"""Groups that are moved and removed, and topics that go from under them."""

from __future__ import annotations

import pytest

from polybus.errors import Conflict, DoesNotExist, Expired, Fenced, MalformedRequest
from polybus.groups.shard_progress import FailureReport


def lows(desk) -> list[int]:
    return [one["low"] for one in desk.info()["shards"]]


def used(desk):
    for shard in range(4):
        desk.produce(10, shard=shard)
    one = desk.join("a")
    one.fetch()
    one.ack(0, (0, 5), (7, 8), failed=(FailureReport(6),), emitted=6)
    return one


def test_reset_clears_progress(desk):
    one = used(desk)
    one.leave(one.entry(0, emitted=6))
    desk.groups.reset(desk.topic(), "g", "earliest")
    shard = desk.shard(0)
    assert lows(desk) == [0, 0, 0, 0]
    assert (shard["acked"], shard["ranges"], shard["attempts"]) == (0, 0, 0)
    assert (shard["emitted"], shard["lag"]) == (6, 10)
    desk.groups.reset(desk.topic(), "g", "latest")
    assert lows(desk) == [10, 10, 10, 10]
    assert desk.shard(0)["acked"] == 0


def test_reset_positions(desk):
    used(desk).leave()
    topic = desk.topic()
    moved = desk.groups.reset(topic, "g", {"offsets": {"1": 4, "2": 99}})
    assert moved == {1: 4, 2: 10}
    assert lows(desk) == [5, 4, 10, 0]
    desk.groups.reset(topic, "g", {"id": 15})  # the fifth of shard 1
    assert lows(desk) == [10, 4, 0, 0]
    desk.groups.reset(topic, "g", {"id": 1 << 40})
    assert lows(desk) == [10, 10, 10, 10]
    desk.groups.reset(topic, "g", {"time_ns": 0})
    assert lows(desk) == [0, 0, 0, 0]
    rows = desk.store.read(topic.number, 2, 0, 1)
    desk.groups.reset(topic, "g", {"time_ns": int.from_bytes(rows.timestamps_ns, "little")})
    assert lows(desk)[2:] == [0, 0]
    desk.store.trim(topic.number, {3: 6})
    assert desk.groups.reset(topic, "g", {"offsets": {"3": 1}}) == {3: 6}


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
def test_invalid_reset_positions_are_refused(desk, to):
    used(desk).leave()
    with pytest.raises(MalformedRequest):
        desk.groups.reset(desk.topic(), "g", to)
    assert lows(desk) == [5, 0, 0, 0]


def test_group_with_members_is_reset_only_by_force(desk):
    one = used(desk)
    with pytest.raises(Conflict):
        desk.groups.reset(desk.topic(), "g", "earliest")
    assert lows(desk)[0] == 5
    desk.groups.reset(desk.topic(), "g", "earliest", force=True)
    assert one.ack(0, (5, 6))["error"]["code"] == "fenced"
    found = one.fetch()
    assert found.lost == [0, 1, 2, 3]
    assert one.rows[0] == list(range(10))
    assert one.ack(0, (0, 10), emitted=10)["low"] == 10
    assert desk.shard(0)["emitted"] == 16


def test_a_group_is_removed_with_its_records(desk):
    one = used(desk)
    with pytest.raises(Conflict):
        desk.groups.remove(desk.topic(), "g")
    desk.groups.remove(desk.topic(), "g", force=True)
    assert list(desk.store.scan(b"group/") + desk.store.scan(b"groupshard/")) == []
    for call in (one.beat, one.look, lambda: one.ack(0, (5, 6))):
        with pytest.raises(Expired):
            call()
    for call in (desk.info, lambda: desk.groups.remove(desk.topic(), "g")):
        with pytest.raises(DoesNotExist):
            call()
    assert desk.groups.summarize(desk.topic(), "g") is None
    again = desk.join("a")
    again.fetch()
    assert again.rows[0] == list(range(10))


def test_member_of_a_removed_group_has_no_epoch_in_the_next(desk):
    zombie = used(desk)
    one = desk.join("b")
    zombie.release_all()
    one.release_all()  # epochs of some shards have risen
    for _ in range(2):
        desk.groups.remove(desk.topic(), "g", force=True)
        again = desk.join("a")
        again.fetch()
        assert again.epoch > zombie.epoch
        assert all(again.held[n].epoch > held.epoch for n, held in zombie.held.items())
        with pytest.raises(Fenced):
            zombie.ack(0, (0, 9))
        zombie = again
    assert desk.join("a", group="other").epoch > 1  # one mark for all groups of the topic


def test_dropping_a_topic_removes_its_groups(desk):
    one = used(desk)
    desk.join("a", group="h")
    desk.join("a", group="i")
    desk.groups.remove(desk.topic(), "i", force=True)
    topic = desk.topic()
    desk.store.drop("t")
    desk.durable.forget(topic)
    desk.woken.clear()
    desk.groups.drop(topic)
    assert desk.woken == [topic.number]
    with pytest.raises(Expired):
        desk.groups.heartbeat(topic, "g", "a", one.epoch, {})
    desk.groups.tick()
    assert list(desk.store.scan(b"group")) == []
    assert desk.groups.names(topic) == []
    assert desk.join("a").owns == [0, 1, 2, 3]  # of the new topic of this name


def test_removal_of_dropped_topics_is_retried(desk, monkeypatch):
    from polybus.errors import StoreFull

    desk.join("a")
    topic = desk.topic()
    desk.store.drop("t")
    desk.groups.drop(topic)

    def full(commit):
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "commit", full)
        with pytest.raises(StoreFull):
            desk.groups.tick()
    assert list(desk.store.scan(b"group"))
    desk.groups.tick()
    assert list(desk.store.scan(b"group")) == []
