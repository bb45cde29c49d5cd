"""How much a part of a replay reads, by how much of it was written."""

from __future__ import annotations

import pytest

from polybus.spark.pipelines.replay.replay_loop import MOST_GROWTH, PART_S, ReplayPace

RATE, MOST = 1000, 500_000
SECOND = int(RATE * PART_S)


def after(pace: ReplayPace, *written: int) -> int:
    for one in written:
        pace.adapt(one)
    return pace.rows


def test_without_a_filter_each_part_is_a_second():
    assert after(ReplayPace(MOST, RATE)) == SECOND
    assert after(ReplayPace(MOST, RATE), SECOND, SECOND, SECOND) == SECOND


@pytest.mark.parametrize("kept", [0, 0.001, 0.1])
def test_where_few_are_let_through_more_is_read(kept):
    pace = ReplayPace(MOST, RATE)
    written = 0.0
    for _ in range(20):
        written = pace.rows * kept
        pace.adapt(int(written))
        assert pace.rows <= SECOND * MOST_GROWTH
    assert SECOND / 2 < written <= SECOND or pace.rows == SECOND * MOST_GROWTH


def test_when_all_are_let_through_again_it_is_a_second_again():
    assert after(ReplayPace(MOST, RATE), 0, 0, 0) == 8 * SECOND
    assert after(ReplayPace(MOST, RATE), 0, 0, 0, 8 * SECOND) == SECOND


def test_never_more_than_a_part_may_have():
    assert after(ReplayPace(100, RATE), 0, 0) == 100
    assert after(ReplayPace(MOST, None), 0, 10, MOST) == MOST
    assert after(ReplayPace(MOST, 0.1)) == 1
