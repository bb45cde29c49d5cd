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
    from polybus.store.lmdb.write_batch import Batch
    from polybus.store.lmdb.writer import Answer


class Work(NamedTuple):
    """A batch, the answers that wait for it, and the group that it was made of."""

    batch: Batch
    begun: list[Answer]
    group: list[Answer]


class Lost(NamedTuple):
    """A group whose batch was not written, and why."""

    group: list[Answer]
    error: BaseException


class Beside:
    def __init__(
        self,
        write: Callable[[Batch], None],
        answer: Callable[[list[Answer]], None],
        on_failure: Callable[[], None],
    ) -> None:
        """All three are called on the thread; the last so that the owner comes to `wait`."""
        self._write = write
        self._answer = answer
        self._on_failure = on_failure
        self._work: Work | None = None
        self._lost: Lost | None = None
        self._idle = Lock()  # held while a batch is under way
        self._given = Lock()  # held while there is nothing to do
        self._given.acquire()
        self._thread: Thread | None = None  # most stores never need it

    def is_there(self) -> bool:
        """The thread is started when first asked for; False if the process can have no more."""
        if self._thread is None:
            thread = Thread(target=self._run, name="polybus-disk", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def hand_over(self, work: Work) -> None:
        """If it `is_there`, after a `wait` that found nothing lost."""
        self._idle.acquire()
        self._work = work
        self._given.release()

    def wait(self) -> Lost | None:
        """Until no batch is under way; the one that was lost, which is told once."""
        if self._thread is None:
            return None
        with self._idle:
            lost, self._lost = self._lost, None
            return lost

    def close(self) -> None:
        """After the last `wait`."""
        if self._thread is not None:
            self._given.release()
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._given.acquire()
            work, self._work = self._work, None
            if work is None:
                return
            self._do(work)
            del work  # its memory is not kept for longer

    def _do(self, work: Work) -> None:
        try:
            self._write(work.batch)
        except BaseException as error:
            self._lost = Lost(work.group, error)
            self._idle.release()
            self._on_failure()
        else:
            try:
                self._answer(work.begun)
            finally:
                self._idle.release()  # last: groups are answered one after the other
