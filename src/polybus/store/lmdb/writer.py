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

from polybus.errors import PolybusError, StoreClosed, StoreFault
from polybus.kernel import task_future
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
# 0.6 ms; with four times the bytes and a factor of 1 it is 1 ms. Throughput halves.
SMALL_GROUP_BYTES: Final = 128 << 10
REST_AFTER_BYTES: Final = SMALL_GROUP_BYTES // 2  # a smaller group needs no rest
REST_FACTOR: Final = 2.5
# A smaller batch is written by this thread: waking the other one takes as long.
LARGE_BYTES: Final = 256 << 10

Task = Callable[[WriterState, Any, int], Any]

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
        self._max_bytes = GROUP_BYTES
        # The callbacks run on its thread: they must not touch state that only the writer thread
        # may change.
        self._committer = BackgroundCommitter(self._write_batch, self._resolve_all, self._wake)
        self._has_background_commit = False  # submitted and not yet waited for
        self._foreground_count: Callable[[], int] = int
        self._foreground_seen = 0
        self.flush_count = 0  # used by interval durability alone
        # A daemon, so that a program that forgets to close its store can still exit.
        self._thread = threading.Thread(target=self._run, name="polybus-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def yield_to(self, others: Callable[[], int]) -> None:
        """Keep groups small while the count that `others` returns keeps growing."""
        self._foreground_count = others

    def submit(self, task: Task, subject: Any = None, size: int = 0) -> Future[Any]:
        return self._enqueue(WriteFuture(task, subject, size))

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

    def run_alone(self, task: Task) -> Any:
        """Run a task between two transactions, with none in flight, and return its result."""
        return self._enqueue(WriteFuture(task, None, 0, True)).result()

    def settle(self, concerns: Callable[[WriteBatch], bool]) -> bool:
        """Wait until resolved changes can be read. Returns whether it waited: never."""
        return False

    def close(self) -> None:
        """Execute all queued tasks and end the thread."""
        if self._queue.put_last(self._end):
            self._thread.join()

    def _enqueue(self, future: WriteFuture) -> WriteFuture:
        try:
            self._queue.put(future, future.size, urgent=future.alone)
        except PolybusError as error:  # closed, or full
            future.set_exception(error)
        return future

    # --- on the thread

    def _run(self) -> None:
        while True:
            self._queue.wait(self._wait_s())
            # Decided once per group: the limit must not change while it is filled.
            self._max_bytes = self._group_limit()
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
        size = added = sum([future.size for future in group])
        while self._exclusive is None and size < self._max_bytes and len(group) < GROUP_OPERATIONS:
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

    def _group_limit(self) -> int:
        seen, self._foreground_seen = self._foreground_seen, self._foreground_count()
        return GROUP_BYTES if seen == self._foreground_seen else SMALL_GROUP_BYTES

    def _wait_s(self) -> float | None:
        return self._tasks.wait_s()

    def _process_group(self, group: list[WriteFuture], *, alone: bool = False) -> None:
        try:
            executed = self._execute_group(group)
            # The batch in flight may fail after the group was executed on top of it. Then the
            # state was rolled back, and the group must be executed again.
            while not self._settled():
                executed = self._execute_group(group)
            if not alone:
                executed += self._execute_late(group)
            batch = self.state.take_batch()
            self._tasks.note_batch(batch)
            if self._is_background_commit(batch) and self._committer.ensure_started():
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
        self._on_committed()
        self._resolve_all(executed)
        if self._is_yielding and batch.size >= REST_AFTER_BYTES:
            time.sleep(REST_FACTOR * (time.thread_time() - began_s))

    @property
    def _is_yielding(self) -> bool:
        return self._max_bytes == SMALL_GROUP_BYTES

    def _is_background_commit(self, batch: WriteBatch) -> bool:
        """Return True if the second thread should write the batch.

        Not while yielding, because two threads would disturb the foreground more than one.
        Not if the batch has removals, because the writer continues them right after it.
        """
        return batch.size >= LARGE_BYTES and not self._is_yielding and not batch.has_removals

    def _execute_group(self, group: list[WriteFuture]) -> list[WriteFuture]:
        return task_future.run_tasks(group, self.state, self._wall_ns(), PolybusError)

    def _execute_late(self, group: list[WriteFuture]) -> list[WriteFuture]:
        """Take and execute the tasks that arrived while the previous batch was written."""
        known = len(group)
        self._take_group(group)
        return self._execute_group(group[known:]) if len(group) > known else []

    def _settled(self) -> bool:
        """Wait for the batch in flight. Returns False if it failed and was rolled back."""
        failed = self._committer.wait()
        was_pending, self._has_background_commit = self._has_background_commit, False
        if failed is None:
            if was_pending:  # without one, the leases in flight may belong to a failed batch
                self._on_committed()
            return True
        self._on_group_failed(*failed)
        return False

    def _settle_all(self) -> None:
        while not self._settled():
            pass

    def _on_group_failed(self, group: list[WriteFuture], error: BaseException) -> None:
        """Roll back a failed group. No other batch may be in flight."""
        self.state.rollback()
        # An expected error (a full disk) concerns all of the group. An unexpected one is probably
        # caused by a single task, which the others must not fail for.
        if isinstance(error, PolybusError) or len(group) == 1:
            fail_group(group, error)
        else:
            self._process_each(group)

    def _process_each(self, group: list[WriteFuture]) -> None:
        """Execute each task on its own, because one of them fails for an unexpected reason."""
        for future in group:
            if not future.done():
                self._process_group([future], alone=True)

    def _on_committed(self) -> None:
        """Confirm the batch that is on disk now."""
        self.state.leases.confirm()
        # With an empty batch nothing depends on the cache, so tables may be dropped.
        if not self.state.batch:
            self.state.cache.shrink()

    # --- on this thread or on the one of the background committer

    def _write_batch(self, batch: WriteBatch) -> None:
        if batch:
            self._txn_writer.write(batch)
            # Listeners and the cache of recent entries need only changes of topics.
            if batch.ends or batch.altered:
                self._on_visible(batch)

    def _resolve_all(self, executed: list[WriteFuture]) -> None:
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
            expired = self._tasks.expiry_task()
            if expired:
                # Expired stages are collected by an ordinary task, so that it is atomic and rolled
                # back like any other.
                collected = WriteFuture(expired)
                self._process_group([collected], alone=True)
                collected.result()
            # Under constant load a batch is always in flight and the cache would never shrink.
            if self.state.cache.is_large:
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
