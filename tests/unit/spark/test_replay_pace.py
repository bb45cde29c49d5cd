"""The size of a replay's parts follows the number of rows written."""

from __future__ import annotations

import pytest

from polybus.spark.pipelines.replay import MOST_GROWTH, PART_S, ReplayPace

RATE, MOST = 1000, 500_000
SECOND = int(RATE * PART_S)


def after(pace: ReplayPace, *written: int) -> int:
    for rows in written:
        pace.adapt(rows)
    return pace.rows


def test_part_is_one_second_without_a_filter():
    assert after(ReplayPace(MOST, RATE)) == SECOND
    assert after(ReplayPace(MOST, RATE), SECOND, SECOND, SECOND) == SECOND


@pytest.mark.parametrize("kept", [0, 0.001, 0.1])
def test_part_grows_if_the_filter_matches_few_rows(kept):
    pace = ReplayPace(MOST, RATE)
    written = 0.0
    for _ in range(20):
        written = pace.rows * kept
        pace.adapt(int(written))
        assert pace.rows <= SECOND * MOST_GROWTH
    assert SECOND / 2 < written <= SECOND or pace.rows == SECOND * MOST_GROWTH


def test_part_shrinks_if_the_filter_matches_all_rows_again():
    assert after(ReplayPace(MOST, RATE), 0, 0, 0) == 8 * SECOND
    assert after(ReplayPace(MOST, RATE), 0, 0, 0, 8 * SECOND) == SECOND


def test_part_is_limited_by_most_rows():
    assert after(ReplayPace(100, RATE), 0, 0) == 100
    assert after(ReplayPace(MOST, None), 0, 10, MOST) == MOST
    assert after(ReplayPace(MOST, 0.1)) == 1
