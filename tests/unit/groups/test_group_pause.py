"""Pauses of groups and of topics: no rows, everything else goes on."""

from __future__ import annotations

import pytest

from polybus.durable.topic_registry import CONSUME_SIDE, PAUSED, PRODUCE_SIDE
from polybus.errors import DoesNotExist, Paused
from polybus.groups import group_records
from polybus.groups.group_records import Member, Roster
from polybus.groups.message_block import OutputMessage, build_block


def pause_topic(harness, *sides: str) -> None:
    settings = {PAUSED: list(sides)} if sides else {}
    harness.durable.register(harness.store.configure("t", settings))


def test_paused_group_gets_no_rows_and_no_other_group_is_held(harness):
    harness.produce(3)
    one, other = harness.join("a"), harness.join("a", group="other")
    harness.groups.pause(harness.topic(), "g", True)
    assert one.fetch().assigned
    other.fetch()
    assert (one.rows[0], other.rows[0]) == ([], [0, 1, 2])
    assert (harness.info()["paused"], harness.info("other")["paused"]) == (True, False)
    harness.produce(1)
    assert not one.fetch()
    harness.groups.pause(harness.topic(), "g", False)
    one.fetch()
    assert one.rows[0] == [0, 1, 2, 3]


def test_pause_outlives_a_restart_and_new_members(harness):
    harness.produce(2)
    harness.join("a")
    harness.groups.pause(harness.topic(), "g", True)
    harness.open()
    second = harness.join("b")
    second.fetch()
    assert not any(second.rows.values())
    assert harness.groups.summarize(harness.topic(), "g")["paused"] is True


def test_messages_that_were_fetched_can_be_acked_and_fail(harness):
    harness.produce(3)
    one = harness.join("a")
    one.fetch()
    harness.groups.pause(harness.topic(), "g", True)
    one.beat({0: (0, 1)})
    assert one.ack(0, (0, 2))["error"] is None
    assert one.fail(0, 2)["error"] is None
    assert (harness.shard(0)["acked"], harness.shard(0)["attempts"]) == (2, 1)
    assert harness.letters() == []


def test_shards_move_while_a_group_is_paused(harness):
    one = harness.join("a")
    one.fetch()
    harness.groups.pause(harness.topic(), "g", True)
    two = harness.join("b")
    one.release_all()
    two.fetch()
    assert len(one.owns) == len(two.owns) == 2


def test_topic_holds_all_its_groups(harness):
    harness.produce(2)
    one = harness.join("a")
    pause_topic(harness, CONSUME_SIDE)
    one.fetch()
    assert one.rows[0] == []
    pause_topic(harness)
    one.fetch()
    assert one.rows[0] == [0, 1]


def test_pause_and_resume_wake_waiting_fetches(harness):
    harness.join("a")
    for is_paused in (True, False):
        harness.woken.clear()
        harness.groups.pause(harness.topic(), "g", is_paused)
        assert harness.woken == [harness.topic().number]


def test_pause_of_a_missing_group_is_refused(harness):
    harness.topic()
    with pytest.raises(DoesNotExist):
        harness.groups.pause(harness.topic(), "none", True)


def test_paused_topic_takes_no_batch(harness):
    harness.topic()
    pause_topic(harness, PRODUCE_SIDE)
    block = build_block([OutputMessage(None, b"x", None, 0)])
    with pytest.raises(Paused, match="topic t is paused for producers"):
        harness.durable.produce(harness.topic(), block)
    pause_topic(harness, CONSUME_SIDE)
    harness.durable.produce(harness.topic(), block).result()


def test_records_without_a_pause_are_those_of_earlier_versions():
    roster = Roster(3, 4, {"a": Member(1, 2, 3, 4)}, "alice")
    raw = group_records.encode_roster(roster)
    assert b"paused" not in raw
    assert group_records.decode_roster(raw) == roster
    paused = Roster(3, 4, {}, "alice", is_paused=True)
    assert group_records.decode_roster(group_records.encode_roster(paused)) == paused
