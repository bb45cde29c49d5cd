"""The writer of durability `interval`: futures resolve when queued, the disk follows later.

Ids are assigned and stamps are checked on the caller's thread, under a lock. The gathered
batch is written with fsync once per interval. Unwritten changes cannot be read: a read that
concerns them waits for the write, so no reader sees a message that a crash may take back.

A write that fails is retried every interval with the same batch, because its futures were
resolved. Until it succeeds, every new task is refused. Gathered bytes are bounded: beyond
`MAX_BYTES`, tasks wait unresolved in a backlog that has the limits of the writer's queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any, Final

from polybus.errors import PolybusError, StoreClosed, StoreFault
from polybus.kernel import task_future
from polybus.store.lmdb.write_batch import WriteBatch
from polybus.store.lmdb.writer import StoreWriter, Task, WriteFuture, fail_group
from polybus.store.lmdb.writer_queue import check_limits

EARLY_BYTES: Final = 16 << 20  # flush before the interval ends
MAX_BYTES: Final = 64 << 20
LAST_TRIES: Final = 20  # when closing, before resolved changes are given up

_log = logging.getLogger("polybus.store")


class IntervalWriter(StoreWriter):
    def __init__(self, *args: Any, interval_s: float) -> None:
        super().__init__(*args)
        self._interval_s = interval_s
        self._changed = threading.Condition(threading.RLock())
        self.flush_count = 0
        self._writing: WriteBatch | None = None  # being written, or to be retried
        self._failure: PolybusError | None = None
        self._backlog: deque[WriteFuture] = deque()
        self._backlog_bytes = 0
        self._gathered_bytes = 0
        self._writing_bytes = 0

    def submit(
        self, task: Task, subject: Any = None, size: int = 0, *, alone: bool = False
    ) -> Future[Any]:
        """Execute a task, or add it to the backlog if too many bytes are gathered."""
        if alone:
            return super().submit(task, subject, size, alone=True)
        future = WriteFuture(task, subject, size)
        executed: list[WriteFuture] = []
        with self._changed:
            # A batch that cannot be written stays in memory, so it counts as well.
            is_full = self._gathered_bytes + self._writing_bytes >= MAX_BYTES
            if self._queue.closed:
                future.set_exception(StoreClosed("the store was closed"))
            elif self._failure is not None:
                # While a write fails, a new task could only resolve with a result that may be lost.
                # Each gets an error of its own: raising a shared one again would extend its
                # traceback, which holds frames, for as long as the disk is full.
                future.set_exception(copy(self._failure))
            # A task must not overtake the backlog: tasks of a thread take effect in order.
            elif self._backlog or is_full:
                try:
                    check_limits(len(self._backlog) + 1, self._backlog_bytes + size)
                except PolybusError as error:
                    future.set_exception(error)
                else:
                    self._backlog.append(future)
                    self._backlog_bytes += size
                    self._flush_soon()
            else:
                executed = self._gather(future)
        # Outside of the lock: callbacks of the future may call the store again.
        task_future.resolve_all(executed)
        return future

    def submit_all(
        self, task: Task, subjects: Sequence[Any], sizes: Sequence[int]
    ) -> list[Future[Any]]:
        return [self.submit(task, *pair) for pair in zip(subjects, sizes, strict=True)]

    def settle(self, concerns: Callable[[WriteBatch], bool]) -> bool:
        """Wait until resolved changes can be read. Returns whether it waited."""
        with self._changed:
            # A batch that is being written counts one flush, the gathered one comes after it.
            if concerns(self.state.batch):
                flushes = self.flush_count + (2 if self._writing else 1)
            elif self._writing is not None and concerns(self._writing):
                flushes = self.flush_count + 1
            else:
                return False
            self._flush_soon()
            self._changed.wait_for(lambda: self.flush_count >= flushes or self._failure is not None)
        return True

    def close(self) -> None:
        super().close()
        if self._failure is not None:
            raise self._failure

    # --- under the lock

    def _gather(self, future: WriteFuture) -> list[WriteFuture]:
        """Execute a task as part of the gathered batch. Returns the futures to resolve."""
        try:
            executed = task_future.run_tasks([future], self.state, self._wall_ns(), PolybusError)
        except Exception as error:
            fail_group([future], error)
            return []
        self._gathered_bytes += future.size
        # A large batch would otherwise grow for the whole interval and then be written at once.
        if self._gathered_bytes >= EARLY_BYTES:
            self._flush_soon()
        elif self._due_s is None:
            self._due_s = time.monotonic() + self._interval_s
            self._wake()
        return executed

    def _flush_soon(self) -> None:
        self._due_s = 0.0
        self._wake()

    # --- on the thread

    def _process_group(self, group: list[WriteFuture], *, alone: bool = False) -> None:
        """Execute queued tasks. Only wake-ups and background tasks use the queue here."""
        with self._changed:
            executed = task_future.run_tasks(group, self.state, self._wall_ns(), PolybusError)
            if self._due_s is None and self.state.batch:
                self._due_s = time.monotonic() + self._interval_s
        task_future.resolve_all(executed)

    def _process_alone(self, future: WriteFuture) -> None:
        self._flush()
        super()._process_alone(future)

    def _run_background_tasks(self, busy: bool) -> None:
        if self._due_s is not None and time.monotonic() >= self._due_s:
            self._flush()
        if self._failure is None:
            super()._run_background_tasks(busy)

    def _finish(self) -> None:
        tries = 0
        while tries < LAST_TRIES:
            with self._changed:
                if not (self._writing or self.state.batch or self._backlog):
                    break
            if not self._flush():
                tries += 1
                time.sleep(self._interval_s)
        if self._failure is not None:
            _log.error("resolved commits were lost, the last write failed: %s", self._failure)

    def _flush(self) -> bool:
        """Write the gathered batch. Returns False if it fails."""
        # A failed batch comes first; then the batch that was gathered after it. Tasks that
        # arrive meanwhile are left for the next flush, or it would never end under load.
        for _ in range(1 if self._writing is None else 2):
            with self._changed:
                self._due_s = None
                if self._writing is None:
                    self._writing = self.state.take_batch() or None
                    self._writing_bytes, self._gathered_bytes = self._gathered_bytes, 0
                batch = self._writing
                if batch is None:
                    self._writing_bytes = 0
                    self.flush_count += 1
                    self._changed.notify_all()
                    break
            try:
                self._tasks.reblocker.note_batch(batch)
                self._txn_writer.write(batch)
            except Exception as error:
                self._on_failure(error)
                return False
            task_future.resolve_all(self._on_written(batch))
        return True

    def _on_written(self, batch: WriteBatch) -> list[WriteFuture]:
        """Make a batch visible. Returns futures of the backlog that were executed."""
        with self._changed:
            self._writing, self._failure, self._writing_bytes = None, None, 0
            self.flush_count += 1
            self.state.confirm()
            executed: list[WriteFuture] = []
            while self._backlog and self._gathered_bytes < MAX_BYTES:
                future = self._backlog.popleft()
                self._backlog_bytes -= future.size
                executed += self._gather(future)
            self._changed.notify_all()
        if batch.ends or batch.altered:
            self._on_visible(batch)
        return executed

    def _on_failure(self, error: Exception) -> None:
        if not isinstance(error, PolybusError):
            _log.error("a transaction failed", exc_info=error)
            error = StoreFault(f"the store failed: {error!r}")
        with self._changed:
            self._failure = error
            self._due_s = time.monotonic() + self._interval_s
            # The backlog was not executed, so its futures can fail; those of the batch resolved
            # already.
            refused = list(self._backlog)
            self._backlog.clear()
            self._backlog_bytes = 0
            self._changed.notify_all()
        fail_group(refused, error)
