"""After a restart every answered change is durable, and members keep their epochs."""

from __future__ import annotations

import pytest

from polybus.errors import Damaged, Expired, Fenced, StoreFull, Unavailable
from polybus.groups import shard_progress
from polybus.groups.group_records import decode_progress
from polybus.model.commit import Commit, RecordChange
from polybus.store.engine_registry import open_store
from tests.unit.groups.group_harness import GroupHarness


@pytest.fixture(params=["memory", "lmdb"])
def harness(request, tmp_path):
    url = "memory:" if request.param == "memory" else f"lmdb:{tmp_path}"
    with open_store(url) as store:
        yield GroupHarness(store)


def test_members_keep_their_epochs_after_a_restart(harness):
    harness.produce(10)
    one, two = harness.join("a"), harness.join("b")
    one.release_all()
    one.fetch()
    one.ack(0, (0, 3), (5, 6))
    one.fail(0, 4)
    before = harness.info()
    harness.open()
    assert harness.info() == before
    assert one.beat() == ([], [0, 1])
    assert two.beat() == ([], [2, 3])
    assert one.ack(0, (3, 5))["low"] == 6
    assert not one.fetch()


def test_every_member_has_a_new_deadline_after_a_restart(harness):
    one = harness.join("a")
    harness.join("b")
    harness.now += 60
    harness.open()
    harness.groups.tick()
    harness.now += 4
    one.beat()
    harness.groups.tick()
    harness.now += 2
    harness.groups.tick()
    assert [member["consumer"] for member in harness.info()["members"]] == ["a"]
    assert one.owns == [0, 1, 2, 3]


def test_offsets_handed_out_before_a_restart_are_suspect(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch((4, 1 << 20))
    harness.open()
    harness.groups.tick()
    harness.now += 6
    harness.groups.tick()
    assert harness.shard(0)["suspect_to"] == 10
    with pytest.raises(Expired):
        one.beat()


def test_suspect_offsets_after_a_restart_are_limited(harness, monkeypatch):
    monkeypatch.setattr(shard_progress, "MAX_SUSPECT_ROWS", 3)
    harness.produce(10)
    one = harness.join("a")
    one.fetch((4, 1 << 20))
    one.ack(0, (0, 1), (2, 3))
    harness.open()
    harness.groups.tick()
    harness.now += 6
    harness.groups.tick()
    assert harness.shard(0)["suspect_to"] == 6


def test_fetch_after_a_restart_reports_the_position(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch((4, 1 << 20))
    harness.open()
    one.look((0, 1))
    harness.now += 6
    harness.groups.tick()
    assert harness.shard(0)["suspect_to"] == 4


def test_pending_release_continues_after_a_restart(harness):
    one, two = harness.join("a"), harness.join("b")
    one.fetch()
    harness.open()
    assert one.beat() == ([], [0, 1, 2, 3])  # unknown until the first tick
    harness.groups.tick()
    assert one.beat() == ([2, 3], [0, 1, 2, 3])
    one.release_all()
    assert two.owns == [2, 3]


def test_unowned_shards_are_assigned_after_a_restart(harness):
    one, two = harness.join("a"), harness.join("b")
    one.fetch()
    harness.groups._registry.get(
        harness.topic(), "g"
    ).target.clear()  # as if the assignment were unknown
    harness.groups._membership.rebalance = lambda group: None
    one.ack(3, release=True)
    assert two.owns == []
    harness.open()
    harness.groups.tick()
    assert two.owns == [3]


def test_ack_of_a_record_that_was_changed_elsewhere_is_refused(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    first = harness.groups
    harness.open()  # a second coordinator on the same store
    one.ack(0, (0, 4))
    with pytest.raises(Unavailable, match="retry"):
        first.ack(*one.who, [one.entry(0, (6, 7))])
    progress = decode_progress(harness.store.scan(b"groupshard/")[0].value)
    assert (progress.low, progress.ranges) == (4, ())  # as the second has written it
    # The refused coordinator has read the record again, so a retry succeeds.
    (response,) = first.ack(*one.who, [one.entry(0, (6, 7))])
    assert (response["low"], response["error"]) == (4, None)
    harness.open()
    assert harness.shard(0)["acked"] == 5


def test_fenced_member_stays_fenced_after_a_restart(harness):
    old = harness.join("a")
    harness.join("a")
    harness.open()
    with pytest.raises(Fenced):
        old.beat()


def test_counts_are_exact_after_a_clean_stop(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 4), emitted=5, redelivered=1)
    one.ack(0, (0, 4), emitted=5, redelivered=1)  # created again
    assert harness.shard(0)["emitted"] == 5
    one.ack(0, emitted=7, redelivered=2)
    assert (harness.shard(0)["emitted"], harness.shard(0)["redelivered"]) == (7, 2)
    one.leave(one.entry(0, (4, 5), emitted=8, redelivered=2))
    harness.open()
    assert (harness.shard(0)["emitted"], harness.shard(0)["redelivered"]) == (8, 2)
    two = harness.join("b")
    two.fetch()
    two.ack(0, (5, 6), emitted=1)
    harness.open()
    assert harness.shard(0)["emitted"] == 9


def test_delayed_report_does_not_lower_the_counts(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 4), emitted=5, redelivered=2)
    one.ack(0, (4, 5), emitted=3, redelivered=1)
    assert (harness.shard(0)["emitted"], harness.shard(0)["redelivered"]) == (5, 2)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_counts_without_an_ack_survive_a_restart(harness, is_stopped):
    """As after transactions, whose acks are commits of their own."""
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 4), emitted=4)
    one.ack(0, emitted=6, redelivered=2)
    if is_stopped:
        harness.groups.stop()
    harness.open()
    assert (harness.shard(0)["emitted"], harness.shard(0)["redelivered"]) == (6, 2)
    one.leave(one.entry(0, emitted=7, redelivered=2))
    assert (harness.shard(0)["emitted"], harness.shard(0)["redelivered"]) == (7, 2)


@pytest.mark.parametrize("prefix", [b"group/", b"groupshard/"])
def test_damaged_record_affects_only_its_group(harness, prefix):
    harness.join("a", group="bad")
    good = harness.join("a", group="good")
    record = harness.store.scan(prefix)[0]
    harness.store.commit(Commit(changes=(RecordChange(record.key, b"{"),))).result()
    harness.open()
    harness.groups.tick()
    good.beat()
    with pytest.raises(Damaged):
        harness.join("a", group="bad")
    assert harness.groups.names(harness.topic()) == ["bad", "good"]


def test_interrupted_removal_reuses_no_epoch(harness, monkeypatch):
    from polybus.groups import group_registry

    zombie = harness.join("a")
    zombie.fetch()
    zombie.leave()
    monkeypatch.setattr(group_registry, "MAX_RECORDS_PER_COMMIT", 2)  # the mark and 1 of 4 shards
    real, left = harness.store.commit, [1]

    def commit(asked):
        left[0] -= 1
        if left[0] < 0:
            raise StoreFull("no room")
        return real(asked)

    with monkeypatch.context() as patch:
        patch.setattr(harness.store, "commit", commit)
        with pytest.raises(StoreFull):
            harness.groups.remove(harness.topic(), "g")
    harness.open()
    again = harness.join("a")
    again.fetch()
    assert again.epoch > zombie.epoch
    assert all(again.held[n].epoch > held.epoch for n, held in zombie.held.items())


@pytest.mark.parametrize("left", [True, False])
def test_groups_of_topics_dropped_meanwhile_are_removed(harness, left):
    harness.join("a", group="h")
    harness.groups.remove(harness.topic(), "h", force=True)
    if left:
        harness.join("a")
    assert list(harness.store.scan(b"group"))
    harness.store.drop("t")
    harness.open()
    harness.groups.tick()
    assert list(harness.store.scan(b"group")) == []
