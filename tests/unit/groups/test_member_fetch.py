"""The fetch of a member: shards, positions, bounds, and new rows."""

from __future__ import annotations

from array import array
from threading import Thread
from typing import Any, cast

import pytest

from polybus.errors import Expired, Fenced
from polybus.groups.ack_latency import BUCKET_NAMES, CommitTimes
from polybus.groups.member_fetch import MIN_SHARE_ROWS, MIN_SKIP_ROWS
from polybus.model.commit import Append, Commit
from polybus.model.rows import Rows
from tests.unit.groups.group_harness import MANY, SECOND_NS


def test_a_new_group_starts_at_the_earliest_or_the_latest(harness):
    harness.produce(3)
    first = harness.join("a", group="first")
    last = harness.join("a", group="last", start="latest")
    harness.produce(2)
    first.fetch()
    last.fetch()
    assert first.rows[0] == [0, 1, 2, 3, 4]
    assert last.rows[0] == [3, 4]
    assert harness.shard(0, "last")["acked"] == 0
    last.ack(0, (3, 5))
    assert harness.shard(0, "last")["acked"] == 2


def test_fetch_continues_at_the_member_position(harness):
    one = harness.join("a")
    one.fetch()
    for _ in range(3):
        harness.produce(2, shard=1)
        assert one.fetch()
    assert one.rows[1] == list(range(6))
    assert not one.fetch()


def counts(fetched) -> dict[int, int]:
    return {place["shard"]: place["to"] - place["from"] for place in fetched.places}


def test_the_bounds_are_shared_by_the_shards(harness):
    for shard in range(4):
        harness.produce(3 * MIN_SHARE_ROWS, shard=shard)
    one = harness.join("a")
    fetched = one.fetch((8 * MIN_SHARE_ROWS, 1 << 30))
    assert counts(fetched) == dict.fromkeys(range(4), 2 * MIN_SHARE_ROWS)
    assert not one.look((0, 1 << 20)).places
    assert not one.look((1, 0)).places


def test_small_bounds_are_not_split_and_no_shard_starves(harness):
    for shard in range(4):
        harness.produce(10, shard=shard)
    one = harness.join("a")
    assert counts(one.fetch((8, 1 << 20))) == {0: 8}
    assert counts(one.fetch((8, 1 << 20))) == {1: 8}
    assert counts(one.fetch((12, 1 << 20))) == {2: 10, 3: 2}
    assert counts(one.fetch((100, 1 << 20))) == {0: 2, 1: 2, 3: 8}
    for shard in range(4):
        harness.produce(10, shard=shard)
    assert counts(one.fetch((100, 5))) == {2: 1}  # whole messages, of four bytes each
    assert counts(one.fetch((100, 5))) == {0: 1}


def test_unused_share_goes_to_other_shards(harness):
    harness.produce(1, shard=0)
    harness.produce(100, shard=1)
    one = harness.join("a")
    assert one.fetch((40, 1 << 20)).rows.count == 40


def test_paused_shard_has_no_rows_and_no_changes(harness):
    one = harness.join("a")
    one.fetch()
    one.held[0] = one.held[0]._replace(paused=True)
    harness.produce(1, shard=0)
    assert not one.look()
    harness.produce(1, shard=1)
    assert [place["shard"] for place in one.look().places] == [1]


def test_shard_held_with_an_old_epoch_is_lost_and_assigned_again(harness):
    one = harness.join("a")
    one.fetch()
    one.held[2] = one.held[2]._replace(epoch=0)
    fetched = one.look()
    assert fetched.lost == [2]
    assert [assignment["shard"] for assignment in fetched.assigned] == [2]


def test_next_owner_continues_after_the_acked_offsets(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 3), (5, 7))
    one.fail(0, 4)
    one.leave()
    two = harness.join("b")
    assignment = two.fetch().assigned[0]
    assert assignment == {
        "shard": 0,
        "index": 0,
        "epoch": 2,
        "low": 3,
        "ranges": [[5, 7]],
        "attempts": {"4": 1},
        "suspect_to": 0,
        "end": 10,
    }
    assert two.rows[0] == list(range(3, 10))  # a few acked rows may be included


def test_long_acked_ranges_are_skipped(harness):
    harness.produce(2 * MIN_SKIP_ROWS + 10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (5, 5 + MIN_SKIP_ROWS))
    one.leave()
    two = harness.join("b")
    two.fetch()
    assert two.rows[0] == [0, 1, 2, 3, 4]
    fetched = two.fetch()
    assert fetched.places[0]["from"] == 5 + MIN_SKIP_ROWS
    assert two.rows[0][-1] == 2 * MIN_SKIP_ROWS + 9


def test_trimmed_unread_messages_are_counted_and_skipped(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (1, 3))
    harness.store.trim(harness.topic().number, {0: 5})
    assert harness.shard(0)["trimmed_unread"] == 3  # reported before any fetch
    assert harness.shard(0)["lag"] == 5
    two = harness.join("a")
    two.fetch()
    assert two.rows[0] == [5, 6, 7, 8, 9]
    two.ack(0, (5, 10))
    shard = harness.shard(0)
    assert (shard["trimmed_unread"], shard["acked"], shard["lag"]) == (3, 7, 0)


def test_fetch_of_a_non_member_is_refused(harness):
    one = harness.join("a")
    one.leave()
    with pytest.raises(Expired):
        one.look()
    with pytest.raises(Expired):
        harness.groups.open_fetch(harness.topic(), "none", ("a", 1), {}, (1, 1))


def test_lag_in_messages_and_seconds(harness):
    harness.produce(4)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 1), (2, 3))
    rows = harness.store.read(harness.topic().number, 0, 1, 2)
    written_ns = int.from_bytes(rows.timestamps_ns, "little")
    harness.wall_ns = lambda: written_ns + 3 * SECOND_NS
    assert (harness.shard(0)["lag"], harness.shard(0)["lag_s"]) == (2, 3.0)
    one.ack(0, (1, 4))
    assert (harness.shard(0)["lag"], harness.shard(0)["lag_s"]) == (0, 0.0)
    assert harness.groups.summarize(harness.topic(), "g") == {
        "topic": "t",
        "group": "g",
        "members": 1,
        "shards": 4,
        "acked": 4,
        "lag": 0,
        "paused": False,
    }


def test_ack_latency(harness):
    harness.produce(100)
    one = harness.join("a")
    one.fetch()
    rows = harness.store.read(harness.topic().number, 0, 0, 1)
    written_ns = int.from_bytes(rows.timestamps_ns, "little")
    harness.wall_ns = lambda: written_ns + 3_000_000
    one.ack(0, (0, 60))
    harness.wall_ns = lambda: written_ns + 3 * SECOND_NS
    one.ack(0, (60, 70), (90, 95))
    one.ack(0, (50, 100))  # partly acked before: counted once
    one.ack(0, (0, 100))
    latency = harness.info()["ack_latency"]
    assert latency == {**dict.fromkeys(BUCKET_NAMES, 0), "5": 60, "5000": 40}


def test_ack_latency_of_messages_handed_out_before_a_restart(harness):
    harness.produce(100)
    one = harness.join("a")
    one.fetch()
    rows = harness.store.read(harness.topic().number, 0, 0, 1)
    written_ns = int.from_bytes(rows.timestamps_ns, "little")
    harness.open()
    harness.wall_ns = lambda: written_ns + 3 * SECOND_NS
    one.ack(0, (0, 10), (20, 30))
    harness.produce(1)
    one.fetch()
    one.ack(0, (10, 20), (30, 101))
    latency = harness.info()["ack_latency"]
    assert latency == {**dict.fromkeys(BUCKET_NAMES, 0), "5000": 101}


@pytest.mark.parametrize(
    ("elapsed_ns", "bucket"),
    [
        (-5, "1"),
        (0, "1"),
        (10**6, "1"),
        (10**6 + 1, "2"),
        (59 * 10**9, "60000"),
        (61 * 10**9, "inf"),
    ],
)
def test_latency_is_counted_in_its_bucket(elapsed_ns, bucket):
    counts = CommitTimes().count_acked({}, [(0, 2)], elapsed_ns, lambda offset: 0)
    assert counts == {bucket: 2}


def test_ack_during_a_fetch_uses_whole_samples():
    """Fetches and acks of one shard are concurrent."""
    seen, counted = CommitTimes(), []

    def count():
        counted.append(seen.count_acked({}, [(3, 5)], SECOND_NS, lambda offset: None))

    class Times:
        """A column that an ack interrupts while it is read."""

        def __getitem__(self, rows):
            return self

        def tolist(self):
            ack.start()
            ack.join(0.1)
            return [0]

    ack = Thread(target=count)
    seen.add_samples(memoryview(array("q", [3])), cast(Any, Times()))
    ack.join()
    assert counted == [{"1000": 2}]


def columns(rows: Rows) -> tuple[memoryview, memoryview]:
    """Return columns of offsets and times."""
    offsets, times = (
        memoryview(one).cast("B").cast("q") for one in (rows.offsets, rows.timestamps_ns)
    )
    return offsets, times


def test_commit_time_samples_are_bounded_and_counts_exact(harness):
    def unknown(offset: int) -> None:
        pass

    number = harness.topic().number
    seen = CommitTimes()
    for _ in range(100):
        harness.produce(50)
    for start in range(0, 5000, 50):
        seen.add_samples(*columns(harness.store.read(number, 0, start, start + 50)))
    assert sum(seen.count_acked({}, [(4000, 5000)], SECOND_NS, unknown).values()) == 1000
    assert seen.count_acked({}, [(0, 10)], SECOND_NS, unknown) == {}  # the oldest are dropped
    seen.discard_below(4990)
    assert sum(seen.count_acked({}, [(4990, 5000)], SECOND_NS, unknown).values()) == 10
    assert seen.count_acked({"1": 7}, [(0, 10)], SECOND_NS, unknown) == {"1": 7}  # no sample
    seen.add_samples(*columns(harness.store.read(number, 0, 0, 50)))  # from the beginning again
    assert sum(seen.count_acked({}, [(0, 50)], SECOND_NS, unknown).values()) == 50


def test_a_commit_over_two_shards_is_seen_whole(harness):
    from polybus.testing.conformance.sample_blocks import block

    one = harness.join("a")
    one.fetch()
    number = harness.topic().number
    appends = (Append(number, 0, block(b"x")), Append(number, 3, block(b"y")))
    harness.store.commit(Commit(appends=appends)).result()
    assert [place["shard"] for place in one.fetch().places] == [0, 3]


def following(member):
    """A following fetch without changes to report."""
    fetching = member.harness.groups.open_fetch(
        member.harness.topic(), member.group, (member.consumer, member.epoch), member.held, MANY
    )
    assert not fetching.poll()
    assert not fetching.poll()
    return fetching


def test_following_fetch_returns_each_row_once(harness):
    one = harness.join("a")
    one.fetch()
    fetching = following(one)
    for turn in range(3):
        harness.produce(2, shard=turn)
        harness.produce(1, shard=3)
        fetched = fetching.poll()
        places = [(place["shard"], place["from"], place["to"]) for place in fetched.places]
        assert places == [(turn, 0, 2), (3, turn, turn + 1)]
        assert not fetched.is_change
        assert fetching.advance(fetched)
        one.ack(turn, (0, 2))
        assert not fetching.poll()


def test_following_fetch_reports_shards_to_release(harness):
    one = harness.join("a")
    one.fetch()
    fetching = following(one)
    harness.join("b")
    fetched = fetching.poll()
    assert fetched.is_change
    assert len(fetched.release) == 2


def test_following_fetch_reports_reassigned_shards(harness):
    harness.produce(3)
    one = harness.join("a")
    one.fetch()
    fetching = following(one)
    harness.groups.reset(harness.topic(), "g", "earliest", force=True)
    fetched = fetching.poll()
    assert fetched.is_change
    assert fetched.lost == [assignment["shard"] for assignment in fetched.assigned] == [0, 1, 2, 3]


def test_following_fetch_is_fenced_by_a_newer_member(harness):
    one = harness.join("a")
    one.fetch()
    fetching = following(one)
    harness.join("a")
    with pytest.raises(Fenced):
        fetching.poll()


def test_following_fetch_skips_paused_shards(harness):
    one = harness.join("a")
    one.fetch()
    one.held[1] = one.held[1]._replace(paused=True)
    fetching = following(one)
    harness.produce(2, shard=1)
    assert not fetching.poll()
    harness.produce(2, shard=2)
    assert [place["shard"] for place in fetching.poll().places] == [2]
