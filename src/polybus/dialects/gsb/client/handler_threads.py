"""Threads for services that are plain functions.

A generator runs in a thread at its own pace. It may be AHEAD_ITEMS ahead of the sent items; a
generator whose caller reads nothing gives its thread to others. After its call has ended it is
closed at its next step. A running function cannot be interrupted; its result is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Enough that thread and loop need not synchronise for each item.
AHEAD_ITEMS = 64
# After this time a thread leaves a generator whose caller reads nothing.
PARK_AFTER_S = 0.1


class HandlerThreads:
    """A pool of threads, started on first use."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await self._run(contextvars.copy_context(), function, *args)

    def _run(
        self, context: contextvars.Context, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._max_threads, thread_name_prefix="polybus-gsb")
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._pool, context.run, function, *args)

    async def iterate(self, items: Iterator[T]) -> AsyncIterator[T]:
        ahead: _GeneratorBuffer[T] = _GeneratorBuffer(items, asyncio.get_running_loop())
        context = contextvars.copy_context()
        stepping = self._run(context, ahead.produce_items)
        try:
            while True:
                while ahead.items:
                    yield ahead.take()
                if stepping.done() and not ahead.items:
                    if not ahead.is_parked:
                        break
                    stepping = self._run(context, ahead.produce_items)
                await asyncio.wait([stepping, ahead.wait_change()], return_when="FIRST_COMPLETED")
            await stepping  # raises the generator's error
        finally:
            ahead.stop()
            stepping.add_done_callback(lambda _: self._close(context, ahead))

    def _close(self, context: contextvars.Context, ahead: _GeneratorBuffer[T]) -> None:
        """Close a parked generator."""
        if ahead.is_parked:
            with contextlib.suppress(RuntimeError):  # the pool is shut down
                self._run(context, ahead.close)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class _GeneratorBuffer(Generic[T]):
    """The buffer between a generator's thread and the loop."""

    def __init__(self, items: Iterator[T], loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[T] = deque()
        self._source = items
        self._loop = loop
        self._news: asyncio.Future[None] = loop.create_future()
        self._is_notified = False
        self._room = threading.Condition()
        self._stopped = False
        self.is_parked = False  # not finished, and no thread runs it

    # --- in the thread

    def produce_items(self) -> None:
        self.is_parked = False
        try:
            for item in self._source:
                self.items.append(item)
                # One call to the loop for all items until it has taken them.
                if not self._is_notified:
                    self._is_notified = True
                    self._loop.call_soon_threadsafe(self._notify)
                with self._room:
                    self.is_parked = not self._room.wait_for(self._has_room, PARK_AFTER_S)
                if self._stopped or self.is_parked:
                    break
        finally:
            if not self.is_parked:
                self.close()

    def close(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _has_room(self) -> bool:
        return len(self.items) < AHEAD_ITEMS or self._stopped

    # --- on the loop

    def wait_change(self) -> asyncio.Future[None]:
        if self._news.done():
            self._news = self._loop.create_future()
            self._is_notified = False
            if self.items:
                self._notify()
        return self._news

    def take(self) -> T:
        item = self.items.popleft()
        if len(self.items) < AHEAD_ITEMS // 2:
            with self._room:
                self._room.notify()
        return item

    def stop(self) -> None:
        with self._room:
            self._stopped = True
            self._room.notify()

    def _notify(self) -> None:
        if not self._news.done():
            self._news.set_result(None)
