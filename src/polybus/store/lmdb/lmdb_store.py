"""The LMDB store: checks each request, then reads or submits a task to the writer.

A store belongs to the process that opened it. In a child of a fork every call raises
`StoreClosed` and does not touch the parent's store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from polybus.errors import Damaged, PolybusError, StoreClosed, UsageError
from polybus.model.commit import Append, Commit, CommitResult, StoredRecord
from polybus.model.rows import Rows
from polybus.model.stamp import ProducerEpoch, ProducerOptions
from polybus.model.topic import All, Bounds, Topic
from polybus.store import request_checks
from polybus.store.contract import (
    LEASE_S,
    MAX_READ_BYTES,
    MAX_ROWS,
    DamagedTopic,
    DamageListener,
    Excess,
    Listener,
    Progress,
    ShardRange,
    Store,
    no_progress,
)
from polybus.store.lmdb import (
    commit_execution,
    producer_stamps,
    staged_blocks,
    store_keys,
    stored_values,
    topic_catalog,
    topic_inspection,
)
from polybus.store.lmdb.background_tasks import BackgroundTasks
from polybus.store.lmdb.commit_listeners import CommitListeners, CommitPoller
from polybus.store.lmdb.data_file import NEXT_STEPS
from polybus.store.lmdb.interval_writer import IntervalWriter
from polybus.store.lmdb.quarantine import Quarantine
from polybus.store.lmdb.read_txn import StoreReader
from polybus.store.lmdb.reblocker import Reblocker
from polybus.store.lmdb.recent_entries import RecentEntries
from polybus.store.lmdb.store_copy import backup_environment, compact_files
from polybus.store.lmdb.store_files import StoreFiles
from polybus.store.lmdb.write_batch import WriteBatch
from polybus.store.lmdb.write_txn import TransactionWriter
from polybus.store.lmdb.writer import FREES_ROOM, StoreWriter, Task
from polybus.store.lmdb.writer_state import WriterState

DURABILITIES: Final = ("fsync", "interval")
COMMIT_INTERVAL_MS: Final = 50
REROUTED_BYTES: Final = 4 << 20  # of a stage, per call: a few milliseconds of the writer
T = TypeVar("T")


class LmdbStore(Store):
    def __init__(
        self,
        path: str | Path,
        *,
        read_only: bool = False,
        durability: str = "fsync",
        commit_interval_ms: int = COMMIT_INTERVAL_MS,
        wall_ns: Callable[[], int] = time.time_ns,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        if durability not in DURABILITIES:
            raise UsageError(f"durability must be one of {DURABILITIES}, got {durability!r}")
        if commit_interval_ms < 1:
            raise UsageError(f"commit_interval_ms must be at least 1, got {commit_interval_ms}")
        self.path = Path(path)
        self.read_only = read_only
        self._pid = os.getpid()
        self._closed = False
        self._files = StoreFiles(self.path, read_only=read_only)
        self._quarantine = Quarantine()
        self._damage_listeners: list[DamageListener] = []
        self._reader = StoreReader(self._files, self._quarantine)
        self._listeners = CommitListeners()
        self._recent = RecentEntries()
        self._poller: CommitPoller | None = None
        self._writer: StoreWriter | None = None
        # With interval durability alone, a change may be resolved and not yet readable.
        self._interval_writer: IntervalWriter | None = None
        self._rerouting = threading.Lock()
        if not read_only:
            try:
                self._open_writer(durability, commit_interval_ms / 1000, wall_ns, clock_s)
            except BaseException as error:
                self._files.close()
                if isinstance(error, Damaged):
                    raise Damaged(f"{self.path}: {error}; {NEXT_STEPS}") from error
                raise

    def _open_writer(
        self,
        durability: str,
        interval_s: float,
        wall_ns: Callable[[], int],
        clock_s: Callable[[], float],
    ) -> None:
        quarantine = self._quarantine
        with self._files.snapshot() as transaction:
            quarantine.fill(topic_inspection.inspect_topics(transaction))
        state = WriterState(self._files.snapshot, clock_s, quarantine)
        self._txn_writer = TransactionWriter(self._files, quarantine)
        self._reblocker = Reblocker(self._files, quarantine, self._report_damage)
        with self._files.snapshot() as transaction:
            staged_blocks.restore_leases(state, transaction)
        self._reblocker.load()
        tasks = BackgroundTasks(state, self._files, self._txn_writer, self._reblocker)
        parts = state, self._txn_writer, tasks, wall_ns, self._on_written
        if durability == "interval":
            self._writer = self._interval_writer = IntervalWriter(*parts, interval_s=interval_s)
        else:
            self._writer = StoreWriter(*parts)
        self._txn_writer.reserve.fill()
        self._writer.start()

    # --- topics

    def create(self, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
        name, shards, settings = request_checks.new_topic(name, shards, settings)
        topic: Topic = self._execute(
            lambda writer: topic_catalog.create(writer, name, shards, settings)
        )
        return topic

    def configure(self, name: str, settings: Mapping[str, object], *, add_shards: int = 0) -> Topic:
        settings = request_checks.topic_settings(settings)
        request_checks.new_shards(add_shards)
        topic: Topic = self._execute(
            lambda writer: topic_catalog.configure(writer, name, settings, add_shards)
        )
        return topic

    def topics(self) -> list[Topic]:
        self._settle(bool)
        return self._reader.topics()

    def damaged_topics(self) -> list[DamagedTopic]:
        self._check_open()
        if not self.read_only:
            return list(self._quarantine.topics)
        with self._files.snapshot() as transaction:
            return topic_inspection.inspect_topics(transaction)

    def drop(self, name: str) -> None:
        self._execute(lambda writer: topic_catalog.drop(writer, name), FREES_ROOM)

    # --- writing

    def commit(self, commit: Commit) -> Future[CommitResult]:
        try:
            request_checks.commit(commit)
            size = 0
            # A loop, because a generator costs more than the one append that most commits have.
            for append in commit.appends:
                size += len(append.block.data)
            return self._writing().submit(commit_execution.commit, commit, size)
        except PolybusError as error:
            return _failed_future(error)

    def commit_all(self, commits: Sequence[Commit]) -> list[Future[CommitResult]]:
        try:
            sizes = []
            for commit in commits:
                request_checks.commit(commit)
                sizes.append(sum([len(append.block.data) for append in commit.appends]))
            return self._writing().submit_all(commit_execution.commit, commits, sizes)
        except PolybusError:  # one is invalid: each commit gets its own result or error
            return super().commit_all(commits)

    def open_producer(self, name: str, options: ProducerOptions) -> ProducerEpoch:
        request_checks.producer(name)
        options = request_checks.producer_options(options)
        opened: ProducerEpoch = self._execute(
            lambda writer: producer_stamps.open_producer(writer, name, options)
        )
        return opened

    def look_up_producer(self, name: str) -> ProducerEpoch | None:
        request_checks.producer(name)
        opened: ProducerEpoch | None = self._execute(
            lambda writer: producer_stamps.look_up(writer, name)
        )
        return opened

    def close_producer(self, name: str, epoch: int) -> None:
        request_checks.producer(name)
        self._execute(lambda writer: producer_stamps.close_producer(writer, name, epoch))

    def open_stage(self, lease_s: float = LEASE_S) -> str:
        request_checks.lease(lease_s)
        stage: str = self._execute(lambda writer: staged_blocks.open_stage(writer, lease_s))
        return stage

    def stage(self, stage: str, appends: Sequence[Append]) -> Future[None]:
        try:
            request_checks.appends(appends)
            size = sum([append.block.size_bytes for append in appends])
            return self._submit(
                lambda writer: staged_blocks.add_blocks(writer, stage, appends), size
            )
        except PolybusError as error:
            return _failed_future(error)

    def reroute_stage(self, stage: str) -> bool:
        # One at a time: a second call would move blocks that the first one has moved.
        with self._rerouting:
            target = self._execute(lambda writer: staged_blocks.find_sealed(writer, stage))
            if target is None:
                return False
            # Read and split here, because the writer must not wait for it.
            self._settle(bool)
            with self._files.snapshot() as transaction:
                moved = staged_blocks.read_sealed(transaction, stage, target, REROUTED_BYTES)
            self._execute(lambda writer: staged_blocks.move_blocks(writer, stage, target, moved))
            return True

    def staged_topics(self, stages: Sequence[str]) -> frozenset[int]:
        topics: frozenset[int] = self._execute(
            lambda writer: staged_blocks.staged_topics(writer, stages)
        )
        return topics

    def renew(self, stage: str, lease_s: float = LEASE_S) -> None:
        request_checks.lease(lease_s)
        self._execute(lambda writer: staged_blocks.renew(writer, stage, lease_s))

    def discard(self, stage: str) -> None:
        self._execute(lambda writer: staged_blocks.discard(writer, stage))

    def trim(self, topic: int, before: Mapping[int, int]) -> None:
        # A copy, because the writer thread reads it later.
        before = dict(before)
        self._execute(lambda writer: topic_catalog.trim(writer, topic, before), FREES_ROOM)

    # --- reading

    def bounds(self, topic: int) -> Bounds:
        self._settle(lambda batch: topic in batch.topics)
        return self._reporting_damage(topic, partial(self._reader.bounds, topic))

    def end(self, topic: int, shard: int | All) -> int:
        self._settle(lambda batch: topic in batch.topics)
        return self._reporting_damage(topic, partial(self._reader.end, topic, shard))

    def read(
        self,
        topic: int,
        shard: int | All,
        start: int,
        end: int | None = None,
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        asked = request_checks.read(start, end, max_rows, max_bytes)
        return self._read_settled(topic, partial(self._reader.read, topic, shard, *asked))

    def read_parts(
        self,
        topic: int,
        parts: Sequence[ShardRange],
        *,
        max_rows: int = MAX_ROWS,
        max_bytes: int = MAX_READ_BYTES,
    ) -> Rows:
        asked = request_checks.parts(parts, max_rows, max_bytes)
        self._settle(lambda batch: topic in batch.altered)
        # Push readers ask for the newest messages: most reads end here, without LMDB.
        rows = self._recent.read(topic, *asked)
        if rows.count:
            return rows
        return self._read_settled(topic, partial(self._reader.read_parts, topic, *asked))

    def find(self, topic: int, shard: int | All, timestamp_ns: int) -> int:
        request_checks.time_ns(timestamp_ns)
        self._settle(lambda batch: topic in batch.topics)
        find = partial(self._reader.find, topic, shard, timestamp_ns)
        return self._reporting_damage(topic, find)

    def find_id(self, topic: int, shard: int, message_id: int) -> int:
        request_checks.message_id(message_id)
        self._settle(lambda batch: topic in batch.topics)
        find = partial(self._reader.find_id, topic, shard, message_id)
        return self._reporting_damage(topic, find)

    def find_excess(self, topic: int, keep_bytes: int, max_blocks: int) -> Excess:
        request_checks.excess(keep_bytes, max_blocks)
        self._settle(lambda batch: topic in batch.topics)
        find = partial(self._reader.find_excess, topic, keep_bytes, max_blocks)
        return self._reporting_damage(topic, find)

    def get(self, key: bytes) -> StoredRecord | None:
        request_checks.key(key)
        self._settle(lambda batch: batch.has_record_changes)
        with self._files.snapshot() as transaction:
            raw = transaction.get(store_keys.record(key))
            return None if raw is None else StoredRecord(key, *stored_values.read_record(raw))

    def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[StoredRecord]:
        request_checks.scan(prefix, after, limit)
        self._settle(lambda batch: batch.has_record_changes)
        found: list[StoredRecord] = []
        with self._files.snapshot() as transaction, transaction.cursor() as cursor:
            more = cursor.set_range(store_keys.record(max(prefix, after)))
            while more and len(found) < limit and cursor.key()[: len(prefix) + 1] == b"r" + prefix:
                # Copied: the view is valid only until the cursor moves.
                key = bytes(cursor.key()[1:])
                if key != after:
                    found.append(StoredRecord(key, *stored_values.read_record(cursor.value())))
                more = cursor.next()
        return found

    def watch(self, listener: Listener) -> Callable[[], None]:
        self._check_open()
        unwatch = self._listeners.add(listener)
        # Without a writer in this process, nothing else would call the listener.
        if self.read_only and self._poller is None:
            self._poller = CommitPoller(self._files, self._listeners)
        return unwatch

    def watch_damage(self, listener: DamageListener) -> None:
        self._damage_listeners.append(listener)

    # --- close

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        # Set first, so that no request is accepted while the writer finishes.
        self._closed = True
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._poller is not None:
                self._poller.close()
            self._listeners.clear()
            self._files.close()

    # --- maintenance

    def yield_to(self, foreground: Callable[[], int]) -> None:
        self._writing().yield_to(foreground)

    def reblock(self) -> int:
        """Finish all removals and merges of small blocks. Returns the number of steps.

        The writer does the same in the background, one step at a time.
        """
        return int(
            self._run_alone(lambda: self._txn_writer.remove_all() + self._reblocker.run_all())
        )

    def compact(self, progress: Progress = no_progress) -> tuple[int, int]:
        sizes: tuple[int, int] = self._run_alone(lambda: compact_files(self._files, progress))
        return sizes

    def backup(self, target: Path, progress: Progress = no_progress) -> int:
        self._settle(bool)
        with self._files.hold_environment() as used:
            return backup_environment(used, target, progress)

    # --- helpers

    def _check_open(self) -> None:
        # Threads do not survive a fork: a request of the child would never resolve.
        if os.getpid() != self._pid:
            raise StoreClosed(
                f"the store was opened by process {self._pid}, the parent of a fork; open it again"
            )
        if self._closed:
            raise StoreClosed("the store was closed")

    def _writing(self) -> StoreWriter:
        """Return the writer. Raises if the store cannot be written to."""
        self._check_open()
        if self._writer is None:
            raise UsageError(f"{self.path} was opened read-only")
        return self._writer

    def _submit(
        self, change: Callable[[WriterState], Any], size: int = 0, subject: object = None
    ) -> Future[Any]:
        # These changes do not need the time, which is the last argument of a task.
        task: Task = lambda state, _subject, _now_ns: change(state)  # noqa: E731
        return self._writing().submit(task, subject, size)

    def _execute(self, change: Callable[[WriterState], Any], subject: object = None) -> Any:
        return self._submit(change, subject=subject).result()

    def _run_alone(self, work: Callable[[], Any]) -> Any:
        task: Task = lambda _state, _subject, _now_ns: work()  # noqa: E731
        return self._writing().submit(task, alone=True).result()

    def _settle(self, concerns: Callable[[WriteBatch], bool]) -> bool:
        """Wait until the resolved changes that matter can be read. Returns whether it waited."""
        self._check_open()
        return self._interval_writer is not None and self._interval_writer.settle(concerns)

    def _read_settled(self, topic: int, read: Callable[[], Rows]) -> Rows:
        """Read messages, and wait for unwritten ones only if there are no others."""
        self._check_open()
        read = partial(self._reporting_damage, topic, read)
        writer = self._interval_writer
        if writer is None:
            return read()
        # A trim or a drop must take effect at once.
        writer.settle(lambda batch: topic in batch.altered)
        flushes = writer.flush_count
        rows = read()
        if not rows.count:
            waited = writer.settle(lambda batch: topic in batch.topics)
            # The messages may have been written right after the first read.
            if waited or writer.flush_count != flushes:
                rows = read()
        return rows

    def _reporting_damage(self, topic: int, read: Callable[[], T]) -> T:
        try:
            return read()
        except Damaged as error:
            # Errors of the quarantine were reported when the store was opened.
            if topic not in self._quarantine:
                self._report_damage(topic, str(error))
            raise

    def _report_damage(self, topic: int, text: str) -> None:
        for listener in self._damage_listeners:
            listener(topic, f"{text}; {NEXT_STEPS}")

    def _on_written(self, batch: WriteBatch) -> None:
        # First the cache: a listener reads at once.
        self._recent.add_batch(batch)
        self._listeners.notify(batch.ends)


def _failed_future(error: PolybusError) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
