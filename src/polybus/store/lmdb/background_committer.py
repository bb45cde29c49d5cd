"""A thread that writes one batch while the writer thread gathers the next.

Most of the time of a large transaction is the disk's and the kernel's, and neither needs
the interpreter. At most one batch is in flight: the writer waits for it before it submits
the next one or changes the store in any other way.

A batch that could not be written is kept, with the error, for the writer, which must roll
back and execute again all it has gathered since, because that depends on the lost batch.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polybus.store.lmdb.write_batch import WriteBatch
    from polybus.store.lmdb.writer import WriteFuture


class CommitWork(NamedTuple):
    """A batch, the futures to resolve after it, and the group that it was made of."""

    batch: WriteBatch
    executed: list[WriteFuture]
    group: list[WriteFuture]


class FailedCommit(NamedTuple):
    """A group whose batch was not written, and the error."""

    group: list[WriteFuture]
    error: BaseException


class BackgroundCommitter:
    def __init__(
        self,
        write: Callable[[WriteBatch], None],
        answer: Callable[[list[WriteFuture]], None],
        on_failure: Callable[[], None],
    ) -> None:
        """All callbacks run on the thread. `on_failure` must make the owner call `wait`."""
        self._write = write
        self._answer = answer
        self._on_failure = on_failure
        self._work: CommitWork | None = None
        self._failed: FailedCommit | None = None
        self._idle = Lock()  # held while a batch is in flight
        self._work_ready = Lock()  # held while there is no work
        self._work_ready.acquire()
        self._thread: Thread | None = None  # most stores never need it

    def ensure_started(self) -> bool:
        """Start the thread if needed. Returns False if the process cannot have another one."""
        if self._thread is None:
            thread = Thread(target=self._run, name="polybus-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def submit_work(self, work: CommitWork) -> None:
        """Write a batch. Requires `ensure_started`, and a `wait` that returned None."""
        # Held by this thread and released by the other one, which a plain Lock allows.
        self._idle.acquire()
        self._work = work
        self._work_ready.release()

    def wait(self) -> FailedCommit | None:
        """Wait until no batch is in flight. Returns the failed commit, once, or None."""
        if self._thread is None:
            return None
        # The thread releases it after it has set `_failed` or resolved the futures.
        with self._idle:
            failed, self._failed = self._failed, None
            return failed

    def close(self) -> None:
        """End the thread. Must be called after the last `wait`."""
        if self._thread is not None:
            # Released without work, which ends the thread.
            self._work_ready.release()
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._work_ready.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            try:
                self._write(work.batch)
            except BaseException as error:
                self._failed = FailedCommit(work.group, error)
                # Before the owner is woken: it calls `wait`, which needs the lock.
                self._idle.release()
                self._on_failure()
            else:
                try:
                    self._answer(work.executed)
                finally:
                    self._idle.release()  # last, so that groups resolve one after the other
            del work  # a large batch must not stay in memory until the next one
