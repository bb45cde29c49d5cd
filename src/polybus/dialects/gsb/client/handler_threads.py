"""Services that are plain functions: run in threads, beside the loop.

A generator is stepped in a thread of its own pace: it may be a little ahead of what
was sent, never further, and while nobody takes that, others have the thread. When its
call has ended it is closed at its next step; a function that runs cannot be
interrupted, and what it returns is thrown away.
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

# How far a generator may be ahead: enough that the two sides need not meet for each item.
AHEAD_ITEMS = 64
# How long a thread waits for a caller that takes nothing: others may need it.
PARK_AFTER_S = 0.1


class HandlerThreads:
    """A few threads, started when they are needed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await self._run(contextvars.copy_context(), function, *args)

    def _run(
        self, context: contextvars.Context, function: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="polybus-gsb")
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
            await stepping  # what it raised
        finally:
            ahead.stop()
            stepping.add_done_callback(lambda _: self._close(context, ahead))

    def _close(self, context: contextvars.Context, ahead: _GeneratorBuffer[T]) -> None:
        """A generator that was left where a thread had given up."""
        if ahead.is_parked:
            with contextlib.suppress(RuntimeError):  # there are no threads any more
                self._run(context, ahead.close)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class _GeneratorBuffer(Generic[T]):
    """Between the thread that makes items and the loop that sends them."""

    def __init__(self, items: Iterator[T], loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[T] = deque()
        self._source = items
        self._loop = loop
        self._news: asyncio.Future[None] = loop.create_future()
        self._is_notified = False
        self._room = threading.Condition()
        self._stopped = False
        self.is_parked = False  # there is more, and no thread is at it

    # --- in the thread

    def produce_items(self) -> None:
        self.is_parked = False
        try:
            for item in self._source:
                self.items.append(item)
                if not self._is_notified:
                    self._is_notified = True
                    self._loop.call_soon_threadsafe(self._notify)
                if not self._wait_room():
                    break
        finally:
            if not self.is_parked:
                self.close()

    def close(self) -> None:
        close = getattr(self._source, "close", None)
        if close is not None:
            close()

    def _wait_room(self) -> bool:
        with self._room:
            self.is_parked = not self._room.wait_for(self._has_room, PARK_AFTER_S)
            return not self._stopped and not self.is_parked

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
