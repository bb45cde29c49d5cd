"""Large batches are written on a second thread while the writer executes the next group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from threading import Event, Thread, get_ident
from typing import Any

import pytest

from polybus.errors import Conflict, OutOfSequence, StoreClosed, StoreFault, StoreFull
from polybus.model.commit import Append, Commit, CommitResult, RecordChange
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.model.topic import Topic
from polybus.store.lmdb import writer_state
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.write_batch import WriteBatch
from polybus.store.lmdb.writer import LARGE_BYTES
from polybus.testing.conformance.sample_blocks import block
from tests.rig.observer import until
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, stage

BODY = bytes(LARGE_BYTES)


class Held:
    """Blocks the next batch with messages before it is written, until `go_on` is set."""

    def __init__(self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_blocked, self.go_on = Event(), Event()
        self.error: Exception | None = None
        self.threads: set[int] = set()
        self._real: Callable[[WriteBatch], None] = store._txn_writer.write
        monkeypatch.setattr(store._txn_writer, "write", self._write)

    def _write(self, batch: WriteBatch) -> None:
        if batch.ends and not self.is_blocked.is_set():
            self.threads.add(get_ident())
            self.is_blocked.set()
            assert self.go_on.wait(TIMEOUT_S)
            if self.error is not None:
                raise self.error
        self._real(batch)


@pytest.fixture
def held(store: LmdbStore, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(store, monkeypatch)
    yield held
    held.go_on.set()


def large(topic: Topic, **options: Any) -> Commit:
    return Commit((Append(topic.number, 0, block(BODY)),), **options)


def start_commit(
    store: LmdbStore, topic: Topic, held: Held, **options: Any
) -> Future[CommitResult]:
    future = store.commit(large(topic, **options))
    assert held.is_blocked.wait(TIMEOUT_S)
    return future


def executes_tasks(store: LmdbStore) -> bool:
    """Return True if the writer thread executes a task now."""
    seen = Event()
    writer: Any = store._writer
    writer.submit(lambda *_: seen.set())
    return seen.wait(TIMEOUT_S)


def first_id(future: Future[CommitResult]) -> int:
    return future.result(TIMEOUT_S).spans[0].first_id


def test_next_group_runs_during_a_background_commit_and_resolves_after_it(store, topic, held):
    first = start_commit(store, topic, held)
    second = store.commit(large(topic))
    assert executes_tasks(store)
    assert not first.done()
    assert not second.done()
    held.go_on.set()
    assert (first_id(first), first_id(second)) == (1, 2)
    assert store.read(topic.number, 0, 0).count == 2


def test_commits_that_arrive_during_a_background_commit_share_one_transaction(store, topic, held):
    visible: list[int] = []
    store.watch(lambda ends: visible.append(ends[0].end))
    first = start_commit(store, topic, held)
    store.commit(Commit((Append(topic.number, 0, block(b"second")),)))
    # Now the second is executed, and its group waits for the first.
    assert executes_tasks(store)
    third = store.commit(Commit((Append(topic.number, 0, block(b"third")),)))
    held.go_on.set()
    assert (first_id(first), first_id(third)) == (1, 3)
    assert visible == [1, 3]


def test_small_batch_is_written_by_the_writer_thread(store, topic, held):
    future = store.commit(Commit((Append(topic.number, 0, block(b"small")),)))
    assert held.is_blocked.wait(TIMEOUT_S)
    held.go_on.set()
    assert first_id(future) == 1
    assert held.threads == {store._writer._thread.ident}


def test_large_batch_is_written_by_the_writer_thread_while_yielding(store, topic, held):
    store.yield_to(count(1).__next__)
    future = start_commit(store, topic, held)
    held.go_on.set()
    assert first_id(future) == 1
    assert held.threads == {store._writer._thread.ident}


def test_refusal_resolves_after_the_batch_it_depends_on(store, topic, held):
    first = start_commit(store, topic, held, changes=(RecordChange(b"k", b"v"),))
    refused = store.commit(Commit(changes=(RecordChange(b"k", b"w", expected=0),)))
    assert executes_tasks(store)
    assert not refused.done()
    held.go_on.set()
    assert first_id(first) == 1
    with pytest.raises(Conflict):
        refused.result(TIMEOUT_S)


def test_group_is_executed_again_without_the_failed_batch(store, topic, held):
    first = start_commit(store, topic, held, changes=(RecordChange(b"k", b"v"),))
    second = store.commit(large(topic))
    third = store.commit(Commit(changes=(RecordChange(b"k", b"w", expected=0),)))
    assert executes_tasks(store)
    held.error = StoreFull("no room")
    held.go_on.set()
    with pytest.raises(StoreFull):
        first.result(TIMEOUT_S)
    assert first_id(second) == 1
    third.result(TIMEOUT_S)
    assert store.bounds(topic.number).next_id == 2
    assert store.get(b"k").value == b"w"


def test_stamp_after_a_failed_one_is_refused(store, topic, held):
    epoch = store.open_producer("p", ProducerOptions()).epoch
    first = start_commit(store, topic, held, stamp=Stamp("p", epoch, 1))
    second = store.commit(large(topic, stamp=Stamp("p", epoch, 2)))
    assert executes_tasks(store)
    held.error = StoreFull("no room")
    held.go_on.set()
    with pytest.raises(StoreFull):
        first.result(TIMEOUT_S)
    with pytest.raises(OutOfSequence):
        second.result(TIMEOUT_S)
    again = [store.commit(large(topic, stamp=Stamp("p", epoch, counter))) for counter in (1, 2)]
    assert [first_id(one) for one in again] == [1, 2]


def test_failed_batch_is_reported_without_further_commits(store, topic, held):
    first = start_commit(store, topic, held)
    held.error = StoreFull("no room")
    held.go_on.set()
    with pytest.raises(StoreFull):
        first.result(TIMEOUT_S)


def test_batch_with_an_unexpected_error_is_retried_one_by_one(store, topic, held):
    go = Event()
    store._writer.submit(lambda *_: go.wait(TIMEOUT_S))
    futures = [store.commit(large(topic)) for _ in range(3)]
    go.set()
    assert held.is_blocked.wait(TIMEOUT_S)
    later = store.commit(large(topic))
    assert executes_tasks(store)
    held.error = ValueError("a fault of the engine itself")
    held.go_on.set()
    assert [first_id(future) for future in (*futures, later)] == [1, 2, 3, 4]


def test_commit_with_an_unexpected_error_fails_alone(store, topic, held):
    first = start_commit(store, topic, held)

    def fail(*_: Any) -> None:
        raise ValueError("a fault of the engine itself")

    bad, good = store._writer.submit(fail), store.commit(large(topic))
    held.go_on.set()
    assert first_id(first) == 1
    with pytest.raises(StoreFault):
        bad.result(TIMEOUT_S)
    assert first_id(good) == 2


def test_stage_in_a_failed_batch_keeps_its_lease(store, topic, held):
    staged = stage(store, topic, (b"staged",))
    first = start_commit(store, topic, held, stages=(staged,))
    assert executes_tasks(store)
    held.error = StoreFull("no room")
    held.go_on.set()
    with pytest.raises(StoreFull):
        first.result(TIMEOUT_S)
    assert store.commit(Commit(stages=(staged,))).result(TIMEOUT_S).spans[0].count == 1


def test_published_stage_has_no_lease_after_the_next_batch_fails(store, topic, monkeypatch):
    staged = stage(store, topic, (b"staged",))
    store.commit(large(topic, stages=(staged,))).result(TIMEOUT_S)
    held = Held(store, monkeypatch)
    lost = start_commit(store, topic, held)
    held.error = StoreFull("no room")
    held.go_on.set()
    with pytest.raises(StoreFull):
        lost.result(TIMEOUT_S)
    assert store._writer.state.leases.next_expiry_s() is None


def test_close_finishes_the_batch_in_flight(store, topic, held):
    first = start_commit(store, topic, held)
    second = store.commit(large(topic))
    closing = Thread(target=store.close)
    closing.start()
    held.go_on.set()
    assert (first_id(first), first_id(second)) == (1, 2)
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert not store._writer._committer._thread.is_alive()
    with pytest.raises(StoreClosed):
        store.commit(large(topic)).result(TIMEOUT_S)


def test_exclusive_task_waits_for_the_batch_in_flight(store, topic, held):
    first = start_commit(store, topic, held)
    alone = store._writer.submit(lambda *_: held.go_on.is_set(), alone=True)
    until(lambda: not store._writer._queue._items, "the task was dequeued")
    held.go_on.set()
    assert alone.result(TIMEOUT_S)
    assert first_id(first) == 1


def test_cache_shrinks_under_constant_large_batches(store, topic, monkeypatch):
    monkeypatch.setattr(writer_state, "MAX_CACHED", 10)
    changes = [RecordChange(b"%d" % number, b"v") for number in range(40)]
    futures = [store.commit(large(topic, changes=(change,))) for change in changes]
    for future in futures:
        future.result(TIMEOUT_S)
    until(
        lambda: len(store._writer.state.cache.versions) <= 10, "the cache has shrunk", deadline_s=5
    )
