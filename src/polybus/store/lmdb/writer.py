"""The writer thread: takes all queued tasks, commits them in one transaction, resolves them.

Every change of the store is a task: a function of the writer's state, a subject and the
time, queued with the future that its caller waits for. While one transaction is written,
the next tasks queue up. They then share a transaction, so the disk syncs once for all of
them (group commit). No future resolves before its transaction is on disk. This includes
refusals, because they may depend on a change that fails to be written.

A second thread (`background_committer`) writes large transactions while this one executes
the next group. If such a write fails, that group is rolled back and executed again.

While the kernel copies a large transaction, a processor does nothing else for up to a
millisecond, which other threads of the process would notice. So while the foreground is
active (`yield_to`), transactions are small, and after all but the smallest the thread
sleeps for longer than it has worked.

Between groups the thread runs background tasks: leases, re-blocking, removal. Under
constant load they get a small share of the time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import repeat
from typing import Any, Final

from polybus.errors import PolybusError, StoreClosed, StoreFault, StoreFull
from polybus.kernel import task_future
from polybus.store.lmdb import staged_blocks
from polybus.store.lmdb.background_committer import BackgroundCommitter, CommitWork
from polybus.store.lmdb.background_tasks import BackgroundTasks
from polybus.store.lmdb.write_batch import WriteBatch
from polybus.store.lmdb.write_txn import TransactionWriter
from polybus.store.lmdb.writer_queue import WriterQueue
from polybus.store.lmdb.writer_state import WriterState

# Limits of one transaction: the first tasks of a group wait until the last are executed.
GROUP_OPERATIONS: Final = 4096
GROUP_BYTES: Final = 32 << 20
# While the foreground is active, groups are small and each is followed by a rest of
# REST_FACTOR times the work. With these values rqueue's p99 beside a full load is 0.4 to
# 0.6 ms; with four times the bytes and a factor of 1 it is 1 ms. Throughput is less than
# half.
SMALL_GROUP_BYTES: Final = 128 << 10
REST_AFTER_BYTES: Final = SMALL_GROUP_BYTES // 2  # a smaller group needs no rest
REST_FACTOR: Final = 2.5
# A smaller batch is written by this thread: waking the other one takes as long.
LARGE_BYTES: Final = 256 << 10

Task = Callable[[WriterState, Any, int], Any]
# The subject of tasks that make room: they may use the reserve of a full disk.
FREES_ROOM: Final = object()

_log = logging.getLogger("polybus.store")


class WriteFuture(task_future.TaskFuture, Future[Any]):
    """The future of a task, with its subject and its approximate size in bytes.

    If `alone`, the task runs between transactions instead of as part of one.
    """


class StoreWriter:
    def __init__(
        self,
        state: WriterState,
        txn_writer: TransactionWriter,
        tasks: BackgroundTasks,
        wall_ns: Callable[[], int],
        on_visible: Callable[[WriteBatch], None],
    ) -> None:
        self.state = state
        self._txn_writer = txn_writer
        self._tasks = tasks
        self._wall_ns = wall_ns
        self._on_visible = on_visible
        self._queue: WriterQueue[WriteFuture] = WriterQueue()
        self._end = WriteFuture()  # queued last, by close
        # Dequeued while a group was taken, but not part of it: runs after the group.
        self._exclusive: WriteFuture | None = None
        # Decided once per group: the limit must not change while it is filled.
        self._is_yielding = False
        # The callbacks run on its thread: they must not touch state that only the writer thread
        # may change.
        self._committer = BackgroundCommitter(self._write_batch, self._resolve_all, self._wake)
        self._has_background_commit = False  # submitted and not yet waited for
        self._foreground_count: Callable[[], int] = int
        self._foreground_seen = 0
        # When gathered changes must be written: used by interval durability alone.
        self._due_s: float | None = None
        # A daemon, so that a program that forgets to close its store can still exit.
        self._thread = threading.Thread(target=self._run, name="polybus-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def yield_to(self, others: Callable[[], int]) -> None:
        """Keep groups small while the count that `others` returns keeps growing."""
        self._foreground_count = others

    def submit(
        self, task: Task, subject: Any = None, size: int = 0, *, alone: bool = False
    ) -> Future[Any]:
        """Queue a task. If `alone`, it runs between two transactions, with none in flight."""
        future = WriteFuture(task, subject, size, alone)
        try:
            self._queue.put(future, size, urgent=alone)
        except PolybusError as error:  # closed, or full
            future.set_exception(error)
        return future

    def submit_all(
        self, task: Task, subjects: Sequence[Any], sizes: Sequence[int]
    ) -> list[Future[Any]]:
        """Submit many tasks in one step, so that the thread finds all of them in one group."""
        futures: list[Future[Any]] = []
        futures += map(WriteFuture, repeat(task), subjects, sizes)
        try:
            self._queue.put_all(futures, sum(sizes))  # type: ignore[arg-type]
        except PolybusError:  # closed or full: some of them may fit
            return [self.submit(task, *pair) for pair in zip(subjects, sizes, strict=True)]
        return futures

    def close(self) -> None:
        """Execute all queued tasks and end the thread."""
        if self._queue.put_last(self._end):
            self._thread.join()

    # --- on the thread

    def _run(self) -> None:
        while True:
            self._queue.wait(self._tasks.wait_s(self._due_s))
            # The foreground is active if its count has grown since the last group.
            seen, self._foreground_seen = self._foreground_seen, self._foreground_count()
            self._is_yielding = seen != self._foreground_seen
            group: list[WriteFuture] = []
            self._take_group(group)
            if group:
                self._process_group(group)
            # An exclusive task was queued after the group, so it must run after it.
            exclusive, self._exclusive = self._exclusive, None
            if exclusive is self._end:
                self._settle_all()
                self._committer.close()
                self._finish()
                return
            if exclusive is not None:
                self._settle_all()
                self._process_alone(exclusive)
            self._run_background_tasks(bool(group))

    def _take_group(self, group: list[WriteFuture]) -> None:
        """Add queued tasks to a group, up to the limits of one transaction."""
        max_bytes = SMALL_GROUP_BYTES if self._is_yielding else GROUP_BYTES
        size = added = sum([future.size for future in group])
        while self._exclusive is None and size < max_bytes and len(group) < GROUP_OPERATIONS:
            first = self._queue.pop()
            if first is None:
                break
            # It ends the group: it needs a store without a transaction in flight.
            if first.alone or first is self._end:
                self._exclusive = first
                break
            group.append(first)
            size += first.size
        self._queue.release_bytes(size - added)

    def _process_group(self, group: list[WriteFuture], *, alone: bool = False) -> None:
        """Execute a group, write its batch and resolve its futures.

        If `alone`, no other task joins the group.
        """
        try:
            executed = task_future.run_tasks(group, self.state, self._wall_ns(), PolybusError)
            # The batch in flight may fail after the group was executed on top of it. Then the
            # state was rolled back, and the group must be executed again.
            while self._has_background_commit and not self._settled():
                executed = task_future.run_tasks(group, self.state, self._wall_ns(), PolybusError)
            known = len(group)
            if not alone:
                # Tasks that arrived while the previous batch was written share this transaction.
                self._take_group(group)
            if len(group) > known:
                late = group[known:]
                executed += task_future.run_tasks(late, self.state, self._wall_ns(), PolybusError)
            batch = self.state.take_batch()
            self._tasks.reblocker.note_batch(batch)
            # Not while yielding, because two threads would disturb the foreground more than one.
            # Not if the batch has removals, because the writer continues them right after it.
            is_background = (
                batch.size >= LARGE_BYTES and not self._is_yielding and not batch.has_removals
            )
            if is_background and self._committer.ensure_started():
                # Encoding needs the interpreter, so the other thread, which is for the disk, would
                # not run beside this one.
                batch.encode_blocks()
                self._has_background_commit = True
                self._committer.submit_work(CommitWork(batch, executed, group))
                return
            # CPU time of this thread, not wall time: only its own work disturbs the foreground,
            # not the wait for the disk.
            began_s = time.thread_time()
            self._write_batch(batch)
        except BaseException as error:
            self._settle_all()
            self._on_group_failed(group, error)
            return
        self.state.confirm()
        self._resolve_all(executed)
        if self._is_yielding and batch.size >= REST_AFTER_BYTES:
            time.sleep(REST_FACTOR * (time.thread_time() - began_s))

    def _settled(self) -> bool:
        """Wait for the batch in flight. Returns False if it failed and was rolled back."""
        failed = self._committer.wait()
        self._has_background_commit = False
        if failed is None:
            self.state.confirm()
            return True
        self._on_group_failed(*failed)
        return False

    def _settle_all(self) -> None:
        # Without a batch in flight there is nothing to confirm: leases that are marked as in
        # flight may belong to a batch that has just failed.
        while self._has_background_commit:
            self._settled()

    def _on_group_failed(self, group: list[WriteFuture], error: BaseException) -> None:
        """Roll back a failed group. No other batch may be in flight."""
        self.state.rollback()
        freeing = [one for one in group if one.subject is FREES_ROOM and not one.done()]
        if isinstance(error, StoreFull) and freeing and self._txn_writer.reserve.release():
            # The others would use the room up.
            fail_group([one for one in group if one not in freeing], error)
            self._tasks.resume()
            self._txn_writer.is_on_reserve = True
            self._process_group(freeing, alone=True)
            self._txn_writer.is_on_reserve = False
            return
        # An expected error (a full disk) concerns all of the group. An unexpected one is probably
        # caused by a single task, which the others must not fail for.
        if isinstance(error, PolybusError) or len(group) == 1:
            fail_group(group, error)
            return
        for future in group:
            if not future.done():
                self._process_group([future], alone=True)

    # --- on this thread or on the one of the background committer

    def _write_batch(self, batch: WriteBatch) -> None:
        if batch:
            self._txn_writer.write(batch)
            # Listeners and the cache of recent entries need only changes of topics. They get them
            # before the futures resolve, so that a caller can read its own commit.
            if batch.ends or batch.altered:
                self._on_visible(batch)

    def _resolve_all(self, executed: list[WriteFuture]) -> None:
        # Before the futures resolve: their producers may submit again at once.
        self._queue.expect(len(executed))
        task_future.resolve_all(executed)

    def _wake(self) -> None:
        """Wake the thread."""
        with suppress(StoreClosed):  # then it executes everything that is queued anyway
            self._queue.put(WriteFuture(_nothing), urgent=True)

    # --- on the thread

    def _process_alone(self, future: WriteFuture) -> None:
        try:
            executed = task_future.run_tasks([future], self.state, self._wall_ns(), PolybusError)
        except Exception as error:
            fail_group([future], error)
        else:
            task_future.resolve_all(executed)

    def _finish(self) -> None:
        """Do the last work before the thread ends."""

    def _run_background_tasks(self, busy: bool) -> None:
        try:
            if self.state.leases.next_expiry_s() == 0 and not self._tasks.is_paused():
                # Expired stages are collected by an ordinary task, so that it is atomic and rolled
                # back like any other.
                expired = self.state.leases.expired()
                collected = WriteFuture(staged_blocks.collect_expired, expired)
                self._process_group([collected], alone=True)
                collected.result()
            # Under constant load a batch is always in flight and the cache would never shrink.
            if self._has_background_commit and self.state.cache.is_large:
                self._settle_all()
            self._tasks.run_step(busy, self._settle_all)
        except PolybusError as error:
            self._tasks.pause()
            _log.warning("background task of the store failed; it will be retried: %s", error)
        except Exception:
            self._tasks.pause()
            _log.exception("background task of the store failed; it will be retried")


def fail_group(group: list[WriteFuture], error: BaseException) -> None:
    """Set the error of all unresolved futures of a group."""
    if not isinstance(error, PolybusError):
        _log.error("a transaction failed", exc_info=error)
        error = StoreFault(f"the store failed: {error!r}")
    for future in group:
        if not future.done():
            future.set_exception(error)


def _nothing(_state: WriterState, _subject: None, _now_ns: int) -> None:
    """Do nothing: the task of `_wake`."""
