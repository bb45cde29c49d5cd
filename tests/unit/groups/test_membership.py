"""Join, leave and expiry: shards change owners, and only the owner can ack."""

from __future__ import annotations

import pytest

from polybus.errors import Expired, Fenced, LimitReached
from polybus.store.engine_registry import open_store
from tests.unit.groups.group_harness import GroupHarness


def test_first_member_owns_all_shards(harness):
    one = harness.join("a")
    assert one.owns == [0, 1, 2, 3]
    assert [shard["epoch"] for shard in harness.info()["shards"]] == [1, 1, 1, 1]
    result = one.fetch()
    assert [assignment["shard"] for assignment in result.assigned] == [0, 1, 2, 3]
    assert not one.fetch()


def test_shard_moves_after_its_owner_has_released_it(harness):
    one, two = harness.join("a"), harness.join("b")
    assert one.owns == [0, 1, 2, 3]
    assert one.fetch().release == [2, 3]
    assert one.beat() == ([2, 3], [0, 1, 2, 3])
    assert not two.fetch()
    assert one.ack(3, release=True)["error"] is None
    assert (one.owns, two.owns) == ([0, 1, 2], [3])
    assert harness.shard(3)["epoch"] == 2
    assert [assignment["shard"] for assignment in two.fetch().assigned] == [3]
    assert one.fetch().lost == [3]
    one.release_all()
    assert (one.owns, two.owns) == ([0, 1], [2, 3])
    assert one.beat()[0] == []


def test_shard_moves_in_the_commit_of_its_last_ack(harness, monkeypatch):
    harness.produce(5, shard=3)
    one, two = harness.join("a"), harness.join("b")
    one.fetch()
    commits = []
    real = harness.store.commit
    monkeypatch.setattr(harness.store, "commit", lambda asked: commits.append(asked) or real(asked))
    one.ack(3, (0, 2), emitted=2, release=True)
    assert len(commits) == 1
    assignment = two.fetch().assigned[0]
    assert (assignment["shard"], assignment["low"], assignment["epoch"]) == (3, 2, 2)
    two.ack(3, (2, 3), emitted=1)
    assert harness.shard(3)["emitted"] == 3


def test_shard_released_to_a_gone_member_goes_to_another(harness):
    one, two = harness.join("a"), harness.join("b")
    one.fetch()
    two.leave()
    one.ack(3, release=True)  # it did not know yet that it keeps the shard
    assert one.owns == [0, 1, 2, 3]
    assert harness.shard(3)["epoch"] == 2


def test_shard_about_to_move_keeps_its_target(harness):
    one, two = harness.join("b"), harness.join("a")
    three = harness.join("c")  # while `b` still owns all shards, two of them for `a`
    one.fetch()
    one.release_all()
    assert (one.owns, two.owns, three.owns) == ([0], [2, 3], [1])


def test_known_release_is_not_reported_again(harness):
    one, _ = harness.join("a"), harness.join("b")
    assert one.fetch()
    assert one.fetch()  # it has not confirmed the release
    for number in (2, 3):
        one.held[number] = one.held[number]._replace(releasing=True)
    result = one.fetch()
    assert not result
    assert result.release == [2, 3]


def test_releasing_shard_has_no_rows(harness):
    one = harness.join("a")
    one.fetch()
    harness.join("b")
    harness.produce(2, shard=0)
    harness.produce(2, shard=3)
    assert [place["shard"] for place in one.fetch().places] == [0]


def test_shards_of_a_leaving_member_move_at_once_and_are_not_suspect(harness):
    one, two = harness.join("a"), harness.join("b")
    one.release_all()
    harness.produce(5, shard=0)
    one.fetch()
    one.leave(one.entry(0, (0, 2)))
    assert two.owns == [0, 1, 2, 3]
    assert harness.shard(0)["low"] == 2
    assert harness.shard(0)["suspect_to"] == 0
    with pytest.raises(Expired):
        one.beat()
    two.leave()
    assert [shard["owner"] for shard in harness.info()["shards"]] == [None] * 4
    assert harness.info()["members"] == []


def test_newer_consumer_of_the_same_name_fences_the_older(harness):
    old = harness.join("a")
    harness.produce(3)
    old.fetch()
    new = harness.join("a")
    assert new.epoch > old.epoch
    for call in (old.beat, old.fetch, old.leave, lambda: old.ack(0, (0, 1))):
        with pytest.raises(Fenced) as caught:
            call()
        assert not isinstance(caught.value, Expired)
    assert new.owns == [0, 1, 2, 3]
    result = new.fetch()
    assert result.assigned[0]["low"] == 0
    assert result.assigned[0]["suspect_to"] == 3
    assert harness.shard(0)["epoch"] == 2


def test_ack_with_an_old_shard_epoch_is_refused_alone(harness):
    one = harness.join("a")
    harness.produce(3, shard=0)
    harness.produce(3, shard=1)
    one.fetch()
    first, second = one.ack_all(one.entry(0, (0, 3), epoch=0), one.entry(1, (0, 3)))
    assert first["error"]["code"] == "fenced"
    assert first["low"] == 0
    assert (second["error"], second["low"]) == (None, 3)
    assert harness.shard(0)["low"] == 0


def test_member_without_a_sign_of_life_is_dropped(harness):
    one, two = harness.join("a"), harness.join("b")
    one.release_all()
    harness.produce(4, shard=0)
    one.fetch()
    harness.now += 4.9
    two.beat()
    harness.groups.tick()
    assert one.owns == [0, 1]
    harness.now += 0.2
    harness.groups.tick()
    assert two.owns == [0, 1, 2, 3]
    assert harness.shard(0)["suspect_to"] == 4
    assert harness.shard(1)["suspect_to"] == 0  # no row of it was handed out
    with pytest.raises(Expired):
        one.ack(0, (0, 4))
    assert harness.shard(0)["low"] == 0


@pytest.mark.parametrize("sign", ["beat", "look", "ack"])
def test_signs_of_life(harness, sign):
    one = harness.join("a")
    harness.produce(1)
    one.fetch()
    for _ in range(5):
        harness.now += 4.0
        {"beat": one.beat, "look": one.look, "ack": lambda: one.ack(0, (0, 1))}[sign]()
        harness.groups.tick()
    assert one.owns == [0, 1, 2, 3]


def test_a_dropped_member_joins_again_with_a_new_epoch(harness):
    one = harness.join("a")
    harness.now += 6
    harness.groups.tick()
    with pytest.raises(Expired):
        one.beat()
    again = harness.join("a")
    assert again.epoch > one.epoch
    assert again.owns == [0, 1, 2, 3]
    with pytest.raises(Fenced):
        one.beat()


def test_time_while_the_bus_was_stopped_does_not_expire_members(harness):
    one = harness.join("a")
    harness.now += 40
    harness.groups.extend_deadlines(40)
    harness.groups.tick()
    one.beat()


def test_more_members_than_shards(harness):
    seats = [harness.join(f"c{n}") for n in range(6)]
    for member in seats:
        member.release_all()
    assert sorted(len(member.owns) for member in seats) == [0, 0, 1, 1, 1, 1]
    seats[-1].leave()


def test_members_and_groups_are_limited():
    with open_store("memory:") as store:
        harness = GroupHarness(store, max_groups=2, max_members=2)
        harness.join("a")
        harness.join("b")
        with pytest.raises(LimitReached) as caught:
            harness.join("c")
        assert caught.value.limit == "max_members"
        harness.join("b")  # a rejoin needs no additional place
        harness.join("a", group="h")
        with pytest.raises(LimitReached) as caught:
            harness.join("a", group="i")
        assert caught.value.limit == "max_groups"
        harness.groups.remove(harness.topic(), "h", force=True)
        harness.join("a", group="i")


def test_group_whose_first_join_failed_does_not_exist(harness, monkeypatch):
    from polybus.errors import StoreFull

    def full(commit):
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(harness.store, "commit", full)
        with pytest.raises(StoreFull):
            harness.join("a")
    assert harness.groups.names(harness.topic()) == []
    assert harness.join("a").owns == [0, 1, 2, 3]


def test_rebalance_wakes_waiting_fetches(harness):
    number = harness.topic().number
    one = harness.join("a")
    assert harness.woken
    harness.woken.clear()
    harness.join("b")
    assert set(harness.woken) == {number}
    harness.woken.clear()
    one.release_all()
    assert set(harness.woken) == {number}


def test_maximum_number_of_shards(harness):
    harness.topic(shards=512)
    one, two = harness.join("a"), harness.join("b")
    one.release_all()
    assert (len(one.owns), len(two.owns)) == (256, 256)
    harness.produce(1, shard=3)
    one.fetch()
    one.beat({3: (0,)})
    harness.now += 4
    two.beat()
    harness.now += 2
    harness.groups.tick()
    assert len(two.owns) == 512
    assert harness.shard(3)["attempts"] == 1


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_partly_failed_rebalance_is_finished_by_the_next_tick(harness, monkeypatch, failing):
    from polybus.errors import StoreFull
    from polybus.groups import membership

    monkeypatch.setattr(membership, "MAX_RECORDS_PER_COMMIT", 2)  # several commits for four shards
    one, two = harness.join("a"), harness.join("b")
    one.release_all()
    harness.now += 4
    two.beat()
    harness.now += 2
    real, left = harness.store.commit, [failing]

    def commit(asked):
        left[0] -= 1
        if left[0] == 0:
            raise StoreFull("no room")
        return real(asked)

    monkeypatch.setattr(harness.store, "commit", commit)
    harness.groups.tick()
    two.beat()
    harness.groups.tick()
    assert two.owns == [0, 1, 2, 3]
    assert [member["consumer"] for member in harness.info()["members"]] == ["b"]
