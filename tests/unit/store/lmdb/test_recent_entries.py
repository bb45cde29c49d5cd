"""The cache of recent entries serves tail readers without LMDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus.errors import DoesNotExist, Trimmed
from polybus.model.commit import Commit
from polybus.model.rows import Rows
from polybus.store.contract import ShardRange
from polybus.store.lmdb import recent_entries
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import append, put
from polybus.testing.conformance.sample_blocks import messages

MANY = 100


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path) as opened:
        yield opened


@pytest.fixture
def lmdb_reads(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each read of LMDB."""
    found: list[int] = []
    read = store._reader.read_parts

    def looked(*given: Any) -> Rows:
        found.append(1)
        return read(*given)

    monkeypatch.setattr(store._reader, "read_parts", looked)
    return found


def read(store: LmdbStore, number: int, *starts: tuple[int, int]) -> list[bytes]:
    parts = [ShardRange(shard, start, MANY, MANY) for shard, start in starts]
    return [one.body for one in messages(store.read_parts(number, parts))]


def test_tail_reader_is_served_from_memory(store, lmdb_reads):
    topic = store.create("t", 2, {})
    for at in range(recent_entries.MAX_ENTRIES + 2):
        put(store, append(topic, 0, b"a%d" % at), append(topic, 1, b"b%d" % at))
    last = recent_entries.MAX_ENTRIES + 1
    assert read(store, topic.number, (1, last), (0, last - 1)) == [
        b"b%d" % last,
        b"a%d" % (last - 1),
        b"a%d" % last,
    ]
    assert not lmdb_reads
    assert len(read(store, topic.number, (0, 0))) == last + 1  # the first left the cache
    assert read(store, topic.number, (0, last + 1)) == []
    assert len(lmdb_reads) >= 2


def test_parts_have_their_limits(store, lmdb_reads):
    topic = store.create("t", 1, {})
    for at in range(4):
        put(store, append(topic, 0, b"%d" % at, b"+%d" % at))
    wanted = [ShardRange(0, 1, 7, 4)]
    assert [one.body for one in messages(store.read_parts(topic.number, wanted))] == [
        b"+0",
        b"1",
        b"+1",
        b"2",
    ]
    assert store.read_parts(topic.number, wanted, max_bytes=1).count == 1
    assert not lmdb_reads


def test_published_stage_is_read_from_lmdb(store, lmdb_reads):
    topic = store.create("t", 1, {})
    put(store, append(topic, 0, b"first"))
    stage = store.open_stage()
    store.stage(stage, [append(topic, 0, b"staged")]).result()
    store.commit(Commit(stages=(stage,))).result()
    assert read(store, topic.number, (0, 1)) == [b"staged"]
    put(store, append(topic, 0, b"last"))
    assert read(store, topic.number, (0, 0)) == [b"first", b"staged", b"last"]
    assert len(lmdb_reads) == 2
    assert read(store, topic.number, (0, 2)) == [b"last"]
    assert len(lmdb_reads) == 2


def test_trimmed_and_dropped_messages_leave_the_cache(store):
    topic = store.create("t", 1, {})
    for at in range(4):
        put(store, append(topic, 0, b"%d" % at))
    store.trim(topic.number, {0: 2})
    with pytest.raises(Trimmed):
        read(store, topic.number, (0, 1))
    assert read(store, topic.number, (0, 2)) == [b"2", b"3"]
    put(store, append(topic, 0, b"4"))
    store.drop("t")
    with pytest.raises(DoesNotExist):
        read(store, topic.number, (0, 4))


def test_cache_of_recent_entries_is_bounded(store, lmdb_reads, monkeypatch):
    topic = store.create("t", 1, {})
    put(store, append(topic, 0, bytes(recent_entries.MAX_ENTRY_BYTES)))
    assert len(read(store, topic.number, (0, 0))) == 1
    assert len(lmdb_reads) == 1
    monkeypatch.setattr(recent_entries, "MAX_BYTES", 1000)
    for _ in range(20):
        put(store, append(topic, 0, bytes(200)))
    assert sum(len(entry.value) for entry in store._recent._shards[topic.number, 0]) <= 1000
