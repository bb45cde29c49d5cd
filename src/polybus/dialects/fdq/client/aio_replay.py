"""`fdq.aio.replay`: batches are read by a thread, messages handed out on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, overload

from polybus.dialects.fdq.client import topic_replay
from polybus.dialects.fdq.client.envelope import Envelope

if TYPE_CHECKING:
    import pyarrow as pa

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def replay(
    url: str | None, topic: str, *, batch: Literal[False] = False, **settings: Any
) -> Replay[Envelope]: ...


@overload
def replay(
    url: str | None, topic: str, *, batch: Literal[True], **settings: Any
) -> Replay[pa.RecordBatch]: ...


def replay(url: str | None, topic: str, *, batch: bool = False, **settings: Any) -> Any:
    """As `fdq.replay`, for `async for`."""
    return Replay(lambda: topic_replay.replay(url, topic, batch=True, **settings), batch)


class Replay(Generic[T]):
    """An async iterator. It lets go of the bus at its end; `aclose` does so before."""

    def __init__(
        self, begin: Callable[[], topic_replay.Replay[pa.RecordBatch]], batch: bool
    ) -> None:
        self._begin = begin
        self._as_batches = batch
        self._inner: topic_replay.Replay[pa.RecordBatch] | None = None
        self._items: Iterator[Any] = iter(())
        self._is_over = False
        # One thread: what closes it comes behind what still reads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polybus-replay")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while not self._is_over:
            for item in self._items:
                found: T = item
                return found
            batch = await self._step(self._next)
            if batch is None:
                await self.aclose()
            else:
                self._items = self._items_of(batch)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._inner is not None:
            self._inner.cancel()
        await self._step(self._close)
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _step(self, step: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, step)

    def _items_of(self, batch: pa.RecordBatch) -> Iterator[Any]:
        assert self._inner is not None
        return iter((batch,)) if self._as_batches else self._inner.envelopes(batch)

    # --- on the thread

    def _next(self) -> pa.RecordBatch | None:
        if self._inner is None:
            self._inner = self._begin()
        return next(self._inner, None)

    def _close(self) -> None:
        if self._inner is not None:
            self._inner.close()
