"""Programs to be drawn: steps of a verb and small numbers, mostly such that they succeed."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

MOST_STEPS = 40

NAMES = ("t", "u", "ä")
KEYS = (b"k", b"k\0", b"ka", b"l", b"\xff")
PRODUCERS = ("p", "q")
DIGESTS = (b"", b"d")

ANY, CURRENT, NONE, OLD = range(4)  # the version that a change of a record expects
SEALED, UNKNOWN = 6, 7  # shards of a PutDraw; those below are open ones

Step = tuple[object, ...]
Steps = st.SearchStrategy[Step]


class PutDraw(NamedTuple):
    topic: int
    shard: int
    shapes: tuple[int, ...]  # per message: key, headers and length


class MarkDraw(NamedTuple):
    producer: int
    epoch: int  # relative to the right one
    counter: int  # relative to the last one
    digest: int


class WishDraw(NamedTuple):
    key: int
    value: bytes | None
    expected: int


class CommitDraw(NamedTuple):
    puts: tuple[PutDraw, ...] = ()
    stages: tuple[int, ...] = ()
    wishes: tuple[WishDraw, ...] = ()
    mark: MarkDraw | None = None


def _tuples(items: st.SearchStrategy[object], most: int, least: int = 0) -> Steps:
    return st.lists(items, min_size=least, max_size=most).map(tuple)


def _step(verb: str, *arguments: st.SearchStrategy[object]) -> Steps:
    return st.tuples(st.just(verb), *arguments)


small = st.integers(0, 7)
names = st.integers(0, len(NAMES) - 1)
producers = st.sampled_from([0, 0, 0, 1])
shards = st.sampled_from([None, None, 0, 0, 1, 2, 3, -1])
positions = st.integers(-1, 30) | st.sampled_from([0, 1 << 40])

puts = st.builds(
    PutDraw,
    st.integers(0, 20),
    st.sampled_from([*[*range(6)] * 6, SEALED, UNKNOWN]),
    _tuples(st.integers(0, 40), 4, least=1),
)
wishes = st.builds(
    WishDraw,
    st.integers(0, len(KEYS) - 1),
    st.sampled_from([b"", b"v", b"w" * 50, None]),
    st.sampled_from([ANY, ANY, CURRENT, CURRENT, CURRENT, NONE, OLD]),
)
marks = st.builds(
    MarkDraw,
    producers,
    st.sampled_from([0, 0, 0, 0, 0, 0, 0, 0, -1, 1]),
    st.sampled_from([1, 1, 1, 1, 1, 0, 0, 2, -1]),
    st.sampled_from([0, 0, 0, 1]),
)
plain_commits = st.lists(puts, min_size=1, max_size=3).map(lambda some: CommitDraw(tuple(some)))
commits = st.builds(
    CommitDraw,
    _tuples(puts, 4),
    _tuples(st.integers(0, 2), 2),
    _tuples(wishes, 3),
    st.none() | marks,
)

creates = _step("create", names, st.integers(1, 3))
writes = _step("commits", st.lists(commits | plain_commits, min_size=1, max_size=4))
stages = _step("stage", small, _tuples(puts, 3))
reads = _step(
    "read",
    small,
    shards,
    positions,
    st.none() | positions,
    st.sampled_from([1, 2, 3, 7, 65_536, 0, -1]),
    st.sampled_from([1, 10, 60, 1 << 24, 0]),
)

# Drawn from a list, for `one_of` would count a strategy once that is named several times.
verbs: list[Steps] = [
    *[creates] * 2,
    *[writes] * 8,
    *[_step("repeat", small)] * 2,
    *[stages] * 2,
    reads,
    _step("configure", names, st.integers(0, 2)),
    _step("drop", names),
    _step("open_producer", producers, st.booleans(), st.integers(1, 3)),
    _step("close_producer", producers, st.sampled_from([0, 0, 1, -1])),
    _step("open_stage"),
    _step("renew", small),
    _step("discard", small),
    _step("trim", small, st.dictionaries(st.integers(0, 3), st.integers(-1, 12), max_size=3)),
    _step("find", small, shards, st.integers(-30, 10)),
    _step("find_id", small, st.integers(0, 3), st.integers(-1, 30)),
    _step(
        "scan",
        st.sampled_from([b"", b"k", b"\xff"]),
        st.sampled_from([b"", b"k", b"ka"]),
        st.integers(1, 3),
    ),
    _step("tick", st.integers(-15, 20)),
    _step("reopen"),
    _step("tidy"),
]
steps = st.sampled_from(verbs).flatmap(lambda verb: verb)
programs = st.lists(steps, min_size=12, max_size=MOST_STEPS)
