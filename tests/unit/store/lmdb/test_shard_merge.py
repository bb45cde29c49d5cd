"""Reads of all shards, page by page: each page goes on where the last one ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.model.commit import Append, Commit
from polybus.model.topic import ALL, Topic
from polybus.store.contract import MAX_READ_BYTES
from polybus.store.lmdb import shard_merge
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.shard_merge import MergePositions
from polybus.testing.conformance.sample_blocks import block, messages
from tests.rig.call_count import count_calls
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, put


class Found(NamedTuple):
    id: int
    shard: int
    offset: int


def read_page(
    store: LmdbStore,
    topic: Topic,
    from_id: int,
    below_id: int | None = None,
    max_rows: int = 1000,
    max_bytes: int = MAX_READ_BYTES,
) -> list[Found]:
    rows = store.read(topic.number, ALL, from_id, below_id, max_rows=max_rows, max_bytes=max_bytes)
    return [Found(one.id, one.shard, one.offset) for one in messages(rows)]


def read_shards(store: LmdbStore, topic: Topic, from_id: int) -> list[Found]:
    """Return all messages from an id on, read shard by shard."""
    found = []
    for shard, bounds in enumerate(store.bounds(topic.number).shards):
        for one in messages(store.read(topic.number, shard, bounds.start)):
            found.append(Found(one.id, one.shard, one.offset))
    return sorted(one for one in found if one.id >= from_id)


# --- the cost of a page -------------------------------------------------------


def calls_of_second_page(store: LmdbStore, shards: int) -> int:
    """Return the calls of a page with messages of two shards."""
    topic = store.create(f"t{shards}", shards, {})
    put(store, topic, 2, b"x")  # this shard ends in the first page
    for _ in range(20):
        put(store, topic, 0, *[b"x"] * 10)
        put(store, topic, 1, *[b"x"] * 10)
    first = read_page(store, topic, 0, max_rows=100)
    second = count_calls(lambda: store.read(topic.number, ALL, first[-1].id + 1, max_rows=100))
    assert read_page(store, topic, first[-1].id + 1)[0].id == first[-1].id + 1
    return second


def test_cost_of_a_page_does_not_grow_with_shards_without_messages_in_it(store: LmdbStore):
    assert calls_of_second_page(store, 256) == calls_of_second_page(store, 4)


def test_shards_with_messages_after_the_page_are_not_opened(store: LmdbStore):
    topic = store.create("t", 64, {})
    for shard in range(64):
        put(store, topic, shard, b"first")
    for shard in range(64):
        put(store, topic, shard, *[b"second"] * 50)
    first = read_page(store, topic, 0, max_rows=64)
    few = count_calls(lambda: store.read(topic.number, ALL, first[-1].id + 1, max_rows=50))
    many = count_calls(lambda: store.read(topic.number, ALL, first[-1].id, max_rows=50))
    assert few * 10 < many  # the second one begins where no page ended


def test_cost_of_the_end_does_not_grow_with_shards(store: LmdbStore):
    def calls_of_end(shards: int) -> int:
        number = store.create(f"t{shards}", shards, {}).number
        store.end(number, ALL)  # decodes the topic
        return count_calls(lambda: (store.end(number, ALL), store.end(number, 1)))

    assert calls_of_end(256) == calls_of_end(2)


# --- the same messages as without it ------------------------------------------


def test_reader_at_the_end_gets_later_messages_of_every_shard(store: LmdbStore):
    topic = store.create("t", 3, {})
    put(store, topic, 1, b"a")
    (last,) = read_page(store, topic, 0)
    assert read_page(store, topic, last.id + 1) == []
    for shard in (2, 0, 1):
        put(store, topic, shard, b"later")
    assert [one.shard for one in read_page(store, topic, last.id + 1)] == [2, 0, 1]


def test_shard_that_ended_in_a_page_goes_on_with_its_later_messages(store: LmdbStore):
    topic = store.create("t", 2, {})
    for shard in (1, 0, 0):
        put(store, topic, shard, b"x")
    first = read_page(store, topic, 0, max_rows=2)
    for shard in (1, 0):
        put(store, topic, shard, b"x")
    second = read_page(store, topic, first[-1].id + 1, max_rows=2)
    assert [one.id for one in first + second] == [1, 2, 3, 4]


def test_shard_that_was_opened_in_vain_goes_on_with_its_later_messages(store: LmdbStore):
    topic = store.create("t", 2, {})
    found: list[Found] = []
    for shards in ((0, 0), (0, 0), (1, 0)):  # the second page opens shard 1, which is empty
        for shard in shards:
            put(store, topic, shard, b"x")
        found += read_page(store, topic, len(found) + 1, max_rows=1 if not found else 2)
    assert [one.id for one in found] == [1, 2, 3, 4, 5]


def test_page_after_a_trim_skips_the_trimmed_messages(store: LmdbStore):
    topic = store.create("t", 2, {})
    for shard in (0, 1, 0, 1, 0, 1):
        put(store, topic, shard, b"x", b"x")
    first = read_page(store, topic, 0, max_rows=3)
    store.trim(topic.number, {0: 6, 1: 3})
    assert read_page(store, topic, first[-1].id + 1) == read_shards(store, topic, 0)


def test_page_after_shards_were_added_has_their_messages(store: LmdbStore):
    topic = store.create("t", 1, {})
    put(store, topic, 0, b"a", b"b")
    first = read_page(store, topic, 0, max_rows=1)
    grown = store.configure("t", {}, add_shards=2)
    for shard in (2, 1):
        put(store, grown, shard, b"c")
    assert read_page(store, grown, first[-1].id + 1) == read_shards(store, grown, 0)[1:]


def test_positions_of_a_topic_do_not_serve_a_later_one_of_its_name(store: LmdbStore):
    topic = store.create("t", 2, {})
    for shard in (0, 1):
        put(store, topic, shard, b"x")
    first = read_page(store, topic, 0, max_rows=1)
    store.drop("t")
    again = store.create("t", 2, {})
    for shard in (1, 0, 1):
        put(store, again, shard, b"y")
    assert read_page(store, again, first[-1].id + 1) == read_shards(store, again, 0)


def test_page_whose_bytes_were_underestimated_loses_no_entry(store: LmdbStore):
    """Bytes are estimated from the average of a block, so the page collects entries in vain."""
    topic = store.create("t", 1, {})
    put(store, topic, 0, *[b"x"] * 9, bytes(900))
    for _ in range(5):
        put(store, topic, 0, bytes(300))
    first = read_page(store, topic, 0, max_rows=9)
    second = read_page(store, topic, first[-1].id + 1, max_bytes=1000)
    third = read_page(store, topic, second[-1].id + 1)
    assert [one.offset for one in first + second + third] == list(range(15))


def test_kept_positions_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shard_merge, "MAX_KEPT", 10)
    kept = MergePositions()
    for at_id in range(5):
        kept.put(1, at_id, [(at_id, shard, 0) for shard in range(4)])
        kept.put(1, 0, [(0, shard, 0) for shard in range(4)])  # used again each time
    assert [at_id for at_id in range(5) if kept.get(1, at_id)] == [0, 4]
    kept.put(1, 9, [(9, shard, 0) for shard in range(11)])  # alone it may be larger
    assert [at_id for at_id in range(10) if kept.get(1, at_id)] == [9]


SHARDS = st.integers(0, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.tuples(SHARDS, st.integers(1, 9)), min_size=1)),
        st.tuples(st.just("trim"), SHARDS, st.integers(0, 30)),
        st.tuples(st.just("reshard")),
        st.tuples(
            st.just("page"),
            st.integers(0, 1),  # which reader
            st.integers(1, 12),
            st.sampled_from((1, 500, MAX_READ_BYTES)),
            st.one_of(st.none(), st.integers(1, 20)),
        ),
    ),
    max_size=40,
)


class World:
    """A topic with readers that page through it."""

    def __init__(self, store: LmdbStore, name: str) -> None:
        self.store = store
        self.topic = store.create(name, 4, {})
        self.first, self.last = 0, 4  # shards of the newest generation
        self.at = [0, 0]

    def do(self, verb: str, *rest: object) -> None:
        getattr(self, verb)(*rest)

    def append(self, parts: list[tuple[int, int]]) -> None:
        appends = {
            self.first + shard: [b"x"] * (count - 1) + [bytes(400)] for shard, count in parts
        }
        commit = Commit(
            tuple(Append(self.topic.number, n, block(*bodies)) for n, bodies in appends.items())
        )
        self.store.commit(commit).result(TIMEOUT_S)

    def trim(self, shard: int, before: int) -> None:
        self.store.trim(self.topic.number, {shard: before})

    def reshard(self) -> None:
        if self.last < 12:
            self.topic = self.store.configure(self.topic.name, {}, add_shards=4)
            self.first, self.last = self.last, self.last + 4

    def page(self, reader: int, max_rows: int, max_bytes: int, span: int | None) -> None:
        at = self.at[reader]
        below = None if span is None else at + span
        wanted = read_shards(self.store, self.topic, at)
        if below is not None:
            wanted = [one for one in wanted if one.id < below]
        page = read_page(self.store, self.topic, at, below, max_rows, max_bytes)
        assert page == wanted[: len(page)]
        assert bool(page) == bool(wanted)
        if page:
            self.at[reader] = page[-1].id + 1


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path_factory.mktemp("store")) as store:
        yield store


NAMES = iter(range(1 << 30))


@settings(max_examples=200)
@given(steps=STEPS)
def test_pages_are_the_messages_of_all_shards_in_order(shared: LmdbStore, steps: list[tuple]):
    world = World(shared, f"t{next(NAMES)}")
    for step in steps:
        world.do(*step)
    for reader in (0, 1):
        while read_shards(shared, world.topic, world.at[reader]):
            world.page(reader, 1000, MAX_READ_BYTES, None)
    shared.drop(world.topic.name)
