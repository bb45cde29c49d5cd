"""Backup, restore, compaction, verification and salvage, on stores that live and that do not."""

from __future__ import annotations

import random

import pytest

from polybus.errors import DataFolderInUse, DoesNotExist, UsageError
from polybus.model.commit import Commit, RecordChange
from polybus.store.lmdb import salvage, store_copy, verification
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import all_bodies, bodies, contents
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, elsewhere, put, stage

COMPACT = """
import json, sys
from pathlib import Path
from polybus.errors import DataFolderInUse
from polybus.store.lmdb.store_copy import compact
try:
    print(json.dumps(compact(Path(sys.argv[1]))))
except DataFolderInUse:
    print(json.dumps("in use"))
"""


@pytest.fixture
def store(tmp_path):
    with LmdbStore(tmp_path / "store") as store:
        topic = store.create("t", 2, {"a": 1})
        for number in range(40):
            put(store, topic, number % 2, b"%d" % number * 500)
        name = stage(store, topic, *[(b"s%d" % number * 500,) for number in range(8)])
        store.commit(Commit(stages=(name,), changes=(RecordChange(b"k", b"v"),))).result(TIMEOUT_S)
        yield store


def test_backup_is_a_snapshot_of_the_store(store, tmp_path):
    before = contents(store)
    progress = []
    size = store.backup(tmp_path / "backup", lambda done, total: progress.append((done, total)))
    put(store, store.topics()[0], 0, b"later")
    assert progress[-1] == (size, size)
    with LmdbStore(tmp_path / "backup") as copy:
        assert contents(copy) == before
        assert put(copy, copy.topics()[0], 0, b"x").spans[0].first_id == 49
    assert store_copy.backup(tmp_path / "backup", tmp_path / "restored") > 0
    with LmdbStore(tmp_path / "restored") as copy:
        assert all_bodies(copy, copy.topics()[0])[-1] == b"x"


def test_copy_needs_an_empty_folder(store, tmp_path):
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "mine").touch()
    with pytest.raises(UsageError, match="not empty"):
        store.backup(tmp_path / "backup")
    with pytest.raises(DoesNotExist):
        store_copy.backup(tmp_path / "none", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_compaction_frees_space_and_readers_follow(store, tmp_path):
    topic = store.topics()[0]
    store.trim(topic.number, {0: 20, 1: 20})
    before = contents(store)
    with LmdbStore(store.path, read_only=True) as reader:
        assert contents(reader) == before
        old, new = store.compact()
        assert new < old
        info = store_copy.read_file_info(store.path)
        assert (info.generation, info.file_bytes) == ("0002", new)
        assert not (store.path / "0001").exists()
        assert contents(reader) == contents(store) == before
        put(store, topic, 1, b"later")
        assert bodies(reader, topic, 1)[-1] == b"later"
    assert elsewhere(COMPACT, store.path) == "in use"
    store.close()
    assert elsewhere(COMPACT, store.path)[1] <= new + 8192
    with LmdbStore(store.path) as again:
        assert bodies(again, topic, 1)[-1] == b"later"
        stamps = again.commit(Commit(changes=(RecordChange(b"k", b"w"),))).result(TIMEOUT_S)
        assert stamps.versions[0] > before.records[0].version


def test_intact_store_verifies(store):
    progress = []
    report = verification.verify(store.path, lambda done, total: progress.append(done))
    assert (report.fault_count, report.topics, report.shards, report.messages) == (0, 1, 2, 48)
    assert progress[-1] > 0


def test_salvage_of_an_intact_store_is_complete(store, tmp_path):
    before = contents(store)
    with pytest.raises(DataFolderInUse):
        salvage.salvage(store.path, tmp_path / "new")
    store.close()
    found = salvage.salvage(store.path, tmp_path / "new")
    assert (found.topics, found.messages, found.lost) == (1, 48, ())
    with LmdbStore(tmp_path / "new") as new:
        assert new.topics() == before.topics
        assert contents(new).messages == before.messages
        assert new.bounds(1)[:3] == before.bounds[0][:3]
        assert put(new, new.topics()[0], 0, b"x").spans[0].first_id == 49
        assert new.create("u", 1, {}).number == 2
    assert verification.verify(tmp_path / "new").fault_count == 0


def test_merged_messages_are_salvaged_once(store, tmp_path):
    store.reblock()
    before = contents(store)
    store.close()
    found = salvage.salvage(store.path, tmp_path / "new")
    assert found.messages == 48
    with LmdbStore(tmp_path / "new") as new:
        assert contents(new).messages == before.messages


def test_topic_without_a_record_is_salvaged_by_its_number(store, tmp_path):
    before = contents(store)
    store.close()
    file = store.path / "0001" / "data.mdb"
    file.write_bytes(file.read_bytes().replace(b"PBt1", b"\0\0\0\0"))
    assert salvage.salvage(store.path, tmp_path / "new").messages == 48
    with LmdbStore(tmp_path / "new") as new:
        assert [topic.name for topic in new.topics()] == ["salvaged-1"]
        assert contents(new).messages == before.messages


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_found_and_intact_messages_are_salvaged(store, tmp_path, seed):
    topic = store.topics()[0]
    before = {(m.shard, m.offset): m for m in contents(store).messages[0]}
    store.backup(tmp_path / "copy")
    file = tmp_path / "copy" / "0001" / "data.mdb"
    raw = bytearray(file.read_bytes())
    place = random.Random(seed)
    pages = len(raw) // 4096
    for _ in range(6):
        at = place.randrange(2, pages) * 4096
        raw[at : at + 4096] = place.randbytes(4096)
    file.write_bytes(raw)
    assert verification.verify(tmp_path / "copy").fault_count > 0
    found = salvage.salvage(tmp_path / "copy", tmp_path / "new")
    with LmdbStore(tmp_path / "new") as new:
        there = contents(new).messages[0]
    assert len(there) == found.messages > 24
    assert all(before[message.shard, message.offset] == message for message in there)
    assert topic.number == 1
