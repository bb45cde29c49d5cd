"""FDQ for asyncio: blocking work runs on threads, the loop only awaits the results.

async with fdq.aio.Producer() as producer:
    await producer.produce("orders", "customer-7", b"…")
async for envelope in fdq.aio.replay(None, "orders"): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, overload

from polybus.clients.async_client import AsyncContext
from polybus.dialects.fdq.client import consumer as blocking_consumer
from polybus.dialects.fdq.client import group_admin, topic_replay
from polybus.dialects.fdq.client import producer as blocking_producer
from polybus.dialects.fdq.client.envelope import Envelope
from polybus.dialects.fdq.client.executor import IN_HANDLER
from polybus.errors import ConnectionLost, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.producer import DeliveryOptions, Messages
    from polybus.native import Produced

__all__ = ["Consumer", "Producer", "Replay", "replay", "reset", "reshard", "stats"]

POLL_S = 0.05

C = TypeVar("C")
R = TypeVar("R")
T = TypeVar("T")


class _LazyClient(Generic[C]):
    """A blocking client that the first caller opens on a thread, because opening may block."""

    def __init__(self, create: Callable[[], C]) -> None:
        self._create = create
        self._opening: asyncio.Task[C] | None = None
        self.is_closed = False

    @property
    def was_opened(self) -> bool:
        return self._opening is not None

    @property
    def is_usable(self) -> bool:
        """Whether it was opened and the opening has not failed."""
        task = self._opening
        if task is None or not task.done():
            return task is not None
        return not task.cancelled() and task.exception() is None

    async def open(self) -> C:
        """Return the client. All callers wait for the same task, and none can cancel it."""
        if self._opening is None or not self.is_usable:
            self._opening = asyncio.create_task(asyncio.to_thread(self._create))
        if self._opening.done():
            return self._opening.result()
        return await asyncio.shield(self._opening)

    async def close(self, close: Callable[[C], None]) -> None:
        self.is_closed = True
        if self._opening is not None:
            client = await self._opening
            await asyncio.to_thread(close, client)


class Producer(AsyncContext):
    """The async twin of `fdq.Producer`, with the same settings, for one event loop.

    `async with` or the first call opens it. Cancelling a call does not withdraw its message.
    """

    def __init__(self, url: str | None = None, name: str | None = None, **settings: Any) -> None:
        self._client = _LazyClient(lambda: blocking_producer.Producer(url, name, **settings))

    async def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: bool = True,
        **options: Unpack[DeliveryOptions],
    ) -> Produced:
        """Produce one message; it is durable when this returns.

        With `wait=False`, returns the future of `produce_nowait` instead, which has the right
        type.
        """
        future = await self.produce_nowait(topic, shard_key, message, headers, **options)
        return await future if wait else future  # type: ignore[return-value]

    async def produce_nowait(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        **options: Unpack[DeliveryOptions],
    ) -> asyncio.Future[Produced]:
        """Take one message and return a future that is done when the message is durable."""
        producer = await self._open()
        if not producer.is_known_topic(topic):
            await asyncio.to_thread(producer.check_topic, topic)
        future, is_full = producer.append(topic, shard_key, message, headers, **options)
        if is_full:
            await asyncio.to_thread(producer.send_pending)
        return asyncio.wrap_future(future)

    async def produce_batch(
        self,
        topic: str,
        messages: Messages,
        *,
        wait: bool = True,
        **options: Unpack[DeliveryOptions],
    ) -> Produced:
        """Produce all messages or none, over all shards.

        With `wait=False`, returns the future of `produce_batch_nowait` instead, which has the
        right type.
        """
        future = await self.produce_batch_nowait(topic, messages, **options)
        return await future if wait else future  # type: ignore[return-value]

    async def produce_batch_nowait(
        self, topic: str, messages: Messages, **options: Unpack[DeliveryOptions]
    ) -> asyncio.Future[Produced]:
        """Take a batch and return a future that is done when the batch is durable."""
        producer = await self._open()
        return asyncio.wrap_future(
            await asyncio.to_thread(producer.produce_batch_nowait, topic, messages, **options)
        )

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the result of every produced message. Returns False on a timeout."""
        return await asyncio.to_thread((await self._open()).flush, timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """Close it as `fdq.Producer.close` does."""
        await self._client.close(lambda producer: producer.close(timeout_s))

    async def _on_enter(self) -> None:
        await self._open()

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.close(None if error is None else blocking_producer.FAILING_CLOSE_S)

    async def _open(self) -> blocking_producer.Producer:
        if self._client.is_closed:
            raise ConnectionLost("producer is closed")
        return await self._client.open()


class Consumer(AsyncContext):
    """The async twin of `fdq.Consumer`, with the same settings, for one event loop.

    Handlers may be coroutines, which run on the caller's loop. An executor's thread waits for
    the coroutine that it submitted, so `executors` of them run concurrently. A plain function
    runs on the thread and may block. The consumer must be closed before the loop ends.
    """

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self._client = _LazyClient(lambda: blocking_consumer.Consumer(url, **settings))

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
        """Subscribe as `fdq.Consumer.consume` does. A coroutine that times out is cancelled."""
        consumer = await self._open()
        loop_handler = LoopHandler(handler, asyncio.get_running_loop(), handler_timeout_s, consumer)
        await asyncio.to_thread(
            consumer.consume,
            topic,
            name,
            loop_handler,
            group,
            handler_timeout_s=handler_timeout_s,
            **settings,
        )

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait as `fdq.Consumer.wait` does. Cancelling the call does not close the consumer."""
        if not self._client.was_opened:
            return True
        consumer = await self._open()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not consumer.wait(0):
            if end_s is not None and time.monotonic() >= end_s:
                return False
            await asyncio.sleep(POLL_S)
        return True

    async def close(self, timeout_s: float | None = None) -> None:
        """Close it as `fdq.Consumer.close` does. A handler may await this."""
        await self._client.close(lambda consumer: consumer.close(timeout_s))

    async def _on_enter(self) -> None:
        await self._open()

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.close()

    async def _open(self) -> blocking_consumer.Consumer:
        # After `close`, `wait` must still work on a consumer that was open.
        if self._client.is_closed and not self._client.is_usable:
            raise UsageError("consumer is closed")
        return await self._client.open()


class LoopHandler:
    """A handler for executor threads that runs coroutines on an event loop."""

    def __init__(
        self,
        handler: Callable[[Any], Any],
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        consumer: blocking_consumer.Consumer,
    ) -> None:
        if not callable(handler):
            raise UsageError(f"handler must be callable, got {type(handler).__name__}")
        self._handler: Any = handler
        self._loop = loop
        self._timeout_s = min(timeout_s, TIMEOUT_MAX)  # locks take no longer timeout
        self._consumer = consumer

    def __call__(self, argument: Any) -> None:
        awaitable = self._handler(argument)
        if not inspect.isawaitable(awaitable):
            return
        coroutine = _run_as_handler(awaitable)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed, so no handler can run again
            coroutine.close()
            with contextlib.suppress(AttributeError):
                awaitable.close()  # type: ignore[attr-defined]
            self._consumer.close()
            raise
        try:
            future.result(self._timeout_s)
        except TimeoutError:
            future.cancel()
            raise


@overload
def replay(
    url: str | None, topic: str, *, batch: Literal[False] = False, **settings: Any
) -> Replay[Envelope]: ...


@overload
def replay(
    url: str | None, topic: str, *, batch: Literal[True], **settings: Any
) -> Replay[pa.RecordBatch]: ...


def replay(url: str | None, topic: str, *, batch: bool = False, **settings: Any) -> Any:
    """Replay a topic as `fdq.replay` does, for `async for`."""
    return Replay(lambda: topic_replay.replay(url, topic, batch=True, **settings), batch)


class Replay(AsyncContext, Generic[T]):
    """An async iterator. It disconnects at its end; `aclose` does so earlier."""

    def __init__(
        self, open_replay: Callable[[], topic_replay.TopicReplay[pa.RecordBatch]], as_batches: bool
    ) -> None:
        self._open_replay = open_replay
        self._as_batches = as_batches
        self._inner: topic_replay.TopicReplay[pa.RecordBatch] | None = None
        self._items: Iterator[Any] = iter(())
        self._is_over = False
        # One thread, so that closing runs after a read in progress.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-replay")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._is_over:
            for item in self._items:
                result: T = item
                return result
            batch = await self._run_on_thread(self._next)
            if batch is None:
                await self.aclose()
            else:
                assert self._inner is not None
                self._items = iter((batch,)) if self._as_batches else self._inner.envelopes(batch)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._inner is not None:
            self._inner.cancel()
        await self._run_on_thread(self._close)
        self._thread.shutdown(wait=False)

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.aclose()

    async def _run_on_thread(self, step: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)

    # --- on the thread

    def _next(self) -> pa.RecordBatch | None:
        if self._inner is None:
            self._inner = self._open_replay()
        return next(self._inner, None)

    def _close(self) -> None:
        if self._inner is not None:
            self._inner.close()


async def reshard(url: str | None, topic: str, shards: int, **settings: Any) -> dict[str, Any]:
    """Change the number of shards of a topic, as `fdq.reshard` does."""
    return await asyncio.to_thread(group_admin.reshard, url, topic, shards, **settings)


async def stats(url: str | None, topic: str, **settings: Any) -> dict[str, Any]:
    """Return the statistics of a topic, as `fdq.stats` does."""
    return await asyncio.to_thread(group_admin.stats, url, topic, **settings)


async def reset(
    url: str | None, topic: str, group: str = "default", **settings: Any
) -> dict[str, Any]:
    """Move a group to another position, as `fdq.reset` does."""
    return await asyncio.to_thread(group_admin.reset, url, topic, group, **settings)


async def _run_as_handler(awaitable: Awaitable[Any]) -> None:
    IN_HANDLER.set(True)  # `close` must not wait for the handler that calls it
    await awaitable
