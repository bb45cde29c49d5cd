"""The one thread that writes: takes all that waits, makes one transaction of it, answers.

Everything that changes the store is an operation: a function of the books and the
time, handed over with a Future. While one transaction is on its way to the disk, the
next ones gather; they then go together, so the disk is waited for once for all of
them. Nothing is answered before it is on disk, refusals included: they may rest on
what was not written in the end.

Between groups, while nobody waits, the thread does its chores: leases, re-blocking,
removal. Under constant load they get a small share of the time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Final, NamedTuple

from polybus.errors import PolybusError, StoreClosed, StoreFault
from polybus.store.lmdb.batch import Batch
from polybus.store.lmdb.books import Books
from polybus.store.lmdb.chores import Chores
from polybus.store.lmdb.queueing import Queue
from polybus.store.lmdb.storing import Storing

# One transaction takes so much, so that the first who wait are not kept by the last.
GROUP_OPERATIONS: Final = 4096
GROUP_BYTES: Final = 32 << 20

Operation = Callable[[Books, int], Any]

_log = logging.getLogger("polybus.store")


class Waiting(NamedTuple):
    operation: Operation | None  # None: the end
    future: Future[Any]
    size: int  # in bytes, about
    alone: bool = False  # between transactions, not as part of one


class Done(NamedTuple):
    future: Future[Any]
    result: Any
    error: BaseException | None


class Writer:
    def __init__(
        self,
        books: Books,
        storing: Storing,
        chores: Chores,
        wall_ns: Callable[[], int],
        tell: Callable[[Batch], None],
    ) -> None:
        self.books = books
        self._storing = storing
        self._chores = chores
        self._wall_ns = wall_ns
        self._tell = tell
        self._queue: Queue[Waiting] = Queue()
        self.pages = 0  # written after they were answered: of interval durability alone
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="polybus-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, operation: Operation, size: int = 0) -> Future[Any]:
        return self._hand_over(Waiting(operation, Future(), size))

    def run_alone(self, operation: Operation) -> Any:
        """Between two transactions, with nothing on its way; waits for the answer."""
        return self._hand_over(Waiting(operation, Future(), 0, True)).result()

    def settle(self, concerns: Callable[[Batch], bool]) -> bool:
        """What was answered can be read; whether that had to be waited for. Here it never has."""
        return False

    def close(self) -> None:
        """Finishes all that was handed over."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._queue.put(Waiting(None, Future(), 0), urgent=True)
        self._thread.join()

    def _hand_over(self, waiting: Waiting) -> Future[Any]:
        with self._closing:
            if self._closed:
                waiting.future.set_exception(StoreClosed("the store was closed"))
            else:
                self._queue.put(waiting, urgent=waiting.alone)
        return waiting.future

    # --- on the thread

    def _run(self) -> None:
        while True:
            group, alone, over = self._take()
            if group:
                self._serve(group)
            if alone is not None:
                self._serve_alone(alone)
            if over:
                self._finish()
                return
            self._do_chores(bool(group))

    def _take(self) -> tuple[list[Waiting], Waiting | None, bool]:
        """A group of operations, one to be done alone after it, and whether that was all."""
        group: list[Waiting] = []
        size = 0
        self._queue.wait(self._wait_s())
        while (first := self._queue.pop()) is not None:
            if first.operation is None:
                return group, None, True
            if first.alone:
                return group, first, False
            group.append(first)
            size += first.size
            if size >= GROUP_BYTES or len(group) >= GROUP_OPERATIONS:
                break
        return group, None, False

    def _wait_s(self) -> float | None:
        return self._chores.wait_s()

    def _serve(self, group: list[Waiting]) -> None:
        now_ns = self._wall_ns()
        try:
            done = [one for waiting in group if (one := self._do(waiting, now_ns))]
            self._write(self.books.turn_page())
        except BaseException as error:
            self.books.burn()
            if isinstance(error, PolybusError) or len(group) == 1:
                fail(group, error)
            else:
                self._serve_each(group)
            return
        self._queue.answered(len(done))
        answer(done)

    def _serve_each(self, group: list[Waiting]) -> None:
        """One of them cannot be done, for a reason nobody thought of: the others need not pay."""
        for waiting in group:
            if not waiting.future.done():
                self._serve([waiting])

    def _do(self, waiting: Waiting, now_ns: int) -> Done | None:
        future = waiting.future
        if not future.running() and not future.set_running_or_notify_cancel():
            return None
        assert waiting.operation is not None
        try:
            return Done(future, waiting.operation(self.books, now_ns), None)
        except PolybusError as error:
            return Done(future, None, error)

    def _write(self, batch: Batch) -> None:
        if not batch:
            return
        self._chores.note(batch)
        self._storing.write(batch)
        self.books.leases.keep()
        self.books.known.shrink()
        if batch.ends:
            self._tell(batch)

    def _serve_alone(self, waiting: Waiting) -> None:
        try:
            done = self._do(waiting, self._wall_ns())
        except Exception as error:
            fail([waiting], error)
        else:
            answer([] if done is None else [done])

    def _finish(self) -> None:
        """The end: nothing is left to be done."""

    def _do_chores(self, busy: bool) -> None:
        try:
            expired = self._chores.expired()
            if expired:
                collected: Future[Any] = Future()
                self._serve([Waiting(expired, collected, 0)])
                collected.result()
            self._chores.do(busy)
        except PolybusError as error:
            self._chores.pause()
            _log.warning("upkeep of the store failed, and will be tried again: %s", error)
        except Exception:
            self._chores.pause()
            _log.exception("upkeep of the store failed, and will be tried again")


def answer(done: list[Done]) -> None:
    for future, result, error in done:
        try:
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        except InvalidStateError:
            pass  # cancelled before it was taken up
        except BaseException:  # such as a cancelled task's: this thread is everybody's
            _log.exception("a callback of a future failed")


def fail(group: list[Waiting], error: BaseException) -> None:
    """What became of a group that could not be done."""
    if not isinstance(error, PolybusError):
        _log.error("a transaction failed", exc_info=error)
        error = StoreFault(f"the store failed: {error!r}")
    answer([Done(one.future, None, error) for one in group if not one.future.done()])
