"""Ownership of a store folder: one owner, any number of readers, and forks of both."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from polybus.errors import DataFolderInUse, DoesNotExist, StoreClosed, UsageError
from polybus.model.commit import Commit, RecordChange
from polybus.model.stamp import ProducerOptions
from polybus.store import folder_ownership
from polybus.store.contract import ShardEnd
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import bodies
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, elsewhere, put

# Python warns of a fork while other threads run, which these tests do.
FORKING = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

OWN = """
import json, sys
from polybus.errors import DataFolderInUse
from polybus.store.lmdb.lmdb_store import LmdbStore
try:
    LmdbStore(sys.argv[1]).close()
    print(json.dumps("free"))
except DataFolderInUse as error:
    print(json.dumps(str(error)))
"""

READ = """
import json, sys
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.kit import all_bodies
with LmdbStore(sys.argv[1], read_only=True) as store:
    print(json.dumps([body.decode() for topic in store.topics()
                      for body in all_bodies(store, topic)]))
"""


def test_second_owner_is_refused_with_the_pid_of_the_first(tmp_path):
    with LmdbStore(tmp_path):
        assert f"(pid {os.getpid()})" in elsewhere(OWN, tmp_path)
        with pytest.raises(DataFolderInUse, match=rf"this process \(pid {os.getpid()}\)"):
            LmdbStore(tmp_path)
        assert f"(pid {os.getpid()})" in elsewhere(OWN, tmp_path), "the lock was lost"
    assert elsewhere(OWN, tmp_path) == "free"


def test_owner_pid_is_visible_to_other_processes(tmp_path):
    assert folder_ownership.owner(tmp_path) is None
    with LmdbStore(tmp_path):
        assert folder_ownership.owner(tmp_path) == os.getpid()
    assert folder_ownership.owner(tmp_path) is None


def test_other_processes_can_read_beside_the_owner(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"a")
        assert elsewhere(READ, tmp_path) == ["a"]
        put(store, topic, 0, b"b")
        assert elsewhere(READ, tmp_path) == ["a", "b"]
    assert elsewhere(READ, tmp_path) == ["a", "b"]


def test_read_only_store_refuses_writes(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"a")
    with LmdbStore(tmp_path, read_only=True) as reader:
        assert bodies(reader, topic) == [b"a"]
        writes: list[Callable[[], object]] = [
            lambda: reader.create("u", 1, {}),
            lambda: reader.configure("t", {}),
            lambda: reader.drop("t"),
            lambda: reader.commit(Commit(changes=(RecordChange(b"k", b"v"),))).result(),
            lambda: reader.open_producer("p", ProducerOptions()),
            lambda: reader.close_producer("p", 1),
            lambda: reader.open_stage(),
            lambda: reader.stage("0" * 16, []).result(),
            lambda: reader.renew("0" * 16),
            lambda: reader.discard("0" * 16),
            lambda: reader.trim(topic.number, {0: 1}),
            lambda: reader.compact(),
            lambda: reader.reblock(),
        ]
        for write in writes:
            with pytest.raises(UsageError, match="read-only"):
                write()


def test_read_only_open_needs_a_store(tmp_path):
    with pytest.raises(DoesNotExist, match="no store"):
        LmdbStore(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_owner_and_readers_can_share_a_process(tmp_path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        with (
            LmdbStore(tmp_path, read_only=True) as first,
            LmdbStore(tmp_path, read_only=True) as second,
        ):
            put(store, topic, 0, b"a")
            assert bodies(first, topic) == bodies(second, topic) == [b"a"]
        put(store, topic, 0, b"b")
        assert bodies(store, topic) == [b"a", b"b"]


def test_folder_that_this_process_reads_cannot_be_owned_by_it(tmp_path):
    LmdbStore(tmp_path).close()
    with LmdbStore(tmp_path, read_only=True):
        with pytest.raises(DataFolderInUse, match="read-only in this process"):
            LmdbStore(tmp_path)
        assert folder_ownership.owner(tmp_path) is None
    LmdbStore(tmp_path).close()


def test_reader_is_notified_of_commits_of_another_process(tmp_path):
    ends: list[ShardEnd] = []
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 2, {})
        put(store, topic, 0, b"a")
        with LmdbStore(tmp_path, read_only=True) as reader:
            called = threading.Event()

            def listener(new_ends: Sequence[ShardEnd]) -> None:
                ends.extend(new_ends)
                called.set()

            reader.watch(listener)
            put(store, topic, 1, b"b", b"c")
            assert called.wait(TIMEOUT_S)
            assert ends == [(topic.number, 1, 2)]


def _in_child(act: Callable[[], Any]) -> Any:
    """Return the JSON that a forked child writes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(act()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = json.load(answer)
    os.waitpid(pid, 0)
    return found


@FORKING
def test_child_of_a_fork_is_refused_and_the_parent_continues(tmp_path: Path):
    with LmdbStore(tmp_path) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"a")

        def child() -> list[str]:
            refusals = []
            for use in (store.topics, lambda: store.bounds(1), lambda: put(store, topic, 0, b"x")):
                try:
                    use()
                except StoreClosed as error:
                    refusals.append(str(error))
            store.close()
            try:
                LmdbStore(tmp_path)
            except DataFolderInUse as error:
                refusals.append(str(error))
            return refusals

        refusals = _in_child(child)
        opener = f"the store was opened by process {os.getpid()}, the parent of a fork"
        assert refusals[:3] == [f"{opener}; open it again"] * 3
        assert f"(pid {os.getpid()})" in refusals[3]
        assert f"(pid {os.getpid()})" in elsewhere(OWN, tmp_path)
        put(store, topic, 0, b"b")
        assert bodies(store, topic) == [b"a", b"b"]


@FORKING
def test_child_of_a_fork_does_not_inherit_the_lock(tmp_path):
    """The parent closes its store while the child lives: the folder is free."""
    store = LmdbStore(tmp_path)
    asking, answering = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(asking, 1)
        os._exit(0)
    try:
        store.close()
        assert elsewhere(OWN, tmp_path) == "free"
    finally:
        os.write(answering, b"x")
        os.waitpid(pid, 0)
        os.close(asking)
        os.close(answering)
