"""The bus starts again: all that was answered holds, and members go on with their epochs."""

from __future__ import annotations

import pytest

from polybus.errors import Damaged, Expired, Fenced, StoreFull
from polybus.groups import shard_progress
from polybus.model.commit import Commit, RecordChange
from polybus.store.engine_registry import open_store
from tests.unit.groups.group_fixture import Desk


@pytest.fixture(params=["memory", "lmdb"])
def desk(request, tmp_path):
    url = "memory:" if request.param == "memory" else f"lmdb:{tmp_path}"
    with open_store(url) as store:
        yield Desk(store)


def test_members_keep_their_epochs_after_a_restart(desk):
    desk.produce(10)
    one, two = desk.join("a"), desk.join("b")
    one.release_all()
    one.fetch()
    one.ack(0, (0, 3), (5, 6))
    one.fail(0, 4)
    before = desk.info()
    desk.open()
    assert desk.info() == before
    assert one.beat() == ([], [0, 1])
    assert two.beat() == ([], [2, 3])
    assert one.ack(0, (3, 5))["low"] == 6
    assert not one.fetch()


def test_every_member_has_a_new_deadline_after_a_restart(desk):
    one = desk.join("a")
    desk.join("b")
    desk.now += 60
    desk.open()
    desk.groups.tick()
    desk.now += 4
    one.beat()
    desk.groups.tick()
    desk.now += 2
    desk.groups.tick()
    assert [member["consumer"] for member in desk.info()["members"]] == ["a"]
    assert one.owns == [0, 1, 2, 3]


def test_offsets_handed_out_before_a_restart_are_suspect(desk):
    desk.produce(10)
    one = desk.join("a")
    one.fetch((4, 1 << 20))
    desk.open()
    desk.groups.tick()
    desk.now += 6
    desk.groups.tick()
    assert desk.shard(0)["suspect_to"] == 10
    with pytest.raises(Expired):
        one.beat()


def test_suspect_offsets_after_a_restart_are_limited(desk, monkeypatch):
    monkeypatch.setattr(shard_progress, "MAX_SUSPECT_ROWS", 3)
    desk.produce(10)
    one = desk.join("a")
    one.fetch((4, 1 << 20))
    one.ack(0, (0, 1), (2, 3))
    desk.open()
    desk.groups.tick()
    desk.now += 6
    desk.groups.tick()
    assert desk.shard(0)["suspect_to"] == 6


def test_fetch_after_a_restart_reports_the_position(desk):
    desk.produce(10)
    one = desk.join("a")
    one.fetch((4, 1 << 20))
    desk.open()
    one.look((0, 1))
    desk.now += 6
    desk.groups.tick()
    assert desk.shard(0)["suspect_to"] == 4


def test_pending_release_continues_after_a_restart(desk):
    one, two = desk.join("a"), desk.join("b")
    one.fetch()
    desk.open()
    assert one.beat() == ([], [0, 1, 2, 3])  # until the first tick nothing is known of it
    desk.groups.tick()
    assert one.beat() == ([2, 3], [0, 1, 2, 3])
    one.release_all()
    assert two.owns == [2, 3]


def test_unowned_shards_are_assigned_after_a_restart(desk):
    one, two = desk.join("a"), desk.join("b")
    one.fetch()
    desk.groups._registry.get(desk.topic(), "g").target.clear()  # as if nobody knew whose it is
    desk.groups._membership.rebalance = lambda group: None
    one.ack(3, release=True)
    assert two.owns == []
    desk.open()
    desk.groups.tick()
    assert two.owns == [3]


def test_fenced_member_stays_fenced_after_a_restart(desk):
    old = desk.join("a")
    desk.join("a")
    desk.open()
    with pytest.raises(Fenced):
        old.beat()


def test_counts_are_exact_after_a_clean_stop(desk):
    desk.produce(10)
    one = desk.join("a")
    one.fetch()
    one.ack(0, (0, 4), emitted=5, redelivered=1)
    one.ack(0, (0, 4), emitted=5, redelivered=1)  # made again
    assert desk.shard(0)["emitted"] == 5
    one.ack(0, emitted=7, redelivered=2)  # nothing to write: with the next
    assert (desk.shard(0)["emitted"], desk.shard(0)["redelivered"]) == (7, 2)
    one.leave(one.entry(0, (4, 5), emitted=8, redelivered=2))
    desk.open()
    assert (desk.shard(0)["emitted"], desk.shard(0)["redelivered"]) == (8, 2)
    two = desk.join("b")
    two.fetch()
    two.ack(0, (5, 6), emitted=1)
    desk.open()
    assert desk.shard(0)["emitted"] == 9


def test_counts_without_an_ack_are_written_at_stop(desk):
    """As behind transactions, whose acks are commits of their own."""
    desk.produce(10)
    one = desk.join("a")
    one.fetch()
    one.ack(0, (0, 4), emitted=4)
    one.ack(0, emitted=6, redelivered=2)
    desk.groups.stop()
    desk.open()
    assert (desk.shard(0)["emitted"], desk.shard(0)["redelivered"]) == (6, 2)
    one.leave(one.entry(0, emitted=7, redelivered=2))
    assert (desk.shard(0)["emitted"], desk.shard(0)["redelivered"]) == (7, 2)


@pytest.mark.parametrize("prefix", [b"group/", b"groupshard/"])
def test_damaged_record_affects_only_its_group(desk, prefix):
    desk.join("a", group="bad")
    good = desk.join("a", group="good")
    record = desk.store.scan(prefix)[0]
    desk.store.commit(Commit(changes=(RecordChange(record.key, b"{"),))).result()
    desk.open()
    desk.groups.tick()
    good.beat()
    with pytest.raises(Damaged):
        desk.join("a", group="bad")
    assert desk.groups.names(desk.topic()) == ["bad", "good"]


def test_interrupted_removal_reuses_no_epoch(desk, monkeypatch):
    from polybus.groups import group_registry

    zombie = desk.join("a")
    zombie.fetch()
    zombie.leave()
    monkeypatch.setattr(
        group_registry, "MAX_RECORDS_PER_COMMIT", 2
    )  # the mark, and one of four shards
    real, left = desk.store.commit, [1]

    def commit(asked):
        left[0] -= 1
        if left[0] < 0:
            raise StoreFull("no room")
        return real(asked)

    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "commit", commit)
        with pytest.raises(StoreFull):
            desk.groups.remove(desk.topic(), "g")
    desk.open()
    again = desk.join("a")
    again.fetch()
    assert again.epoch > zombie.epoch
    assert all(again.held[n].epoch > held.epoch for n, held in zombie.held.items())


@pytest.mark.parametrize("left", [True, False])
def test_groups_of_topics_dropped_meanwhile_are_removed(desk, left):
    desk.join("a", group="h")
    desk.groups.remove(desk.topic(), "h", force=True)
    if left:
        desk.join("a")
    assert list(desk.store.scan(b"group"))
    desk.store.drop("t")
    desk.open()
    desk.groups.tick()
    assert list(desk.store.scan(b"group")) == []
