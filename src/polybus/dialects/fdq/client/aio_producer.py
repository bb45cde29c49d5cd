"""`fdq.aio.Producer`: messages are taken on the loop, and sent by threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from polybus.dialects.fdq.client import producer as blocking
from polybus.errors import ConnectionLost

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.envelope import MessageRequest
    from polybus.native import Produced


class Producer:
    """The twin of `fdq.Producer`, with the same settings, for one loop.

    It is opened by `async with`, or by the first call. Cancelling a call does not call the
    message back.
    """

    def __init__(self, url: str | None = None, name: str | None = None, **settings: Any) -> None:
        self._make = lambda: blocking.Producer(url, name, **settings)
        self._made: asyncio.Task[blocking.Producer] | None = None
        self._is_closed = False

    @overload
    async def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: Literal[True] = True,
    ) -> Produced: ...

    @overload
    async def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: Literal[False],
    ) -> asyncio.Future[Produced]: ...

    @overload
    async def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: bool,
    ) -> Produced | asyncio.Future[Produced]: ...

    async def produce(
        self,
        topic: str,
        shard_key: str | None,
        message: bytes,
        headers: Mapping[str, bytes] | None = None,
        *,
        wait: bool = True,
    ) -> Produced | asyncio.Future[Produced]:
        """On disk when this returns; with `wait=False`, when the future that it gives is done."""
        producer = await self._open()
        if not producer.is_known_topic(topic):
            await asyncio.to_thread(producer.check_topic, topic)
        receipt, is_full = producer.append(topic, shard_key, message, headers)
        if is_full:
            await asyncio.to_thread(producer.send_waiting)
        future = asyncio.wrap_future(receipt)
        return await future if wait else future

    @overload
    async def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: Literal[True] = True,
    ) -> Produced: ...

    @overload
    async def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: Literal[False],
    ) -> asyncio.Future[Produced]: ...

    @overload
    async def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: bool,
    ) -> Produced | asyncio.Future[Produced]: ...

    async def produce_batch(
        self,
        topic: str,
        messages: Iterable[MessageRequest | tuple[Any, ...]] | pa.RecordBatch,
        *,
        wait: bool = True,
    ) -> Produced | asyncio.Future[Produced]:
        """All of them or none, over all shards."""
        producer = await self._open()
        future = asyncio.wrap_future(await asyncio.to_thread(producer.send_batch, topic, messages))
        return await future if wait else future

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for the outcome of all that was produced; False if time is up."""
        return await asyncio.to_thread((await self._open()).flush, timeout_s)

    async def close(self, timeout_s: float | None = None) -> None:
        """As `fdq.Producer.close`."""
        self._is_closed = True
        if self._made is not None:
            producer = await self._made
            await asyncio.to_thread(producer.close, timeout_s)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(None if error is None else blocking.FAILING_CLOSE_S)

    async def _open(self) -> blocking.Producer:
        """The first who asks opens it; all wait for that, and none can cancel it."""
        if self._is_closed:
            raise ConnectionLost("this producer was closed")
        if self._made is None or has_failed(self._made):
            self._made = asyncio.create_task(asyncio.to_thread(self._make))
        if self._made.done():
            return self._made.result()
        return await asyncio.shield(self._made)


def has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
