"""`fdq.aio.Consumer`: handlers may be coroutines, which run on the caller's loop.

Everything else is the blocking consumer, on its threads. An executor's thread waits for
the coroutine that it has handed to the loop, so `executors` of them run side by side.
A handler that is a plain function runs on the thread, and may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from threading import TIMEOUT_MAX
from types import TracebackType
from typing import Any, Self

from polybus.dialects.fdq.client import consumer as blocking
from polybus.dialects.fdq.client.aio_producer import has_failed
from polybus.dialects.fdq.client.executor import IN_HANDLER
from polybus.errors import UsageError

POLL_S = 0.05


class Consumer:
    """The twin of `fdq.Consumer`, with the same settings, for one loop.

    Close it before the loop ends.
    """

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self._make = lambda: blocking.Consumer(url, **settings)
        self._made: asyncio.Task[blocking.Consumer] | None = None
        self._is_closed = False

    async def consume(
        self,
        topic: str,
        name: str,
        handler: Callable[[Any], Any],
        group: str = "default",
        *,
        handler_timeout_s: float = 300.0,
        **settings: Any,
    ) -> None:
        """As `fdq.Consumer.consume`. A coroutine that takes too long is cancelled, too."""
        consumer = await self._open()
        bridge = LoopHandler(handler, asyncio.get_running_loop(), handler_timeout_s, consumer)
        await asyncio.to_thread(
            consumer.consume,
            topic,
            name,
            bridge,
            group,
            handler_timeout_s=handler_timeout_s,
            **settings,
        )

    async def wait(self, timeout_s: float | None = None) -> bool:
        """As `fdq.Consumer.wait`; cancelling it leaves the consumer as it is."""
        if self._made is None:
            return True
        consumer = await self._open()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not consumer.wait(0):
            if end_s is not None and time.monotonic() >= end_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def close(self, timeout_s: float | None = None) -> None:
        """As `fdq.Consumer.close`. A handler may await this: it ends when the handler has."""
        self._is_closed = True
        if self._made is not None:
            consumer = await self._made
            await asyncio.to_thread(consumer.close, timeout_s)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _open(self) -> blocking.Consumer:
        """Opening a store takes its time, so it is done on a thread."""
        if self._made is None or has_failed(self._made):
            if self._is_closed:
                raise UsageError("this consumer was closed")
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return await asyncio.shield(self._made)


class LoopHandler:
    """A handler for the executors' threads."""

    def __init__(
        self,
        handler: Callable[[Any], Any],
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        consumer: blocking.Consumer,
    ) -> None:
        if not callable(handler):
            raise UsageError("a handler is a function of one message")
        self._handler: Any = handler
        self._loop = loop
        self._timeout_s = min(timeout_s, TIMEOUT_MAX)  # a lock waits no longer
        self._consumer = consumer

    def __call__(self, given: Any) -> None:
        outcome = self._handler(given)
        if inspect.isawaitable(outcome):
            self._wait_for(outcome)

    def _wait_for(self, outcome: Awaitable[Any]) -> None:
        running = _run(outcome)
        try:
            future = asyncio.run_coroutine_threadsafe(running, self._loop)
        except RuntimeError:  # the loop has ended: nothing can be run any more
            running.close()
            with contextlib.suppress(AttributeError):
                outcome.close()  # type: ignore[attr-defined]
            self._consumer.close()
            raise
        try:
            future.result(self._timeout_s)
        except TimeoutError:
            future.cancel()
            raise


async def _run(outcome: Awaitable[Any]) -> None:
    IN_HANDLER.set(True)
    await outcome
