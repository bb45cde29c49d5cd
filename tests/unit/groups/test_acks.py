"""Acks against a model set of offsets; each failed run is counted once."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from polybus.errors import LimitReached, MalformedRequest
from polybus.groups import shard_progress
from polybus.groups.group_records import ShardProgress
from polybus.groups.shard_progress import FailureReport, ShardReport
from polybus.model import offset_ranges

RANGE = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda one: (one[0], sum(one)))
END = 100


def offsets(low: int, above: offset_ranges.Ranges) -> set[int]:
    return set(range(low)) | {n for start, end in above for n in range(start, end)}


@given(st.integers(0, 20), st.lists(st.lists(RANGE, max_size=5), max_size=8))
def test_ranges_are_a_set_of_offsets(start, calls):
    progress = ShardProgress(start=start, low=start)
    model = set(range(start))
    for acked in calls:
        for one in acked:
            fresh = offset_ranges.unacked_parts(progress.low, progress.ranges, [one])
            assert [n for a, b in fresh for n in range(a, b)] == sorted({*range(*one)} - model)
        progress = shard_progress.ack_ranges(progress, acked)
        model |= {n for a, b in acked for n in range(a, b)}
        assert offsets(progress.low, progress.ranges) == model
        assert progress.acked == len(model) - start
        # Ascending, and touching neither each other nor the low-water mark.
        edges = [progress.low, *(edge for one in progress.ranges for edge in one)]
        assert all(a < b for a, b in itertools.pairwise(edges))
        for before in (0, start, 30, END):
            missing = offset_ranges.count_unacked(progress.low, progress.ranges, before)
            assert missing == len(set(range(before)) - model)
        for offset in range(END):
            contained = offset_ranges.contains(progress.low, progress.ranges, offset)
            assert contained == (offset in model)


@given(st.lists(RANGE, max_size=6), st.lists(RANGE, max_size=6), st.integers(0, END))
def test_trimming_counts_unread_messages(acked, later, start):
    progress = shard_progress.ack_ranges(ShardProgress(), acked)
    unread = offset_ranges.count_unacked(progress.low, progress.ranges, start)
    trimmed = shard_progress.skip_trimmed(progress, start)
    assert trimmed.trimmed_unread == unread
    assert trimmed.low >= start
    assert trimmed.acked == progress.acked
    again = shard_progress.ack_ranges(trimmed, later)
    assert offsets(again.low, again.ranges) >= set(range(start))


def test_ack_clears_attempts_and_suspect_mark():
    progress = ShardProgress(attempts={3: 1, 7: 2}, suspect_to=5)
    progress = shard_progress.ack_ranges(progress, [(0, 4)])
    assert progress.attempts == {7: 2}
    assert progress.suspect_to == 5
    assert shard_progress.ack_ranges(progress, [(4, 6)]).suspect_to == 0


def test_failed_run_is_counted_once():
    progress = ShardProgress()
    for attempt in (0, 0, 1, 1, 0):  # each reported twice, and one very late
        entry = ShardReport(0, 1, failed=(FailureReport(5, "", attempt),))
        progress = shard_progress.apply_report(progress, entry, END, 10).progress
    assert progress.attempts == {5: 2}
    entry = ShardReport(0, 1, failed=(FailureReport(5),))
    outcome = shard_progress.apply_report(progress, entry, END, 3)
    assert outcome.attempts == {5: 3}
    assert [(one.offset, one.deliveries) for one in outcome.exhausted] == [(5, 3)]


def test_failure_of_an_acked_message_is_ignored():
    entry = ShardReport(
        0, 1, ((0, 2), (5, 6)), (FailureReport(1), FailureReport(5), FailureReport(2))
    )
    outcome = shard_progress.apply_report(ShardProgress(), entry, END, 1)
    assert outcome.attempts == {2: 1}
    assert [one.offset for one in outcome.exhausted] == [2]


def test_ack_beyond_the_end_of_the_shard_is_refused():
    for entry in (
        ShardReport(0, 1, ((0, END + 1),)),
        ShardReport(0, 1, failed=(FailureReport(END),)),
    ):
        with pytest.raises(MalformedRequest):
            shard_progress.apply_report(ShardProgress(), entry, END, 5)


def test_ranges_are_limited():
    many = [(2 * n + 1, 2 * n + 2) for n in range(shard_progress.MAX_RANGES)]
    full = shard_progress.ack_ranges(ShardProgress(), many)
    assert len(full.ranges) == shard_progress.MAX_RANGES
    beyond = 2 * shard_progress.MAX_RANGES + 5
    with pytest.raises(LimitReached) as caught:
        shard_progress.ack_ranges(full, [(beyond, beyond + 1)])
    assert caught.value.limit == "max_ranges"
    assert shard_progress.ack_ranges(full, [(2, 3)]).low == 0  # joins two ranges
    assert shard_progress.ack_ranges(full, [(0, 1)]).low == 2
    last = full.ranges[-1][1]
    assert (
        len(shard_progress.ack_ranges(full, [(last, last + 9)]).ranges) == shard_progress.MAX_RANGES
    )


def test_attempts_are_limited():
    full = ShardProgress(attempts=dict.fromkeys(range(shard_progress.MAX_ATTEMPTS), 1))
    beyond = shard_progress.MAX_ATTEMPTS
    with pytest.raises(LimitReached) as caught:
        shard_progress.record_failures(full, 0, [FailureReport(beyond)], 5)
    assert caught.value.limit == "max_attempts"
    assert shard_progress.record_failures(full, 0, [FailureReport(0)], 5).attempts == {0: 2}
