"""The one thread that writes: takes all that waits, makes one transaction of it, answers.

Everything that changes the store is a task: a function of the books, its subject and
the time, handed over with the answer that its caller waits for. While one transaction
is on its way to the disk, the next ones gather; they then go together, so the disk is
waited for once for all of them. Nothing is answered before it is on disk, refusals
included: they may rest on what was not written in the end.

While the disk's kernel side takes a transaction over, a processor may do nothing else, for a
millisecond if it is large. Whoever talks to other threads of this process would feel that: so
while somebody does (`give_way`), transactions are small.

Between groups, while nobody waits, the thread does its chores: leases, re-blocking,
removal. Under constant load they get a small share of the time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import repeat
from typing import Any, Final

from polybus.errors import PolybusError, StoreFault
from polybus.kernel import answers
from polybus.store.lmdb.batch import Batch
from polybus.store.lmdb.books import Books
from polybus.store.lmdb.chores import Chores
from polybus.store.lmdb.queueing import Queue
from polybus.store.lmdb.storing import Storing

# One transaction takes so much, so that the first who wait are not kept by the last.
GROUP_OPERATIONS: Final = 4096
GROUP_BYTES: Final = 32 << 20
GENTLE_BYTES: Final = 512 << 10  # while there are others to give way to

Task = Callable[[Books, Any, int], Any]

_log = logging.getLogger("polybus.store")


class Answer(answers.Answer, Future[Any]):
    """What a caller waits for: a task of the writer's, its subject, its size in bytes, about.

    `alone` is what is done between transactions, and not as part of one.
    """


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
        self._queue: Queue[Answer] = Queue()
        self._end = Answer()  # what is handed over last
        self._others: Callable[[], int] = int
        self._others_seen = 0
        self.pages = 0  # written after they were answered: of interval durability alone
        self._thread = threading.Thread(target=self._run, name="polybus-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_way(self, others: Callable[[], int]) -> None:
        """`others` counts up while somebody waits for other threads than this one."""
        self._others = others

    def submit(self, task: Task, subject: Any = None, size: int = 0) -> Future[Any]:
        return self._hand_over(Answer(task, subject, size))

    def submit_all(
        self, task: Task, subjects: Sequence[Any], sizes: Sequence[int]
    ) -> list[Future[Any]]:
        """The same for many, handed over in one step: the thread finds all of them."""
        answers: list[Future[Any]] = []
        answers += map(Answer, repeat(task), subjects, sizes)
        try:
            self._queue.put_all(answers, sum(sizes))  # type: ignore[arg-type]
        except PolybusError:  # closed, or too many at once: some may find room
            return [self.submit(task, *one) for one in zip(subjects, sizes, strict=True)]
        return answers

    def run_alone(self, task: Task) -> Any:
        """Between two transactions, with nothing on its way; waits for the answer."""
        return self._hand_over(Answer(task, None, 0, True)).result()

    def settle(self, concerns: Callable[[Batch], bool]) -> bool:
        """What was answered can be read; whether that had to be waited for. Here it never has."""
        return False

    def close(self) -> None:
        """Finishes all that was handed over."""
        if self._queue.put_last(self._end):
            self._thread.join()

    def _hand_over(self, answer: Answer) -> Answer:
        try:
            self._queue.put(answer, answer.size, urgent=answer.alone)
        except PolybusError as error:  # closed, or full
            answer.set_exception(error)
        return answer

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

    def _take(self) -> tuple[list[Answer], Answer | None, bool]:
        """A group of operations, one to be done alone after it, and whether that was all."""
        group: list[Answer] = []
        size = 0
        first: Answer | None = None
        self._queue.wait(self._wait_s())
        most = self._max_bytes()
        while size < most and len(group) < GROUP_OPERATIONS:
            first = self._queue.pop()
            if first is None or first.alone or first is self._end:
                break
            group.append(first)
            size += first.size
            first = None
        self._queue.taken(size)
        over = first is self._end
        return group, None if over else first, over

    def _max_bytes(self) -> int:
        seen, self._others_seen = self._others_seen, self._others()
        return GROUP_BYTES if seen == self._others_seen else GENTLE_BYTES

    def _wait_s(self) -> float | None:
        return self._chores.wait_s()

    def _serve(self, group: list[Answer]) -> None:
        now_ns = self._wall_ns()
        try:
            begun = answers.carry_out(group, self.books, now_ns, PolybusError)
            self._write(self.books.turn_page())
        except BaseException as error:
            self.books.burn()
            if isinstance(error, PolybusError) or len(group) == 1:
                fail(group, error)
            else:
                self._serve_each(group)
            return
        self._queue.answered(len(begun))
        answers.tell(begun)

    def _serve_each(self, group: list[Answer]) -> None:
        """One of them cannot be done, for a reason nobody thought of: the others need not pay."""
        for answer in group:
            if not answer.done():
                self._serve([answer])

    def _write(self, batch: Batch) -> None:
        if not batch:
            return
        self._chores.note(batch)
        self._storing.write(batch)
        self.books.leases.keep()
        self.books.known.shrink()
        if batch.ends or batch.altered:
            self._tell(batch)

    def _serve_alone(self, answer: Answer) -> None:
        try:
            begun = answers.carry_out([answer], self.books, self._wall_ns(), PolybusError)
        except Exception as error:
            fail([answer], error)
        else:
            answers.tell(begun)

    def _finish(self) -> None:
        """The end: nothing is left to be done."""

    def _do_chores(self, busy: bool) -> None:
        try:
            expired = self._chores.expired()
            if expired:
                collected = Answer(expired)
                self._serve([collected])
                collected.result()
            self._chores.do(busy)
        except PolybusError as error:
            self._chores.pause()
            _log.warning("upkeep of the store failed, and will be tried again: %s", error)
        except Exception:
            self._chores.pause()
            _log.exception("upkeep of the store failed, and will be tried again")


def fail(group: list[Answer], error: BaseException) -> None:
    """What became of a group that could not be done."""
    if not isinstance(error, PolybusError):
        _log.error("a transaction failed", exc_info=error)
        error = StoreFault(f"the store failed: {error!r}")
    for answer in group:
        if not answer.done():
            answer.set_exception(error)
