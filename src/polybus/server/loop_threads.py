"""Between the loop and other threads: work handed to it, and work it hands out.

The loop never waits for a disk. What would make it wait runs on a few threads of
its own, and what they have done comes back in one step, however much it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

from polybus.errors import Unavailable

T = TypeVar("T")
# A loop that does not get round to a question in this time is stuck, or has ended.
ANSWER_TIMEOUT_S = 30.0
READERS = 4  # threads that read for the loop: a disk serves few at once better than many
# Threads that wait for the disk for the loop: what they write at once shares a sync.
WORKERS = 16


class LoopCaller:
    """Runs a function on the loop for another thread, which waits for the outcome."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, function: Callable[..., T], /, *args: Any) -> T:
        outcome: Future[T] = Future()
        try:
            self._loop.call_soon_threadsafe(_run, outcome, function, args)
            return outcome.result(ANSWER_TIMEOUT_S)
        except RuntimeError as error:
            if outcome.done():
                raise
            raise Unavailable("the bus is stopping") from error
        except TimeoutError:
            if outcome.cancel():
                raise Unavailable("the bus did not get round to it: try again") from None
            return outcome.result()  # it was done just now


def _run(outcome: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return  # whoever asked has given up, and must not be surprised by the outcome
    try:
        outcome.set_result(function(*args))
    except BaseException as error:
        outcome.set_exception(error)


class CompletionQueue:
    """Brings what other threads have finished to the loop: one wake-up for all that is ready."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._ready: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def call(self, step: Callable[[], None]) -> None:
        """From any thread: the loop will take this step soon, in the order they came."""
        with self._lock:
            self._ready.append(step)
            if self._is_scheduled:
                return
            self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._run_ready)
        except RuntimeError:  # the loop has ended: nobody is left to be told
            pass

    def _run_ready(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, deque()
            self._is_scheduled = False
        for step in ready:
            try:
                step()
            except Exception as error:  # one party's trouble is not everyone's
                context = {"message": "a step for the loop failed", "exception": error}
                self._loop.call_exception_handler(context)


class WorkerPool:
    """The loop's threads for reading."""

    def __init__(self, completions: CompletionQueue, threads: int = READERS) -> None:
        self._completions = completions
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="polybus-reader")

    def __call__(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Runs `work` on one of them, and then `then` on the loop with its outcome."""
        future = self._pool.submit(work)
        future.add_done_callback(lambda done: self._completions.call(lambda: then(done)))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
