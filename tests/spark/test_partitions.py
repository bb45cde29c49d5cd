"""Property tests: plans and limits keep each row exactly once, positions survive JSON."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polybus.spark.source.partitions import (
    FEW_ROWS,
    OffsetRange,
    limit_bytes,
    limit_rows,
    plan_partitions,
)
from polybus.spark.source.query_position import QueryPosition

SIZES = st.lists(st.integers(1, 2_000_000), min_size=1, max_size=12)


def ranges_of(sizes: list[int]) -> list[OffsetRange]:
    return [
        OffsetRange("t", shard, shard * 7, shard * 7 + rows) for shard, rows in enumerate(sizes)
    ]


@given(SIZES, st.one_of(st.none(), st.integers(10_000, 10**7)))
def test_plan_has_every_offset_once(sizes, rows_per_partition):
    ranges = ranges_of(sizes)
    pieces = sorted(
        piece
        for partition in plan_partitions(ranges, rows_per_partition)
        for piece in partition.ranges
    )
    for whole in ranges:
        own = [piece for piece in pieces if piece.shard == whole.shard]
        assert (own[0].start, own[-1].end) == (whole.start, whole.end)
        assert all(partition.end == following.start for partition, following in pairwise(own))
    assert all(piece.rows > 0 for piece in pieces)


@given(SIZES)
def test_range_within_the_limit_is_not_split(sizes):
    ranges = ranges_of(sizes)
    partitions = plan_partitions(ranges, max(sizes))
    assert [piece for partition in partitions for piece in partition.ranges] == ranges
    assert max(partition.rows for partition in partitions) <= max(FEW_ROWS, *sizes)


@given(SIZES, st.integers(1, 10**7))
def test_row_limit_is_reached_and_not_exceeded(sizes, max_rows):
    ranges = ranges_of(sizes)
    admitted = limit_rows(ranges, max_rows)
    assert sum(part.rows for part in admitted) == min(max_rows, sum(sizes))
    for part, whole in zip(admitted, ranges, strict=True):
        assert whole.start == part.start <= part.end <= whole.end
    if max_rows >= len(ranges):
        assert all(part.rows for part in admitted)


@given(SIZES, st.integers(1, 10**9), st.lists(st.integers(0, 10**6), min_size=12, max_size=12))
def test_byte_limit_admits_a_message_and_is_not_exceeded(sizes, max_bytes, weights):
    ranges = ranges_of(sizes)
    admitted = limit_bytes(ranges, max_bytes, lambda part, _: float(weights[part.shard]))
    heavy = sum(part.rows * max(1, weights[part.shard]) for part in admitted)
    assert sum(part.rows for part in admitted) >= 1
    assert heavy <= max_bytes or sum(part.rows for part in admitted) == 1


OFFSETS = st.dictionaries(
    st.sampled_from(["a", "b", "ä"]),
    st.dictionaries(st.integers(0, 700), st.integers(0, 2**63 - 1), min_size=1, max_size=5),
    max_size=3,
)


@given(OFFSETS, OFFSETS, st.booleans())
def test_position_is_equal_after_a_json_round_trip(offsets, since, is_initial):
    position = QueryPosition(offsets, "q", is_initial, since)
    text = json.dumps(position.as_json())
    parsed = QueryPosition.parse(json.loads(text))
    assert parsed == position
    assert json.dumps(parsed.as_json()) == text
