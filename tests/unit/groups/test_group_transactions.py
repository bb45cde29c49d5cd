"""An ack and what was produced with it: one step, once, by whose shard it is."""

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
def seat(desk):
    desk.produce(10)
    one = desk.join("a")
    one.fetch()
    return one


def commit(seat, offset: int, *bodies: bytes, attempt: int = 0, epoch: int | None = None, **more):
    desk = seat.desk
    out = desk.topic("out", 1)
    appends = [
        Append(out.number, 0, build_block([OutputMessage(None, body, None, 1)])) for body in bodies
    ]
    shard_epoch = seat.held[0].epoch if epoch is None else epoch
    place = 0, shard_epoch, offset, attempt
    member = seat.consumer, seat.epoch
    return desk.groups.commit(desk.topic(), seat.group, member, place, appends, **more)


def test_repeated_transaction_changes_nothing(desk, seat):
    done = commit(seat, 3, b"x", b"y")
    assert [span.count for span in done.spans] == [2]
    assert commit(seat, 3, b"x", b"y") is None
    assert [letter.body for letter in desk.letters("out")] == [b"x", b"y"]
    assert desk.shard(0)["acked"] == 1
    seat.ack(0, (0, 3))
    assert desk.shard(0)["low"] == 4
    assert commit(seat, 1, b"z") is None  # acked otherwise


def test_transactions_commit_in_any_order(desk, seat):
    for offset in (5, 0, 3, 1, 4, 2):
        assert commit(seat, offset, b"%d" % offset)
    assert desk.shard(0)["low"] == 6


def test_transaction_is_possible_again_after_a_reset(desk, seat):
    assert commit(seat, 0, b"x")
    desk.groups.reset(desk.topic(), "g", "earliest", force=True)
    with pytest.raises(Fenced):
        commit(seat, 0, b"x")
    seat.fetch()
    assert commit(seat, 0, b"x")
    assert len(desk.letters("out")) == 2


def test_transaction_of_a_non_owner_is_fenced(desk, seat):
    with pytest.raises(Fenced):
        commit(seat, 0, b"x", epoch=0)
    desk.join("a")
    with pytest.raises(Fenced):
        commit(seat, 0, b"x")
    desk.now += 6
    desk.groups.tick()
    with pytest.raises(Expired):
        commit(seat, 0, b"x")
    assert desk.letters("out") == []


def test_transaction_of_a_failed_run_is_stale(desk, seat):
    seat.fail(0, 2)
    with pytest.raises(Stale):
        commit(seat, 2, b"x")
    assert desk.letters("out") == []
    assert commit(seat, 2, b"x", attempt=1)


def test_transaction_beyond_the_end_is_refused(desk, seat):
    with pytest.raises(MalformedRequest):
        commit(seat, 10, b"x")
    with pytest.raises(MalformedRequest):
        desk.groups.commit(desk.topic(), "g", ("a", seat.epoch), (4, 1, 0, 0), [])


def test_stages_are_published_with_the_transaction(desk, seat):
    out = desk.topic("out", 1)
    stage = desk.store.open_stage(LEASE_S)
    block = build_block([OutputMessage("k", b"staged", None, 1)])
    desk.store.stage(stage, [Append(out.number, 0, block)]).result()
    assert commit(seat, 0, b"first", stages=(stage,))
    assert [letter.body for letter in desk.letters("out")] == [b"first", b"staged"]
    assert commit(seat, 0, b"first", stages=(stage,)) is None
    with pytest.raises(StageGone):
        commit(seat, 1, b"x", stages=(stage,))
    assert desk.shard(0)["acked"] == 1


def test_transaction_is_atomic(desk, seat):
    gone = desk.topic("gone", 1)
    desk.store.drop("gone")
    append = Append(gone.number, 0, build_block([OutputMessage(None, b"x", None, 1)]))
    place = 0, seat.held[0].epoch, 0, 0
    with pytest.raises(DoesNotExist):
        desk.groups.commit(desk.topic(), "g", ("a", seat.epoch), place, [append])
    assert desk.shard(0)["acked"] == 0
    assert commit(seat, 0, b"x")


def test_transaction_over_the_range_limit_is_refused(desk, seat, monkeypatch):
    from polybus.groups import shard_progress

    monkeypatch.setattr(shard_progress.ack_ranges, "__defaults__", (2,))
    commit(seat, 2, b"x")
    commit(seat, 4, b"x")
    with pytest.raises(LimitReached):
        commit(seat, 6, b"x")
    assert commit(seat, 3, b"x")
    assert len(desk.letters("out")) == 3
