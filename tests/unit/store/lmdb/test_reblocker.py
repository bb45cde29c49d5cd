"""Small blocks become large ones; nothing that can be read changes by it."""

from __future__ import annotations

import pytest

from polybus.errors import Damaged
from polybus.model.commit import Append, Commit
from polybus.store.lmdb import store_keys
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import Clock, Contents, all_bodies, all_messages, contents
from polybus.testing.conformance.sample_blocks import block, messages
from tests.rig.observer import until
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, count, entries, put, stage


def same_but_sizes(before: Contents, after: Contents) -> bool:
    return (before.topics, before.messages, before.records) == (
        after.topics,
        after.messages,
        after.records,
    )


def test_small_neighbours_are_merged_and_keep_their_runs(tmp_path):
    clock = Clock()
    with LmdbStore(tmp_path, wall_ns=clock) as store:
        topic = store.create("t", 2, {})
        for number in range(300):
            clock.ns += number % 3  # some commits have the same time
            put(store, topic, number % 2, b"%d" % number, b"x" * number)
        before, many = contents(store), entries(store)
        assert store.reblock() > 0
        assert entries(store) == 2 < many
        after = contents(store)
        assert same_but_sizes(before, after)
        assert after.bounds[0].shards[0].size_bytes < before.bounds[0].shards[0].size_bytes


def test_later_entries_are_merged_later(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for _ in range(2):
            for number in range(10):
                put(store, topic, 0, b"%d" % number)
            store.reblock()
        assert entries(store) == 2
        assert store.reblock() == 0 or entries(store) == 2
        assert [message.offset for message in all_messages(store, topic)] == list(range(20))


def test_large_blocks_are_not_merged(tmp_path):
    large = b"x" * (100 << 10)
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for bodies in ((large,), (large,), (b"a",), (b"b",), (large,), (b"c",)):
            put(store, topic, 0, *bodies)
        before = contents(store)
        store.reblock()
        assert same_but_sizes(before, contents(store))
        # large, large, a+b+large+c: a large entry completes a small group
        assert entries(store) == 3


def test_reblocking_runs_in_the_background(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        body = b"x" * 8192
        for _ in range(200):
            put(store, topic, 0, body)
        until(lambda: entries(store) < 100, "small entries were merged")
        assert len(all_messages(store, topic)) == 200


def test_reblocking_continues_after_reopening(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for number in range(50):
            put(store, topic, 0, b"%d" % number)
        before = contents(store)
    with LmdbStore(tmp_path) as store:
        store.reblock()
        assert entries(store) == 1
        assert same_but_sizes(before, contents(store))
    with LmdbStore(tmp_path, read_only=True) as reader:
        assert same_but_sizes(before, contents(reader))


def test_small_extents_are_merged(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"first")
        for number in range(5):
            name = stage(store, topic, (b"%d" % number, b"y"), (b"z",))
            store.commit(Commit(stages=(name,))).result(TIMEOUT_S)
        before = contents(store)
        store.reblock()
        assert entries(store) == 1
        assert same_but_sizes(before, contents(store))
        store.trim(topic.number, {0: 16})
        assert store.bounds(topic.number).shards[0] == (16, 16, 0)


def test_trimmed_entries_are_not_merged(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for number in range(40):
            put(store, topic, 0, b"%d" % number)
        store.trim(topic.number, {0: 17})
        before = all_messages(store, topic)
        store.reblock()
        assert all_messages(store, topic) == before
        store.trim(topic.number, {0: 40})
        store.reblock()
        assert entries(store) == 0


def test_optional_columns_survive_a_merge(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for made in (
            block(b"a"),
            block(b"b", b"c", keys=["k", None]),
            block(b"d", headers=[{"h": b"v"}]),
            block(b"e", keys=["ä"], headers=[None], insertion_ms=7),
        ):
            store.commit(Commit((Append(topic.number, 0, made),))).result(TIMEOUT_S)
        before = all_messages(store, topic)
        store.reblock()
        assert entries(store) == 1
        assert all_messages(store, topic) == before


def test_damaged_entries_are_not_merged(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for number in range(20):
            put(store, topic, 0, b"body %02d" % number)
    file = tmp_path / "0001" / "data.mdb"
    file.write_bytes(file.read_bytes().replace(b"body 07", b"bodY 07"))
    with LmdbStore(tmp_path) as store:
        store.reblock()
        assert entries(store) == 20
        assert messages(store.read(topic.number, 0, 8))[-1].body == b"body 19"
        with pytest.raises(Damaged, match="topic 't', shard 0, offset 7"):
            store.read(topic.number, 0, 7)
        for _ in range(20):
            put(store, topic, 0, b"more")
        store.reblock()
        assert entries(store) == 21
        assert len(messages(store.read(topic.number, 0, 8))) == 32


def test_partly_trimmed_extent_is_not_merged(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        name = stage(store, topic, (b"a",), (b"b",), (b"c",))
        store.commit(Commit(stages=(name,))).result(TIMEOUT_S)
        store.trim(topic.number, {0: 1})
        for _ in range(3):
            put(store, topic, 0, b"d")
        store.reblock()
        assert entries(store) == 2
        assert all_bodies(store, topic) == [b"b", b"c", b"d", b"d", b"d"]


def test_dropped_topic_leaves_no_entries(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        for _ in range(5):
            put(store, topic, 0, b"x" * 60_000)
        store.drop("t")
        store.reblock()
        assert (
            entries(store)
            == count(tmp_path, store_keys.UPKEEP)
            == count(tmp_path, store_keys.STATE)
            == 0
        )
