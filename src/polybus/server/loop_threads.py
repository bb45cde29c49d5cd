"""Calls between the event loop and other threads.

The loop never waits for a disk. Blocking work runs on a few threads, and their results come
back to the loop in one callback, however many there are.
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
# A loop that does not run a call within this time is stuck, or has ended.
ANSWER_TIMEOUT_S = 30.0
READERS = 4  # reading threads: a disk serves a few concurrent reads better than many
# Threads that wait for the disk: their concurrent commits share one sync.
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
                raise Unavailable("timed out waiting for the event loop; retry") from None
            return outcome.result()  # it finished in the meantime


def _run(outcome: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return  # the caller has timed out and must not see the call executed
    try:
        outcome.set_result(function(*args))
    except BaseException as error:
        outcome.set_exception(error)


class CompletionQueue:
    """Runs callbacks of other threads on the loop: one wake-up for all that are ready."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._ready: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def call(self, step: Callable[[], None]) -> None:
        """Run a step on the loop soon, in the order of the calls. May be called from any thread."""
        with self._lock:
            self._ready.append(step)
            if self._is_scheduled:
                return
            self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._run_ready)
        except RuntimeError:  # the loop has ended
            pass

    def _run_ready(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, deque()
            self._is_scheduled = False
        for step in ready:
            try:
                step()
            except Exception as error:  # an error in one step must not stop the others
                context = {"message": "a step for the loop failed", "exception": error}
                self._loop.call_exception_handler(context)


class WorkerPool:
    """Threads for blocking work of the loop."""

    def __init__(self, completions: CompletionQueue, threads: int = READERS) -> None:
        self._completions = completions
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="polybus-reader")

    def __call__(self, work: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        """Run `work` on a thread, then `then` on the loop with its future."""
        future = self._pool.submit(work)
        future.add_done_callback(lambda done: self._completions.call(lambda: then(done)))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
