"""Groups of a topic that is resharded: new shards wait for their parents."""

from __future__ import annotations

import pytest

from polybus.errors import Conflict
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.groups.shard_progress import FailureReport
from polybus.model.commit import Commit
from polybus.model.stamp import ProducerOptions, Stamp


def phases(harness, group: str = "g") -> list[str]:
    return [shard["phase"] for shard in harness.info(group)["shards"]]


def test_new_shards_wait_until_their_parents_are_acked(harness):
    for shard in range(4):
        harness.produce(2, shard=shard)
    one = harness.join("a")
    one.fetch()
    harness.reshard(2)  # shards 4 and 5: children of 0 and 2, and of 1 and 3
    harness.produce(1, shard=4)
    harness.produce(1, shard=5)
    assert phases(harness) == ["active"] * 4 + ["waiting"] * 2
    assert one.owns == [0, 1, 2, 3]
    one.ack(0, (0, 2))
    assert phases(harness) == ["drained", "active", "active", "active", "waiting", "waiting"]
    one.ack(2, (0, 2))
    assert phases(harness) == ["drained", "active", "drained", "active", "active", "waiting"]
    result = one.fetch()
    assert [assigned["shard"] for assigned in result.assigned] == [4]
    assert [assigned["index"] for assigned in result.assigned] == [0]
    assert one.rows[4] == [0]
    assert result.release == [0, 2]
    assert result.lost == []


def test_member_learns_of_sealed_shards_once(harness):
    harness.produce(1, shard=0)
    one = harness.join("a")
    one.fetch()
    who = one.consumer, one.epoch
    fetch = harness.groups.open_fetch(harness.topic(), "g", who, one.held, (10, 1 << 20))
    assert not fetch.poll().is_change
    harness.reshard(2)
    result = fetch.poll()
    assert (result.is_change, result.sealed) == (True, [0])
    one.release_all()
    result = one.look()
    assert (result.is_change, result.sealed) == (True, [0])  # the released shards are lost
    for released in (1, 2, 3):
        del one.held[released]
    one.fetch()
    assert not one.look().is_change


def test_drained_shard_is_released_by_its_member(harness):
    harness.produce(1, shard=0)
    one = harness.join("a")
    one.fetch()
    harness.reshard(8)
    assert one.fetch().release == [1, 2, 3]
    assert one.beat()[0] == [1, 2, 3]
    one.release_all()
    one.ack(0, (0, 1))
    one.release_all()
    assert one.owns == list(range(4, 12))
    one.fetch()
    assert sorted(one.held) == list(range(4, 12))
    # A repeated ack of a released shard changes nothing.
    assert one.ack(0, (0, 1))["error"]["code"] == "fenced"
    assert harness.shard(0)["low"] == 1


def test_release_can_carry_the_last_ack(harness):
    harness.produce(1, shard=0)
    one = harness.join("a")
    one.fetch()
    harness.reshard(1)
    one.ack(0, (0, 1), release=True)
    assert phases(harness) == ["drained"] * 4 + ["active"]
    assert one.owns == [1, 2, 3, 4]


def test_active_shards_are_spread_over_the_members(harness):
    members = [harness.join(name) for name in "abc"]
    for _ in range(3):
        for member in members:
            member.release_all()
    harness.reshard(9)
    for _ in range(3):
        for member in members:
            member.release_all()
    assert sorted(len(member.owns) for member in members) == [3, 3, 3]
    assert all(member.owns[0] >= 4 for member in members)


def test_transaction_that_drains_a_shard_opens_its_children(harness):
    harness.produce(1, shard=0)
    one = harness.join("a")
    one.fetch()
    harness.reshard(1)
    position = 0, one.held[0].epoch, 0, 0
    harness.groups.commit(harness.topic(), "g", (one.consumer, one.epoch), position, [])
    assert phases(harness)[4] == "active"
    assert 4 in one.owns
    # Its repeat, whose first answer was lost, still finds the member as the owner.
    assert (
        harness.groups.commit(harness.topic(), "g", (one.consumer, one.epoch), position, []) is None
    )


def test_dead_letter_that_drains_a_shard_opens_its_children(harness):
    harness.produce(1, shard=0)
    one = harness.join("a", max_deliver=1)
    one.fetch()
    harness.reshard(1)
    one.ack(0, failed=(FailureReport(0),))
    assert len(harness.letters()) == 1
    assert 4 in one.owns


def test_dead_letter_of_a_dead_member_opens_the_children(harness):
    harness.produce(1, shard=0)
    one = harness.join("a", max_deliver=1)
    one.fetch()
    harness.reshard(1)
    one.beat({0: (0,)})
    other = harness.join("b")
    harness.now += 4
    other.beat()
    harness.now += 4
    harness.groups.tick()  # drops the member: its run has failed
    harness.groups.tick()
    assert len(harness.letters()) == 1
    assert phases(harness) == ["drained"] * 4 + ["active"]
    other.release_all()
    assert other.owns == [4]


def test_trimmed_messages_count_as_read(harness):
    harness.produce(3, shard=0)
    one = harness.join("a")
    harness.reshard(1)
    harness.store.trim(harness.topic().number, {0: 3})
    one.fetch()
    harness.groups.tick()
    assert phases(harness) == ["drained"] * 4 + ["active"]
    assert harness.shard(0)["trimmed_unread"] == 3


def test_group_without_members_learns_of_a_reshard(harness):
    harness.produce(2, shard=1)
    harness.join("a").leave()
    harness.reshard(2)
    assert phases(harness) == ["drained", "active", "drained", "drained", "active", "waiting"]
    assert harness.join("b").owns == [1, 4]


def test_restart_keeps_the_order_of_generations(harness):
    harness.produce(2, shard=1)
    one = harness.join("a")
    one.fetch()
    harness.reshard(2)
    harness.open()
    harness.groups.tick()
    assert phases(harness) == ["drained", "active", "drained", "drained", "active", "waiting"]
    one.ack(1, (0, 2))
    assert phases(harness)[5] == "active"


def test_reshard_that_the_bus_did_not_survive_is_found_at_the_start(harness):
    harness.produce(2, shard=1)
    one = harness.join("a")
    one.fetch()
    harness.store.configure("t", {}, add_shards=2)  # and the bus dies here
    harness.open()
    harness.groups.tick()
    assert one.owns == [0, 1, 2, 3, 4]  # the drained ones until they are released
    one.ack(1, (0, 2))
    assert 5 in one.owns


def test_reshard_whose_caller_failed_half_way_is_completed_by_a_tick(harness):
    harness.produce(2, shard=1)
    one = harness.join("a")
    one.fetch()
    harness.durable.register(harness.store.configure("t", {}, add_shards=2))
    harness.groups.tick()
    assert phases(harness) == ["drained", "active", "drained", "drained", "active", "waiting"]


def test_new_group_starts_with_the_first_generation(harness):
    harness.produce(1, shard=0)
    harness.reshard(1)
    harness.produce(1, shard=4)
    one = harness.join("a")
    assert one.owns == [0]
    late = harness.join("b", group="late", start="latest")
    assert late.owns == [4]
    assert late.fetch().rows.count == 0


def test_empty_generation_waits_for_those_before_it(harness):
    harness.produce(1, shard=0)
    one = harness.join("a")
    one.fetch()
    harness.reshard(1)
    harness.reshard(2)
    harness.produce(1, shard=5)
    assert phases(harness) == ["active", *["drained"] * 3, "waiting", "waiting", "waiting"]
    one.ack(0, (0, 1))
    assert phases(harness) == ["drained"] * 5 + ["active"] * 2


def test_reset_takes_later_generations_back(harness):
    harness.produce(2, shard=0)
    one = harness.join("a")
    one.fetch()
    harness.reshard(1)
    harness.produce(2, shard=4)
    one.ack(0, (0, 2))
    one.release_all()
    one.fetch()
    one.ack(4, (0, 1))
    harness.groups.reset(harness.topic(), "g", "earliest", force=True)
    assert phases(harness) == ["active", "drained", "drained", "drained", "waiting"]
    assert one.owns == [0]
    result = one.fetch()
    assert result.lost == [4]
    assert one.rows == {0: [0, 1]}
    one.ack(0, (0, 2))
    one.fetch()
    assert one.rows[4] == [0, 1]


def test_reset_of_one_parent_takes_its_children_back(harness):
    for shard in range(4):
        harness.produce(1, shard=shard)
    one = harness.join("a")
    one.fetch()
    harness.reshard(2)
    harness.produce(1, shard=4)
    for shard in range(4):
        one.ack(shard, (0, 1))
    one.release_all()
    assert one.owns == [4, 5]
    harness.groups.reset(harness.topic(), "g", {"offsets": {"2": 0}}, force=True)
    assert one.owns == [2, 5]
    assert 4 in one.fetch().lost


def test_reset_by_id_spans_generations(harness):
    harness.produce(2, shard=0)
    one = harness.join("a")
    one.fetch()
    harness.reshard(1)
    harness.produce(3, shard=4)
    one.ack(0, (0, 2))
    one.leave()
    harness.groups.reset(harness.topic(), "g", {"id": 4})  # the second message of shard 4
    assert [shard["low"] for shard in harness.info()["shards"]] == [2, 0, 0, 0, 1]
    assert harness.join("b").owns == [4]


def test_check_names_groups_and_shards_that_drain(harness):
    for shard in range(4):
        harness.produce(1, shard=shard)
    one = harness.join("a")
    harness.join("b", group="late", start="latest")
    one.fetch()
    harness.groups.check_drained(harness.topic())  # nothing is sealed
    topic = harness.reshard(8)
    one.ack(1, (0, 1))
    with pytest.raises(Conflict, match=r"t is still draining: group g has 3 shards \(0, 2, 3\)"):
        harness.groups.check_drained(topic)
    for shard in (0, 2, 3):
        one.ack(shard, (0, 1))
    harness.groups.check_drained(topic)


def test_dead_letters_go_to_the_open_shards_of_their_topic(harness):
    harness.produce(2, shard=0)
    one = harness.join("a", max_deliver=1)
    one.fetch()
    one.ack(0, failed=(FailureReport(0),))
    harness.reshard(3, "t.dlq")
    one.ack(0, failed=(FailureReport(1),))
    assert [letter.body for letter in harness.letters()] == [b"0", b"1"]
    bounds = harness.store.bounds(harness.durable.get("t.dlq").number).shards
    assert sum(shard.end for shard in bounds[4:]) == 1


def test_repeated_publish_finds_the_first_one(harness, monkeypatch):
    """The stages are published by another request while this one moves their blocks."""
    out = harness.topic("out", 2)
    stage = harness.store.open_stage()
    block = build_block([OutputMessage("k", b"x", None, 1)])
    harness.store.stage(stage, harness.durable.build_appends(out, block)).result()
    harness.reshard(3, "out")
    opened = harness.store.open_producer("p", ProducerOptions())
    commit = Commit(stages=(stage,), stamp=Stamp("p", opened.epoch, 1))
    reroute = harness.store.reroute_stage

    def publish_first(name: str) -> bool:
        monkeypatch.setattr(harness.store, "reroute_stage", reroute)
        assert not harness.durable.publish(commit).duplicate
        return bool(reroute(name))

    monkeypatch.setattr(harness.store, "reroute_stage", publish_first)
    assert harness.durable.publish(commit).duplicate
    assert harness.store.bounds(out.number).next_id == 2


def test_stage_of_a_transaction_is_rerouted(harness):
    harness.produce(1, shard=0)
    one = harness.join("a")
    one.fetch()
    out = harness.topic("out", 2)
    stage = harness.store.open_stage()
    block = build_block([OutputMessage(f"k{n}", b"%d" % n, None, 1) for n in range(8)])
    harness.store.stage(stage, harness.durable.build_appends(out, block)).result()
    harness.reshard(3, "out")
    position = 0, one.held[0].epoch, 0, 0
    member = one.consumer, one.epoch
    harness.groups.commit(harness.topic(), "g", member, position, [], (stage,))
    rows = harness.store.read(out.number, "all", 1)
    assert sorted(message.body for _, message in read_messages(rows)) == [
        b"%d" % n for n in range(8)
    ]
    assert set(memoryview(rows.shards).cast("B").cast("i")) <= {2, 3, 4}
