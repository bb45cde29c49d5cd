"""The one thread that writes: takes all that waits, makes one transaction of it, answers.

Everything that changes the store is a task: a function of the state, its subject and
the time, handed over with the answer that its caller waits for. While one transaction
is on its way to the disk, the next ones gather; they then go together, so the disk is
waited for once for all of them. Nothing is answered before it is on disk, refusals
included: they may rest on what was not written in the end.

A large transaction is written by a thread beside this one (`beside`), so that the next group is
carried out meanwhile. Should it fail, that group is carried out once more, without it.

While the disk's kernel side takes a transaction over, a processor may do nothing else, for a
millisecond if it is large. Whoever talks to other threads of this process would feel that: so
while somebody does (`give_way`), transactions are small, and after all but the smallest the
thread rests for longer than it has worked.

Between groups, while nobody waits, the thread does its tasks: leases, re-blocking,
removal. Under constant load they get a small share of the time.
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

# One transaction takes so much, so that the first who wait are not kept by the last.
GROUP_OPERATIONS: Final = 4096
GROUP_BYTES: Final = 32 << 20
# While there are others to give way to: little at a time, and rests behind it, of so many times
# the work. rqueue's p99 beside a full load is 0.4 to 0.6 ms so, and 1 ms with four times as much
# and rests as long as the work; what is stored meanwhile is less than half.
SMALL_GROUP_BYTES: Final = 128 << 10
REST_AFTER_BYTES: Final = SMALL_GROUP_BYTES // 2  # what is smaller needs no rest
REST_FACTOR: Final = 2.5
# What is smaller is written at once: to wake another thread would take as long.
LARGE_BYTES: Final = 256 << 10

Task = Callable[[WriterState, Any, int], Any]

_log = logging.getLogger("polybus.store")


class WriteFuture(task_future.TaskFuture, Future[Any]):
    """What a caller waits for: a task of the writer's, its subject, its size in bytes, about.

    `alone` is what is done between transactions, and not as part of one.
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
        self._end = WriteFuture()  # what is handed over last
        self._exclusive: WriteFuture | None = (
            None  # taken, and no part of a group: to be done behind it
        )
        self._max_bytes = GROUP_BYTES
        self._committer = BackgroundCommitter(self._write_batch, self._resolve_all, self._wake)
        self._has_background_commit = False  # something was handed over, and not waited for yet
        self._foreground_count: Callable[[], int] = int
        self._foreground_seen = 0
        self.flush_count = 0  # written after they were answered: of interval durability alone
        self._thread = threading.Thread(target=self._run, name="polybus-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def yield_to(self, others: Callable[[], int]) -> None:
        """`others` counts up while somebody waits for other threads than this one."""
        self._foreground_count = others

    def submit(self, task: Task, subject: Any = None, size: int = 0) -> Future[Any]:
        return self._enqueue(WriteFuture(task, subject, size))

    def submit_all(
        self, task: Task, subjects: Sequence[Any], sizes: Sequence[int]
    ) -> list[Future[Any]]:
        """The same for many, handed over in one step: the thread finds all of them."""
        futures: list[Future[Any]] = []
        futures += map(WriteFuture, repeat(task), subjects, sizes)
        try:
            self._queue.put_all(futures, sum(sizes))  # type: ignore[arg-type]
        except PolybusError:  # closed, or too many at once: some may find room
            return [self.submit(task, *one) for one in zip(subjects, sizes, strict=True)]
        return futures

    def run_alone(self, task: Task) -> Any:
        """Between two transactions, with nothing on its way; waits for the future."""
        return self._enqueue(WriteFuture(task, None, 0, True)).result()

    def settle(self, concerns: Callable[[WriteBatch], bool]) -> bool:
        """What was answered can be read; whether that had to be waited for. Here it never has."""
        return False

    def close(self) -> None:
        """Finishes all that was handed over."""
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
            self._max_bytes = self._group_limit()
            group: list[WriteFuture] = []
            self._take_group(group)
            if group:
                self._process_group(group)
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
        """Adds what waits to a group, as much as a transaction takes."""
        size = added = sum([future.size for future in group])
        while self._exclusive is None and size < self._max_bytes and len(group) < GROUP_OPERATIONS:
            first = self._queue.pop()
            if first is None:
                break
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
            while not self._settled():  # then the state know nothing of it any more
                executed = self._execute_group(group)
            if not alone:
                executed += self._execute_late(group)
            batch = self.state.take_batch()
            self._tasks.note_batch(batch)
            if self._is_background_commit(batch) and self._committer.ensure_started():
                batch.encode_blocks()
                self._has_background_commit = True
                self._committer.submit_work(CommitWork(batch, executed, group))
                return
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
        """Not while others are given way to: two threads would be more in their way than one.

        Nor if it leaves something to be removed: the writer goes on with that, at once.
        """
        return batch.size >= LARGE_BYTES and not self._is_yielding and not batch.has_removals

    def _execute_group(self, group: list[WriteFuture]) -> list[WriteFuture]:
        return task_future.run_tasks(group, self.state, self._wall_ns(), PolybusError)

    def _execute_late(self, group: list[WriteFuture]) -> list[WriteFuture]:
        """What came while the batch before was written."""
        known = len(group)
        self._take_group(group)
        return self._execute_group(group[known:]) if len(group) > known else []

    def _settled(self) -> bool:
        """Waits for what is written beside this thread; False if that was lost."""
        failed = self._committer.wait()
        was_pending, self._has_background_commit = self._has_background_commit, False
        if failed is None:
            if was_pending:  # else what has left may be what failed just now
                self._on_committed()
            return True
        self._on_group_failed(*failed)
        return False

    def _settle_all(self) -> None:
        while not self._settled():
            pass

    def _on_group_failed(self, group: list[WriteFuture], error: BaseException) -> None:
        """A group could not be done; nothing else is under way."""
        self.state.rollback()
        if isinstance(error, PolybusError) or len(group) == 1:
            fail_group(group, error)
        else:
            self._process_each(group)

    def _process_each(self, group: list[WriteFuture]) -> None:
        """One of them cannot be done, for a reason nobody thought of: the others need not pay."""
        for future in group:
            if not future.done():
                self._process_group([future], alone=True)

    def _on_committed(self) -> None:
        """What was under way is on disk."""
        self.state.leases.confirm()
        if not self.state.batch:
            self.state.cache.shrink()

    # --- on this thread, or on the one beside it

    def _write_batch(self, batch: WriteBatch) -> None:
        if batch:
            self._txn_writer.write(batch)
            if batch.ends or batch.altered:
                self._on_visible(batch)

    def _resolve_all(self, executed: list[WriteFuture]) -> None:
        self._queue.expect(len(executed))
        task_future.resolve_all(executed)

    def _wake(self) -> None:
        """The thread is awake then."""
        with suppress(StoreClosed):  # it is about to do all there is
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
        """The end: nothing is left to be done."""

    def _run_background_tasks(self, busy: bool) -> None:
        try:
            expired = self._tasks.expiry_task()
            if expired:
                collected = WriteFuture(expired)
                self._process_group([collected], alone=True)
                collected.result()
            if self.state.cache.is_large:
                self._settle_all()
            self._tasks.run_step(busy, self._settle_all)
        except PolybusError as error:
            self._tasks.pause()
            _log.warning("upkeep of the store failed, and will be tried again: %s", error)
        except Exception:
            self._tasks.pause()
            _log.exception("upkeep of the store failed, and will be tried again")


def fail_group(group: list[WriteFuture], error: BaseException) -> None:
    """What became of a group that could not be done."""
    if not isinstance(error, PolybusError):
        _log.error("a transaction failed", exc_info=error)
        error = StoreFault(f"the store failed: {error!r}")
    for future in group:
        if not future.done():
            future.set_exception(error)


def _nothing(_state: WriterState, _subject: None, _now_ns: int) -> None:
    """What a nudge asks for."""
