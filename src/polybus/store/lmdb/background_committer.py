"""A thread that writes one batch, while its owner gathers the next.

Most of the time that a large transaction takes is the disk's, and the kernel's copying, and
neither needs the interpreter. So the writer hands it over, and gathers meanwhile. One batch is
under way at a time: the owner waits for it before it hands over the next, or does anything else
to the store.

A batch that could not be written is kept, with the reason, for the owner: what it has gathered
since rests on it, and has to be done anew.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polybus.store.lmdb.write_batch import WriteBatch
    from polybus.store.lmdb.writer import WriteFuture


class CommitWork(NamedTuple):
    """A batch, the answers that wait for it, and the group that it was made of."""

    batch: WriteBatch
    executed: list[WriteFuture]
    group: list[WriteFuture]


class FailedCommit(NamedTuple):
    """A group whose batch was not written, and why."""

    group: list[WriteFuture]
    error: BaseException


class BackgroundCommitter:
    def __init__(
        self,
        write: Callable[[WriteBatch], None],
        answer: Callable[[list[WriteFuture]], None],
        on_failure: Callable[[], None],
    ) -> None:
        """All three are called on the thread; the last so that the owner comes to `wait`."""
        self._write = write
        self._answer = answer
        self._on_failure = on_failure
        self._work: CommitWork | None = None
        self._failed: FailedCommit | None = None
        self._idle = Lock()  # held while a batch is under way
        self._work_ready = Lock()  # held while there is nothing to do
        self._work_ready.acquire()
        self._thread: Thread | None = None  # most stores never need it

    def ensure_started(self) -> bool:
        """The thread is started when first asked for; False if the process can have no more."""
        if self._thread is None:
            thread = Thread(target=self._run, name="polybus-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def submit_work(self, work: CommitWork) -> None:
        """If it `is_there`, after a `wait` that found nothing failed."""
        self._idle.acquire()
        self._work = work
        self._work_ready.release()

    def wait(self) -> FailedCommit | None:
        """Until no batch is under way; the one that was failed, which is told once."""
        if self._thread is None:
            return None
        with self._idle:
            failed, self._failed = self._failed, None
            return failed

    def close(self) -> None:
        """After the last `wait`."""
        if self._thread is not None:
            self._work_ready.release()
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._work_ready.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            self._commit_work(work)
            del work  # its memory is not kept for longer

    def _commit_work(self, work: CommitWork) -> None:
        try:
            self._write(work.batch)
        except BaseException as error:
            self._failed = FailedCommit(work.group, error)
            self._idle.release()
            self._on_failure()
        else:
            try:
                self._answer(work.executed)
            finally:
                self._idle.release()  # last: groups are answered one after the other
