"""Offset ranges against a model set of integers."""

from hypothesis import given
from hypothesis import strategies as st

from polybus.model.offset_ranges import (
    OffsetRanges,
    merge_ranges,
    ranges_from_offsets,
)

PAIRS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=30)


def as_set(low, ranges):
    return set(range(low)).union(*(range(a, b) for a, b in ranges))


@given(st.integers(0, 20), PAIRS)
def test_added_offsets_form_the_fewest_ranges(low, pairs):
    ranges, model = OffsetRanges(low), set(range(low))
    for start, length in pairs:
        ranges.add(start, start + length)
        model |= set(range(start, start + length))
    assert as_set(ranges.low, ranges) == model
    edges = [ranges.low, *(edge for pair in ranges for edge in pair)]
    assert edges == sorted(set(edges)), "they touch, or are not in order"
    assert len(ranges) == len(list(ranges))
    assert [at for at in range(80) if at in ranges] == sorted(model)


@given(st.integers(0, 20), PAIRS, st.integers(0, 70))
def test_touching_adds_no_range(low, pairs, offset):
    ranges = OffsetRanges(low, ((start, start + length) for start, length in pairs))
    touches, before = ranges.touches(offset), len(ranges)
    ranges.add(offset, offset + 1)
    assert touches == (len(ranges) <= before)


@given(st.integers(0, 20), PAIRS, st.integers(0, 70), st.integers(0, 10))
def test_overlaps(low, pairs, start, length):
    ranges = OffsetRanges(low, ((at, at + n) for at, n in pairs))
    done = any(at in ranges for at in range(start, start + length))
    assert ranges.overlaps(start, start + length) is done or length == 0


def test_low_water_mark_absorbs_touching_ranges():
    ranges = OffsetRanges(3, [(5, 7), (9, 10)])
    ranges.raise_low(6)
    assert (ranges.low, list(ranges)) == (7, [(9, 10)])
    ranges.raise_low(2)
    assert ranges.low == 7


@given(st.lists(st.integers(0, 40)))
def test_ranges_of_offsets_in_any_order(offsets):
    found = ranges_from_offsets(offsets)
    assert as_set(0, found) == set(offsets)
    assert found == merge_ranges(found)
