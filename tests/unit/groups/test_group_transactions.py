"""Transactions: the ack and its outputs are atomic, once, and only for the shard's owner."""

from __future__ import annotations

import pytest

from polybus.errors import (
    DoesNotExist,
    Expired,
    Fenced,
    LimitReached,
    MalformedRequest,
    StageGone,
    Stale,
)
from polybus.groups.message_block import OutputMessage, build_block
from polybus.model.commit import Append
from polybus.store.contract import LEASE_S


@pytest.fixture
def member(harness):
    harness.produce(10)
    joined = harness.join("a")
    joined.fetch()
    return joined


def commit(member, offset: int, *bodies: bytes, attempt: int = 0, epoch: int | None = None, **more):
    harness = member.harness
    out = harness.topic("out", 1)
    appends = [
        Append(out.number, 0, build_block([OutputMessage(None, body, None, 1)])) for body in bodies
    ]
    shard_epoch = member.held[0].epoch if epoch is None else epoch
    position = 0, shard_epoch, offset, attempt
    identity = member.consumer, member.epoch
    return harness.groups.commit(harness.topic(), member.group, identity, position, appends, **more)


def test_repeated_transaction_changes_nothing(harness, member):
    done = commit(member, 3, b"x", b"y")
    assert [span.count for span in done.spans] == [2]
    assert commit(member, 3, b"x", b"y") is None
    assert [letter.body for letter in harness.letters("out")] == [b"x", b"y"]
    assert harness.shard(0)["acked"] == 1
    member.ack(0, (0, 3))
    assert harness.shard(0)["low"] == 4
    assert commit(member, 1, b"z") is None  # acked by another call


def test_transactions_commit_in_any_order(harness, member):
    for offset in (5, 0, 3, 1, 4, 2):
        assert commit(member, offset, b"%d" % offset)
    assert harness.shard(0)["low"] == 6


def test_transaction_is_possible_again_after_a_reset(harness, member):
    assert commit(member, 0, b"x")
    harness.groups.reset(harness.topic(), "g", "earliest", force=True)
    with pytest.raises(Fenced):
        commit(member, 0, b"x")
    member.fetch()
    assert commit(member, 0, b"x")
    assert len(harness.letters("out")) == 2


def test_transaction_of_a_non_owner_is_fenced(harness, member):
    with pytest.raises(Fenced):
        commit(member, 0, b"x", epoch=0)
    harness.join("a")
    with pytest.raises(Fenced):
        commit(member, 0, b"x")
    harness.now += 6
    harness.groups.tick()
    with pytest.raises(Expired):
        commit(member, 0, b"x")
    assert harness.letters("out") == []


def test_transaction_of_a_failed_run_is_stale(harness, member):
    member.fail(0, 2)
    with pytest.raises(Stale):
        commit(member, 2, b"x")
    assert harness.letters("out") == []
    assert commit(member, 2, b"x", attempt=1)


def test_transaction_beyond_the_end_is_refused(harness, member):
    with pytest.raises(MalformedRequest):
        commit(member, 10, b"x")
    with pytest.raises(MalformedRequest):
        harness.groups.commit(harness.topic(), "g", ("a", member.epoch), (4, 1, 0, 0), [])


def test_stages_are_published_with_the_transaction(harness, member):
    out = harness.topic("out", 1)
    stage = harness.store.open_stage(LEASE_S)
    block = build_block([OutputMessage("k", b"staged", None, 1)])
    harness.store.stage(stage, [Append(out.number, 0, block)]).result()
    assert commit(member, 0, b"first", stages=(stage,))
    assert [letter.body for letter in harness.letters("out")] == [b"first", b"staged"]
    assert commit(member, 0, b"first", stages=(stage,)) is None
    with pytest.raises(StageGone):
        commit(member, 1, b"x", stages=(stage,))
    assert harness.shard(0)["acked"] == 1


def test_transaction_is_atomic(harness, member):
    gone = harness.topic("gone", 1)
    harness.store.drop("gone")
    append = Append(gone.number, 0, build_block([OutputMessage(None, b"x", None, 1)]))
    place = 0, member.held[0].epoch, 0, 0
    with pytest.raises(DoesNotExist):
        harness.groups.commit(harness.topic(), "g", ("a", member.epoch), place, [append])
    assert harness.shard(0)["acked"] == 0
    assert commit(member, 0, b"x")


def test_transaction_over_the_range_limit_is_refused(harness, member, monkeypatch):
    from polybus.groups import shard_progress

    monkeypatch.setattr(shard_progress.ack_ranges, "__defaults__", (2,))
    commit(member, 2, b"x")
    commit(member, 4, b"x")
    with pytest.raises(LimitReached):
        commit(member, 6, b"x")
    assert commit(member, 3, b"x")
    assert len(harness.letters("out")) == 3
