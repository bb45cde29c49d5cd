"""Records round-trip, and invalid bytes are reported as damaged."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from polybus.errors import Damaged, MalformedRequest
from polybus.groups import group_records
from polybus.groups.group_records import Member, Roster, ShardProgress

COUNT = st.integers(0, 2**62)
NAME = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=32)


@given(
    st.builds(
        ShardProgress,
        epoch=COUNT,
        owner=st.none() | NAME,
        member=COUNT,
        start=COUNT,
        low=COUNT,
        ranges=st.lists(st.tuples(COUNT, COUNT)).map(tuple),
        attempts=st.dictionaries(COUNT, COUNT),
        suspect_to=COUNT,
        emitted=COUNT,
        redelivered=COUNT,
        counted=st.tuples(COUNT, COUNT),
        dead_lettered=COUNT,
        trimmed_unread=COUNT,
        latency=st.dictionaries(NAME, COUNT),
    )
)
def test_progress_round_trip(progress):
    assert group_records.decode_progress(group_records.encode_progress(progress)) == progress


@given(COUNT, COUNT, st.dictionaries(NAME, st.builds(Member, COUNT, COUNT, COUNT, COUNT)), NAME)
def test_roster_round_trip(generation, next_epoch, members, creator):
    roster = Roster(generation, next_epoch, members, creator)
    assert group_records.decode_roster(group_records.encode_roster(roster)) == roster


@given(st.integers(0, 2**32 - 1), NAME)
def test_a_key_names_topic_and_group(number, name):
    key = group_records.roster_key(number, name)
    assert group_records.read_roster_key(key) == (number, name)
    assert not group_records.shard_key(number, name, 7).startswith(group_records.ROSTERS)
    assert group_records.shard_key(number, name, 7).startswith(
        group_records.shard_prefix(number, name)
    )


def test_group_prefixes_are_disjoint():
    assert not group_records.shard_key(1, "ab", 0).startswith(group_records.shard_prefix(1, "a"))


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"1", b'{"ranges":[1]}', b'{"wrong":1}', b"\xff"]
)
def test_damaged_records_are_refused(raw):
    with pytest.raises(Damaged):
        group_records.decode_progress(raw)
    with pytest.raises(Damaged):
        group_records.decode_roster(raw)


@pytest.mark.parametrize("name", ["", "a" * 129, "ä" * 65, "a\0b", "a\nb", "\x7f", "\x85"])
def test_invalid_names_are_refused(name):
    with pytest.raises(MalformedRequest):
        group_records.check_name("group", name)


@pytest.mark.parametrize("name", ["a", "a" * 128, "ä" * 64, "a b", "x/y*,"])
def test_valid_names_are_accepted(name):
    assert group_records.check_name("group", name) == name


def test_the_largest_records_fit():
    from polybus.groups.shard_progress import MAX_ATTEMPTS, MAX_RANGES
    from polybus.model.commit import MAX_KEY_BYTES, MAX_RECORD_BYTES
    from polybus.model.limits import NativeLimits

    high = 2**62
    ranges = tuple((high + 2 * n, high + 2 * n + 1) for n in range(MAX_RANGES + MAX_ATTEMPTS))
    attempts = {high + n: 1_000_000 for n in range(MAX_ATTEMPTS)}
    progress = ShardProgress(
        owner="\\" * group_records.MAX_NAME_BYTES, ranges=ranges, attempts=attempts
    )
    assert len(group_records.encode_progress(progress)) <= MAX_RECORD_BYTES
    most = NativeLimits().max_members
    names = [f"{n:04}".ljust(group_records.MAX_NAME_BYTES, '"') for n in range(most)]
    member = Member(2**40, 1_000_000, 3_600_000, 3_600_000)
    roster = Roster(2**40, 2**40, dict.fromkeys(names, member))
    assert len(group_records.encode_roster(roster)) <= MAX_RECORD_BYTES
    assert len(group_records.shard_key(1, "a" * group_records.MAX_NAME_BYTES, 1)) <= MAX_KEY_BYTES
