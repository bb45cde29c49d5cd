"""A batch that cannot be written leaves no trace, and later batches succeed."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Lock, Thread
from typing import Any

import pytest

from polybus.errors import StoreFull
from polybus.model.commit import Append, Commit
from polybus.model.topic import Topic
from polybus.store.lmdb import background_committer, store_keys, topic_catalog, write_txn
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.write_batch import WriteBatch
from polybus.store.lmdb.writer import LARGE_BYTES
from polybus.testing.conformance.sample_blocks import block
from tests.rig.observer import until
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, count, put, stage


def large(topic: Topic) -> Commit:
    return Commit((Append(topic.number, 0, block(bytes(LARGE_BYTES))),))


def test_stage_in_a_failed_small_batch_keeps_its_lease(store, topic, monkeypatch):
    staged = stage(store, topic, (b"staged",))
    write: Callable[[WriteBatch], None] = store._txn_writer.write
    full = [StoreFull("no room")]

    def fail_once(batch: WriteBatch) -> None:
        if batch.ends and full:
            raise full.pop()
        write(batch)

    monkeypatch.setattr(store._txn_writer, "write", fail_once)
    with pytest.raises(StoreFull):
        store.commit(Commit(stages=(staged,))).result(TIMEOUT_S)
    assert store.commit(Commit(stages=(staged,))).result(TIMEOUT_S).spans[0].count == 1


def test_writer_works_if_no_thread_can_be_started(tmp_path, monkeypatch):
    class Refused(Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background_committer, "Thread", Refused)
    store = LmdbStore(tmp_path / "store")
    topic = store.create("t", 1, {})
    futures = [store.commit(large(topic)) for _ in range(3)]
    assert [future.result(5).spans[0].first_id for future in futures] == [1, 2, 3]
    store.close()  # only after success: a hanging store could not be closed


def test_removals_of_a_large_batch_run_soon(store, topic, monkeypatch):
    monkeypatch.setattr(write_txn, "REMOVAL_S", 0.0)
    for _ in range(5):
        put(store, topic, 0, bytes(100 << 10))
    go = Event()
    writer: Any = store._writer
    writer.submit(lambda *_: go.wait(TIMEOUT_S))
    store._submit(lambda state: topic_catalog.trim(state, topic.number, {0: 4}))
    future = store.commit(large(topic))
    go.set()
    future.result(TIMEOUT_S)
    until(lambda: not store._txn_writer.has_removals, "everything is removed", deadline_s=5)


def test_failed_removal_is_retried(store, topic, monkeypatch):
    monkeypatch.setattr(write_txn, "REMOVAL_S", 0.0)
    for _ in range(5):
        put(store, topic, 0, bytes(100 << 10))
    until(lambda: not store._txn_writer.has_removals, "removals of the last owner are done")
    writer: Any = store._writer
    writer._tasks._pause_s = 0.01
    leave, remove, removing = write_txn.WriteTxn.__exit__, store._txn_writer.remove_some, Lock()

    def last_step(_time_s: float) -> None:
        with removing:
            remove(TIMEOUT_S)

    full = [StoreFull("no room")]

    def fail_once(self: Any, *error: Any) -> None:
        if full and removing.locked():
            self._transaction.abort()
            raise full.pop()
        leave(self, *error)

    with monkeypatch.context() as patched:
        patched.setattr(write_txn.WriteTxn, "__exit__", fail_once)
        patched.setattr(store._txn_writer, "remove_some", last_step)
        store.trim(topic.number, {0: 4})
        until(lambda: not full, "the last step has failed")
    until(lambda: count(store.path, store_keys.TRIMMED) == 0, "everything is removed", deadline_s=5)
