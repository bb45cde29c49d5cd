"""Which shards of a resharded topic a group may read."""

from __future__ import annotations

from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from polybus.groups.shard_phases import ShardPhase, find_phases
from polybus.model.topic import ShardBounds, Topic, parents_of

SIZES = st.integers(1, 12)


@given(SIZES, SIZES, st.integers(0, 20))
def test_parents_are_exactly_the_shards_that_share_a_key(before, after, first):
    shards = range(first, first + before)
    for index in range(after):
        # The hashes below the least common multiple show every pair of indexes.
        shared = {shards[h % before] for h in range(lcm(before, after)) if h % after == index}
        assert set(parents_of(index, after, shards)) == shared


def test_first_generation_has_no_parents():
    assert list(parents_of(3, 4, range(0))) == []


@st.composite
def states(draw):
    generations = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    topic = Topic("t", 1, generations)
    bounds, lows = [], []
    for _ in topic.shards:
        end = draw(st.integers(0, 2))
        bounds.append(ShardBounds(draw(st.integers(0, end)), end, 0))
        lows.append(draw(st.integers(0, end)))
    return topic, lows, bounds


@given(states())
def test_phases_equal_those_of_a_plain_recursion(state):
    topic, lows, bounds = state
    generations = topic.shards_by_generation

    def is_passed(number: int, index: int) -> bool:
        """Return whether a shard and all before it are read."""
        shard = generations[number][index]
        is_read = lows[shard] >= bounds[shard].end or bounds[shard].start >= bounds[shard].end
        return is_read and is_ready(number, index)

    def is_ready(number: int, index: int) -> bool:
        if number == 0:
            return True
        before, after = len(generations[number - 1]), len(generations[number])
        shared = {h % before for h in range(lcm(before, after)) if h % after == index}
        return all(is_passed(number - 1, parent) for parent in shared)

    found = find_phases(topic, lows, bounds)
    for number, shards in enumerate(generations):
        for index, shard in enumerate(shards):
            is_sealed = number + 1 < len(generations)
            if not is_ready(number, index):
                wanted = ShardPhase.WAITING
            elif is_sealed and is_passed(number, index):
                wanted = ShardPhase.DRAINED
            else:
                wanted = ShardPhase.ACTIVE
            assert found[shard] is wanted
