"""Runs handlers: a task takes one after another, until one of them has to wait.

Most handlers answer without waiting for anything. A task for each would cost more
than they do, so one task works through the queue. When a handler waits, the task
stays with it (it is that handler's task from then on: it can be cancelled, and may
use timeouts), and another one goes on with the queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

Work = Coroutine[Any, Any, None]


class HandlerJob(Protocol):
    """`work` makes its coroutine, when its turn has come; None if it was cancelled before.

    `waits` is told which task it has, once it has one of its own.
    """

    def work(self) -> Work | None: ...
    def on_wait(self, task: asyncio.Task[None]) -> None: ...


class HandlerRunner:
    """See the top of the file. What a job raises is the job's: it must raise nothing."""

    def __init__(self) -> None:
        self._queue: deque[HandlerJob] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, job: HandlerJob) -> None:
        self._queue.append(job)

    def start(self) -> None:
        """Go on with the queue, unless somebody is at it."""
        if self._worker is None and self._queue:
            self._worker = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(self._worker)
            self._worker.add_done_callback(self._tasks.discard)

    async def _run(self) -> None:
        me = self._worker
        assert me is not None
        while self._queue and self._worker is me:
            job = self._queue.popleft()
            work = job.work()
            if work is not None:
                await _CoroutineSteps(work, lambda job=job: self._detach_worker(me, job))  # type: ignore[misc]
        if self._worker is me:
            self._worker = None

    def _detach_worker(self, task: asyncio.Task[None], job: HandlerJob) -> None:
        self._worker = None
        job.on_wait(task)
        self.start()

    async def stop(self) -> None:
        """Cancel all that runs, and wait for its end."""
        self._queue.clear()
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


class _CoroutineSteps:
    """A coroutine's steps, with a word to `on_wait` when the first of them does not end it."""

    __slots__ = ("_on_wait", "_work")

    def __init__(self, work: Work, on_wait: Callable[[], None]) -> None:
        self._work = work
        self._on_wait = on_wait

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            waits_for = self._work.send(None)
        except StopIteration:
            return
        self._on_wait()
        yield from _rest(self._work, waits_for)


def _rest(work: Work, waits_for: Any) -> Generator[Any, Any, None]:
    """What a task would do with it, less the beginning."""
    while True:
        try:
            sent = yield waits_for
        except BaseException as error:
            step: Callable[[], Any] = lambda error=error: work.throw(error)  # type: ignore[misc]  # noqa: E731
        else:
            step = lambda sent=sent: work.send(sent)  # type: ignore[misc]  # noqa: E731
        try:
            waits_for = step()
        except StopIteration:
            return
