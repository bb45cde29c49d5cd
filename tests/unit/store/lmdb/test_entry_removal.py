"""Removal of trimmed, dropped and discarded entries: in steps, and continued after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from polybus.model.commit import Commit
from polybus.model.topic import Topic
from polybus.store.lmdb import staged_blocks, store_keys, topic_catalog, write_txn
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.quarantine import Quarantine
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.write_txn import TransactionWriter
from polybus.store.lmdb.writer_state import WriterState
from polybus.testing.conformance.kit import all_bodies
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, count, entries, put, stage


def filled(path: Path, *, extents: int = 0) -> tuple[LmdbStore, Topic]:
    store = LmdbStore(path)
    topic = store.create("t", 1, {})
    for number in range(30):
        put(store, topic, 0, b"%d" % number)
    for number in range(extents):
        name = stage(store, topic, *[(b"%d" % number, b"s")] * 4)
        store.commit(Commit(stages=(name,))).result(TIMEOUT_S)
    return store, topic


@pytest.fixture
def cut_short(monkeypatch):
    """Execute a change as the writer does, and stop after the first step of removal."""
    monkeypatch.setattr(write_txn, "REMOVAL_S", 0.0)

    def act(path, change) -> None:
        files = StoreFiles(path, read_only=False)
        state = WriterState(files.snapshot, lambda: 0.0, Quarantine())
        change(state)
        TransactionWriter(files).write(state.take_batch())
        files.close()

    return act


def test_interrupted_trim_continues(tmp_path, cut_short):
    store, topic = filled(tmp_path, extents=3)
    store.close()
    cut_short(tmp_path, lambda state: topic_catalog.trim(state, topic.number, {0: 50}))
    assert count(tmp_path, store_keys.REMOVALS) == 1
    assert count(tmp_path, store_keys.LOG) > 30
    with LmdbStore(tmp_path, read_only=True) as reader:
        assert reader.bounds(topic.number).shards[0].start == 50
        assert all_bodies(reader, topic) == [b"2", b"s"] * 2
    with LmdbStore(tmp_path) as store:
        store.reblock()
        assert count(tmp_path, store_keys.REMOVALS) == 0
        assert all_bodies(store, topic) == [b"2", b"s"] * 2
        store.trim(topic.number, {0: 54})
        store.reblock()
        assert entries(store) == count(tmp_path, store_keys.STAGED) == 0


def test_interrupted_drop_continues(tmp_path, cut_short):
    store, topic = filled(tmp_path, extents=3)
    kept = store.create("kept", 1, {})
    put(store, kept, 0, b"k")
    store.close()
    cut_short(tmp_path, lambda state: topic_catalog.drop(state, "t"))
    assert count(tmp_path, store_keys.log_of_topic(topic.number)) > 0
    with LmdbStore(tmp_path) as store:
        assert [one.name for one in store.topics()] == ["kept"]
        again = store.create("t", 1, {})
        store.reblock()
        for prefix in (
            store_keys.REMOVALS,
            store_keys.STAGED,
            store_keys.log_of_topic(topic.number),
            store_keys.state(topic.number),
            store_keys.upkeep_of_topic(topic.number),
        ):
            assert count(tmp_path, prefix) == 0
        assert put(store, again, 0, b"x").spans[0][2:4] == (54, 55)
        assert all_bodies(store, kept) == [b"k"]


def test_interrupted_discard_continues(tmp_path, cut_short):
    store, topic = filled(tmp_path)
    name = stage(store, topic, *[(b"x",)] * 20)
    store.close()
    cut_short(
        tmp_path, lambda state: staged_blocks.collect(state, staged_blocks.stage_number(name))
    )
    assert 0 < count(tmp_path, store_keys.STAGED) < 20
    with LmdbStore(tmp_path) as store:
        store.reblock()
        assert count(tmp_path, store_keys.STAGED) == count(tmp_path, store_keys.STAGES) == 0


def test_extent_is_trimmed_block_by_block(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        first = stage(store, topic, (b"a", b"b"), (b"c",))
        second = stage(store, topic, (b"d",), (b"e", b"f"))
        store.commit(Commit(stages=(first, second))).result(TIMEOUT_S)
        assert entries(store) == 1
        for start, left, blocks in (
            (1, [b"b", b"c", b"d", b"e", b"f"], 4),
            (2, [b"c", b"d", b"e", b"f"], 3),
            (5, [b"f"], 1),
            (6, [], 0),
        ):
            store.trim(topic.number, {0: start})
            assert all_bodies(store, topic) == left
            assert count(tmp_path, store_keys.STAGED) == blocks
        assert entries(store) == 0
        assert store.bounds(topic.number) == (7, 7, *store.bounds(topic.number)[2:])


def test_sizes_return_to_zero(tmp_path):
    store, topic = filled(tmp_path, extents=2)
    with store:
        sizes = [store.bounds(topic.number).shards[0].size_bytes]
        for start in (10, 29, 35, 45):
            store.trim(topic.number, {0: start})
            store.reblock()
            sizes.append(store.bounds(topic.number).shards[0].size_bytes)
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] > 0
        put(store, topic, 0, b"z")
        store.trim(topic.number, {0: 46})
        store.reblock()
        alone = store.bounds(topic.number).shards[0]
        assert (alone.start, alone.end) == (46, 47)
        assert alone.size_bytes == entry_size(store, topic)


def entry_size(store: LmdbStore, topic: Topic) -> int:
    """Return the kind of the entry at the start of the shard."""
    with store._files.snapshot() as transaction:
        entry = EntryCursor(transaction, topic.number, 0, "t").seek(46)
        assert entry is not None
        return entry.charged


@pytest.mark.parametrize("durability", ["fsync", "interval"])
def test_expired_stages_are_removed(tmp_path, durability):
    now_s = [0.0]
    with LmdbStore(tmp_path, durability=durability, clock_s=lambda: now_s[0]) as store:
        topic = store.create("t", 1, {})
        stage(store, topic, (b"a",))
        kept = store.open_stage(1e6)
        now_s[0] = 1000.0
        put(store, topic, 0, b"b")  # the writer checks leases after each group
        store._run_alone(lambda: None)
        store.reblock()
        assert count(tmp_path, store_keys.STAGED) == 0
        assert count(tmp_path, store_keys.STAGES) == 1
        store.renew(kept)
