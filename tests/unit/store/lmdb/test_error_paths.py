"""Error paths and races of the LMDB engine: drops, closes, failing callbacks, failing files."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from polybus.errors import Damaged, DoesNotExist, PolybusError, StoreClosed, StoreFault, Unavailable
from polybus.model.commit import Append, Commit, RecordChange
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.model.topic import ALL
from polybus.store import folder_ownership
from polybus.store.lmdb import (
    commit_execution,
    environment,
    store_files,
    store_keys,
)
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.store_copy import backup
from polybus.store.lmdb.writer_state import StateCache
from polybus.testing.conformance.sample_blocks import block
from tests.rig.observer import until
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, count, put


@pytest.fixture
def store(tmp_path) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path / "store") as store:
        yield store


def held(store: LmdbStore, topic: int) -> threading.Event:
    """Block the writer after a commit until the event is set. Later tasks are one group."""
    go_on, is_blocked = threading.Event(), threading.Event()

    def block_writer(_future: object) -> None:
        is_blocked.set()
        go_on.wait(TIMEOUT_S)

    future = store.commit(Commit((Append(topic, 0, block(b"held")),)))
    future.add_done_callback(block_writer)
    assert is_blocked.wait(TIMEOUT_S)
    return go_on


# --- a topic that was dropped is gone at once


def test_commit_after_a_drop_in_one_transaction_is_refused(store):
    topic = store.create("t", 1, {})
    go_on = held(store, topic.number)
    dropping = threading.Thread(target=store.drop, args=("t",))
    dropping.start()
    until(lambda: bool(store._writer._queue._items), "the drop is queued")
    late = store.commit(Commit((Append(topic.number, 0, block(b"late")),)))
    go_on.set()
    dropping.join(TIMEOUT_S)
    with pytest.raises(DoesNotExist):
        late.result(TIMEOUT_S)
    with pytest.raises(DoesNotExist):
        put(store, topic, 0, b"later")
    assert put(store, store.create("t", 1, {}), 0, b"again").spans[0][2:] == (1, 2, 1)


def test_interval_commit_after_a_drop_is_refused(tmp_path):
    with LmdbStore(tmp_path / "s", durability="interval", commit_interval_ms=10_000) as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"one")
        store.bounds(topic.number)  # all is written
        store.drop("t")
        with pytest.raises(DoesNotExist):
            put(store, topic, 0, b"two")
        again = store.create("t", 1, {})
        assert put(store, again, 0, b"two").spans[0][2:] == (1, 2, 1)


# --- closing


def test_read_of_a_closed_store_ends(store, monkeypatch):
    topic = store.create("t", 1, {})
    monkeypatch.setattr(LmdbStore, "_check_open", lambda _: store.close())  # right after the check
    ended: list[type[BaseException]] = []

    def read() -> None:
        try:
            store.read(topic.number, 0, 0)
        except PolybusError as error:
            ended.append(type(error))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(TIMEOUT_S)
    assert ended == [StoreClosed]


# --- callbacks


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, SystemExit])
def test_callback_that_raises_does_not_affect_others(store, error):
    topic = store.create("t", 1, {})

    def fail(_argument: object) -> None:
        raise error

    go_on = held(store, topic.number)
    first = store.commit(Commit((Append(topic.number, 0, block(b"one")),)))
    first.add_done_callback(fail)
    second = store.commit(Commit((Append(topic.number, 0, block(b"two")),)))
    store.watch(fail)
    go_on.set()
    assert first.result(TIMEOUT_S).spans[0].first_id == 2
    assert second.result(TIMEOUT_S).spans[0].first_id == 3
    assert put(store, topic, 0, b"three").spans[0].first_id == 4


# --- unexpected errors


def test_commit_that_cannot_be_executed_fails_alone(store, monkeypatch):
    topic = store.create("t", 1, {})
    real = commit_execution.commit

    def fail(state, commit, now_ns):
        done = real(state, commit, now_ns)
        if commit.note == b"bad":
            raise ValueError("a fault of the engine itself")
        return done

    monkeypatch.setattr(commit_execution, "commit", fail)
    go_on = held(store, topic.number)
    append = Append(topic.number, 0, block(b"x"))
    notes = (b"", b"bad", b"", b"")
    futures = [store.commit(Commit((append,), note=note)) for note in notes]
    go_on.set()
    assert [bool(future.exception(TIMEOUT_S)) for future in futures] == [False, True, False, False]
    assert isinstance(futures[1].exception(), StoreFault)
    assert store.bounds(topic.number).next_id == 5


# --- failing reads


def test_commit_with_an_unreadable_second_shard_changes_nothing(store, monkeypatch):
    topic = store.create("t", 2, {})
    store._writer.state.cache.topics.clear()
    put(store, topic, 0, b"one")
    read = StateCache._get

    def fail(cache: StateCache, key: bytes) -> bytes | None:
        if key == store_keys.shard_state(topic.number, 1):
            raise Unavailable("too many readers")
        return read(cache, key)

    monkeypatch.setattr(StateCache, "_get", fail)
    both = tuple(Append(topic.number, shard, block(b"both")) for shard in (0, 1))
    with pytest.raises(Unavailable):
        store.commit(Commit(both, changes=(RecordChange(b"k", b"v"),))).result(TIMEOUT_S)
    with pytest.raises(Unavailable):
        store.trim(topic.number, {0: 1, 1: 1})
    monkeypatch.undo()
    put(store, topic, 1, b"two")
    assert [(at.start, at.end) for at in store.bounds(topic.number).shards] == [(0, 1), (0, 1)]
    assert store.get(b"k") is None


# --- interrupted compaction


def fail_at(monkeypatch, module: object, name: str, times: int) -> None:
    """Let the first calls succeed. Later ones fail for lack of descriptors."""
    real, calls = getattr(module, name), []

    def call(*args, **options):
        calls.append(args)
        if len(calls) > times:
            raise OSError(24, os.strerror(24))
        return real(*args, **options)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize(
    ("module", "name", "times"),
    [
        (environment, "acquire", 0),
        (store_files, "switch_generation", 0),
        (store_files, "sync_folder", 0),
    ],
)
def test_commits_after_a_failed_compaction_are_kept(tmp_path, monkeypatch, module, name, times):
    with LmdbStore(tmp_path / "s") as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"before")
        fail_at(monkeypatch, module, name, times)
        with pytest.raises(Unavailable):
            store.compact()
        monkeypatch.undo()
        put(store, topic, 0, b"after")
        with LmdbStore(tmp_path / "s", read_only=True) as reader:
            assert reader.read(topic.number, 0, 0).count == 2
    with LmdbStore(tmp_path / "s") as store:
        assert store.read(topic.number, 0, 0).count == 2
        store.compact()
        assert store.read(topic.number, 0, 0).count == 2


def test_failed_sync_after_the_switch_keeps_the_compacted_store(tmp_path, monkeypatch):
    with LmdbStore(tmp_path / "s") as store:
        topic = store.create("t", 1, {})
        put(store, topic, 0, b"before")
        replace = Path.replace

        def then_no_sync(path: Path, target: Path) -> Path:
            fail_at(monkeypatch, os, "fsync", 0)
            return replace(path, target)

        monkeypatch.setattr(Path, "replace", then_no_sync)
        with pytest.raises((StoreFault, Unavailable)):
            store.compact()
        monkeypatch.undo()
        put(store, topic, 0, b"after")
    with LmdbStore(tmp_path / "s") as store:
        assert store.read(topic.number, 0, 0).count == 2


def test_reader_retries_to_follow_a_compaction(tmp_path, monkeypatch):
    with (
        LmdbStore(tmp_path / "s") as store,
        LmdbStore(tmp_path / "s", read_only=True) as reader,
    ):
        topic = store.create("t", 1, {})
        store.compact()
        put(store, topic, 0, b"new")
        fail_at(monkeypatch, environment, "acquire", 0)
        with pytest.raises(Unavailable):
            reader.bounds(topic.number)
        monkeypatch.undo()
        assert reader.read(topic.number, 0, 0).count == 1


def test_killed_backup_is_not_taken_for_a_store(store, tmp_path):
    store.create("t", 1, {})
    target = tmp_path / "backup"

    # A kill during the copy would leave the files that exist at this moment.
    seen: list[str] = []

    def kill(_done: int, _total: int) -> None:
        seen.extend(entry.name for entry in target.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backup(store.path, target, kill)
    assert seen == ["0001.new"]


def test_interval_writer_runs_background_tasks_under_load(tmp_path, monkeypatch):
    over = threading.Event()
    with LmdbStore(tmp_path / "s", durability="interval", commit_interval_ms=1) as store:
        topic = store.create("t", 1, {})
        store.bounds(topic.number)
        write = store._txn_writer.write

        def write_and_commit(batch):  # each write is followed by another commit
            write(batch)
            if not over.is_set():
                store.commit(Commit((Append(topic.number, 0, block(b"more")),)))

        monkeypatch.setattr(store._txn_writer, "write", write_and_commit)
        put(store, topic, 0, b"first")
        compacting = threading.Thread(target=store.compact, daemon=True)
        compacting.start()
        compacting.join(TIMEOUT_S / 4)
        late = compacting.is_alive()
        over.set()
        compacting.join(TIMEOUT_S)
        assert not late


# --- results of stamps


def test_wrapped_result_ring_is_recognised_after_reopening(tmp_path):
    with LmdbStore(tmp_path / "s") as store:
        epoch = store.open_producer("p", ProducerOptions(kept_results=16)).epoch
        for counter in range(1, 21):
            store.commit(Commit(stamp=Stamp("p", epoch, counter))).result(TIMEOUT_S)
    with LmdbStore(tmp_path / "s") as store:
        epoch = store.open_producer("p", ProducerOptions(kept_results=4)).epoch
        assert count(store.path, store_keys.RESULTS) == 4
    with LmdbStore(tmp_path / "s") as store:
        store.close_producer("p", epoch)
        assert count(store.path, store_keys.RESULTS) == 0


# --- reads over all shards


def test_read_of_all_shards_returns_the_requested_rows(store):
    topic = store.create("t", 4, {})
    for number in range(400):
        store.commit(Commit((Append(topic.number, number % 4, block(b"%d" % number)),)))
        if number % 40 == 39:
            put(store, topic, 0, b"end of a transaction")
    store.reblock()
    at, reads = 1, 0
    while (rows := store.read(topic.number, ALL, at, max_rows=50)).count:
        at += rows.count
        reads += 1
    assert at == 411
    assert reads == 9
    assert store.read(topic.number, ALL, 100, 103).count == 3


@pytest.mark.parametrize("max_rows", [1, 7, 1000])
def test_read_of_all_shards_returns_messages_before_the_damage(tmp_path, max_rows):
    with LmdbStore(tmp_path / "s") as store:
        topic = store.create("t", 3, {})
        for number in range(30):
            put(store, topic, number % 3, b"payload-%03d" % number)
    data = tmp_path / "s" / "0001" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"payload-010", b"payload-x10"))
    with LmdbStore(tmp_path / "s") as store:
        at = 1
        while at < 11:
            rows = store.read(topic.number, ALL, at, max_rows=max_rows)
            assert 0 < rows.count <= 11 - at
            at += rows.count
        with pytest.raises(Damaged, match="topic 't', shard 1, offset 3"):
            store.read(topic.number, ALL, at)
        assert store.read(topic.number, ALL, 12).count == 19


# --- several stores in one process, and forks


def test_environment_is_reopened_while_others_read(store):
    topic = store.create("t", 1, {})
    with LmdbStore(store.path, read_only=True) as reader:
        put(store, topic, 0, b"one")
        reopening = threading.Thread(target=store._files.reopen, daemon=True)
        reopening.start()
        reopening.join(TIMEOUT_S / 4)
        assert not reopening.is_alive()
        put(store, topic, 0, b"two")
        assert reader.read(topic.number, 0, 0).count == 2
    assert store.read(topic.number, 0, 0).count == 2


def test_environment_that_cannot_be_reopened_is_closed(store, monkeypatch):
    topic = store.create("t", 1, {})
    fail_at(monkeypatch, lmdb, "open", 0)
    with pytest.raises(Unavailable):
        store._files.reopen()
    with pytest.raises(StoreClosed):
        store.read(topic.number, 0, 0)


@pytest.mark.parametrize(
    ("module", "lock"), [(environment, threading.Condition), (folder_ownership, threading.Lock)]
)
def test_fork_while_a_thread_holds_a_lock_does_not_block_the_child(
    tmp_path, monkeypatch, module, lock
):
    held_by_another = lock()
    monkeypatch.setattr(module, "_guard", held_by_another)
    holder = threading.Thread(target=held_by_another.acquire)
    holder.start()
    holder.join()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        with LmdbStore(tmp_path / "s") as store:
            store.create("t", 1, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
