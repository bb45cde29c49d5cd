"""Joining, leaving, dying: shards change hands, and nobody acks what is not its own."""

from __future__ import annotations

import pytest

from polybus.errors import Expired, Fenced, LimitReached
from polybus.store.engine_registry import open_store
from tests.unit.groups.group_fixture import Desk


def test_first_member_owns_all_shards(desk):
    one = desk.join("a")
    assert one.owns == [0, 1, 2, 3]
    assert [shard["epoch"] for shard in desk.info()["shards"]] == [1, 1, 1, 1]
    found = one.fetch()
    assert [told["shard"] for told in found.assigned] == [0, 1, 2, 3]
    assert not one.fetch()


def test_shard_moves_after_its_owner_has_released_it(desk):
    one, two = desk.join("a"), desk.join("b")
    assert one.owns == [0, 1, 2, 3]
    assert one.fetch().release == [2, 3]
    assert one.beat() == ([2, 3], [0, 1, 2, 3])
    assert not two.fetch()
    assert one.ack(3, release=True)["error"] is None
    assert (one.owns, two.owns) == ([0, 1, 2], [3])
    assert desk.shard(3)["epoch"] == 2
    assert [told["shard"] for told in two.fetch().assigned] == [3]
    assert one.fetch().lost == [3]
    one.release_all()
    assert (one.owns, two.owns) == ([0, 1], [2, 3])
    assert one.beat()[0] == []


def test_shard_moves_in_the_commit_of_its_last_ack(desk, monkeypatch):
    desk.produce(5, shard=3)
    one, two = desk.join("a"), desk.join("b")
    one.fetch()
    commits = []
    real = desk.store.commit
    monkeypatch.setattr(desk.store, "commit", lambda asked: commits.append(asked) or real(asked))
    one.ack(3, (0, 2), emitted=2, release=True)
    assert len(commits) == 1
    told = two.fetch().assigned[0]
    assert (told["shard"], told["low"], told["epoch"]) == (3, 2, 2)
    two.ack(3, (2, 3), emitted=1)
    assert desk.shard(3)["emitted"] == 3


def test_shard_released_to_a_gone_member_goes_to_another(desk):
    one, two = desk.join("a"), desk.join("b")
    one.fetch()
    two.leave()
    one.ack(3, release=True)  # it did not know yet that it may keep it
    assert one.owns == [0, 1, 2, 3]
    assert desk.shard(3)["epoch"] == 2


def test_known_release_is_not_reported_again(desk):
    one, _ = desk.join("a"), desk.join("b")
    assert one.fetch()
    assert one.fetch()  # it has not said that it knows
    for number in (2, 3):
        one.held[number] = one.held[number]._replace(releasing=True)
    found = one.fetch()
    assert not found
    assert found.release == [2, 3]


def test_releasing_shard_has_no_rows(desk):
    one = desk.join("a")
    one.fetch()
    desk.join("b")
    desk.produce(2, shard=0)
    desk.produce(2, shard=3)
    assert [place["shard"] for place in one.fetch().places] == [0]


def test_shards_of_a_leaving_member_move_at_once_and_are_not_suspect(desk):
    one, two = desk.join("a"), desk.join("b")
    one.release_all()
    desk.produce(5, shard=0)
    one.fetch()
    one.leave(one.entry(0, (0, 2)))
    assert two.owns == [0, 1, 2, 3]
    assert desk.shard(0)["low"] == 2
    assert desk.shard(0)["suspect_to"] == 0
    with pytest.raises(Expired):
        one.beat()
    two.leave()
    assert [shard["owner"] for shard in desk.info()["shards"]] == [None] * 4
    assert desk.info()["members"] == []


def test_newer_consumer_of_the_same_name_fences_the_older(desk):
    old = desk.join("a")
    desk.produce(3)
    old.fetch()
    new = desk.join("a")
    assert new.epoch > old.epoch
    for call in (old.beat, old.fetch, old.leave, lambda: old.ack(0, (0, 1))):
        with pytest.raises(Fenced) as caught:
            call()
        assert not isinstance(caught.value, Expired)
    assert new.owns == [0, 1, 2, 3]
    found = new.fetch()
    assert found.assigned[0]["low"] == 0
    assert found.assigned[0]["suspect_to"] == 3
    assert desk.shard(0)["epoch"] == 2


def test_ack_with_an_old_shard_epoch_is_refused_alone(desk):
    one = desk.join("a")
    desk.produce(3, shard=0)
    desk.produce(3, shard=1)
    one.fetch()
    first, second = one.ack_all(one.entry(0, (0, 3), epoch=0), one.entry(1, (0, 3)))
    assert first["error"]["code"] == "fenced"
    assert first["low"] == 0
    assert (second["error"], second["low"]) == (None, 3)
    assert desk.shard(0)["low"] == 0


def test_member_without_a_sign_of_life_is_dropped(desk):
    one, two = desk.join("a"), desk.join("b")
    one.release_all()
    desk.produce(4, shard=0)
    one.fetch()
    desk.now += 4.9
    two.beat()
    desk.groups.tick()
    assert one.owns == [0, 1]
    desk.now += 0.2
    desk.groups.tick()
    assert two.owns == [0, 1, 2, 3]
    assert desk.shard(0)["suspect_to"] == 4
    assert desk.shard(1)["suspect_to"] == 0  # nothing of it was handed out
    with pytest.raises(Expired):
        one.ack(0, (0, 4))
    assert desk.shard(0)["low"] == 0


@pytest.mark.parametrize("sign", ["beat", "look", "ack"])
def test_signs_of_life(desk, sign):
    one = desk.join("a")
    desk.produce(1)
    one.fetch()
    for _ in range(5):
        desk.now += 4.0
        {"beat": one.beat, "look": one.look, "ack": lambda: one.ack(0, (0, 1))}[sign]()
        desk.groups.tick()
    assert one.owns == [0, 1, 2, 3]


def test_a_dropped_member_joins_again_with_a_new_epoch(desk):
    one = desk.join("a")
    desk.now += 6
    desk.groups.tick()
    with pytest.raises(Expired):
        one.beat()
    again = desk.join("a")
    assert again.epoch > one.epoch
    assert again.owns == [0, 1, 2, 3]
    with pytest.raises(Fenced):
        one.beat()


def test_time_while_the_bus_was_stopped_does_not_expire_members(desk):
    one = desk.join("a")
    desk.now += 40
    desk.groups.extend_deadlines(40)
    desk.groups.tick()
    one.beat()


def test_more_members_than_shards(desk):
    seats = [desk.join(f"c{n}") for n in range(6)]
    for seat in seats:
        seat.release_all()
    assert sorted(len(seat.owns) for seat in seats) == [0, 0, 1, 1, 1, 1]
    seats[-1].leave()


def test_members_and_groups_are_limited():
    with open_store("memory:") as store:
        desk = Desk(store, max_groups=2, max_members=2)
        desk.join("a")
        desk.join("b")
        with pytest.raises(LimitReached) as caught:
            desk.join("c")
        assert caught.value.limit == "max_members"
        desk.join("b")  # its own place
        desk.join("a", group="h")
        with pytest.raises(LimitReached) as caught:
            desk.join("a", group="i")
        assert caught.value.limit == "max_groups"
        desk.groups.remove(desk.topic(), "h", force=True)
        desk.join("a", group="i")


def test_group_whose_first_join_failed_does_not_exist(desk, monkeypatch):
    from polybus.errors import StoreFull

    def full(commit):
        raise StoreFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "commit", full)
        with pytest.raises(StoreFull):
            desk.join("a")
    assert desk.groups.names(desk.topic()) == []
    assert desk.join("a").owns == [0, 1, 2, 3]


def test_rebalance_wakes_waiting_fetches(desk):
    number = desk.topic().number
    one = desk.join("a")
    assert desk.woken
    desk.woken.clear()
    desk.join("b")
    assert set(desk.woken) == {number}
    desk.woken.clear()
    one.release_all()
    assert set(desk.woken) == {number}


def test_maximum_number_of_shards(desk):
    desk.topic(shards=512)
    one, two = desk.join("a"), desk.join("b")
    one.release_all()
    assert (len(one.owns), len(two.owns)) == (256, 256)
    desk.produce(1, shard=3)
    one.fetch()
    one.beat({3: (0,)})
    desk.now += 4
    two.beat()
    desk.now += 2
    desk.groups.tick()
    assert len(two.owns) == 512
    assert desk.shard(3)["attempts"] == 1


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_partly_failed_rebalance_is_finished_by_the_next_tick(desk, monkeypatch, failing):
    from polybus.errors import StoreFull
    from polybus.groups import membership

    monkeypatch.setattr(membership, "MAX_RECORDS_PER_COMMIT", 2)  # several commits for four shards
    one, two = desk.join("a"), desk.join("b")
    one.release_all()
    desk.now += 4
    two.beat()
    desk.now += 2
    real, left = desk.store.commit, [failing]

    def commit(asked):
        left[0] -= 1
        if left[0] == 0:
            raise StoreFull("no room")
        return real(asked)

    monkeypatch.setattr(desk.store, "commit", commit)
    desk.groups.tick()
    two.beat()
    desk.groups.tick()
    assert two.owns == [0, 1, 2, 3]
    assert [member["consumer"] for member in desk.info()["members"]] == ["b"]
