"""The caller's side of a call: one reply (`CallAnswer`), or a stream of replies (`Stream`).

The program holds a `Stream`, and the connection holds its `StreamBuffer`. A Stream that the
program drops is therefore garbage-collected, which cancels its call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

from polybus.clients.async_client import AsyncContext
from polybus.dialects.gsb import codec
from polybus.dialects.gsb.client.gsb_connection import GsbConnection
from polybus.dialects.gsb.codec import FULL, PARTIAL, error_from_reply
from polybus.errors import BadFrame, DeadlinePassed, PolybusError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The cost of an item besides its data: one object.
ITEM_BYTES = 64


class CallAnswer:
    """Waits for the one reply of a call."""

    __slots__ = ("_address", "_connection", "future", "held_bytes", "is_awaited", "request_id")

    def __init__(
        self, connection: GsbConnection, address: str, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.future: asyncio.Future[Buffer] = loop.create_future()
        self.request_id = b""
        self.is_awaited = True
        self.held_bytes = 0
        self._connection = connection
        self._address = address

    def on_reply(self, code: int, kind: int, data: Buffer) -> bool:
        if kind == PARTIAL:
            self.fail(UsageError(f"{self._address} replies with a stream; use stream()"))
            self._connection.cancel(self.request_id)
        elif code == codec.StatusCode.OK:
            if not self.future.done():
                self.future.set_result(data)
        else:
            self.fail(error_from_reply(data, self._address))
        return True

    def fail(self, error: PolybusError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks it as retrieved: the caller may be gone


class StreamBuffer:
    """The unread items of a stream, and its end."""

    def __init__(
        self, connection: GsbConnection, address: str, release: Callable[[GsbConnection], None]
    ) -> None:
        self.request_id = b""
        self.items: deque[Buffer] = deque()
        self.held_bytes = 0
        self.ended = False
        self._connection = connection
        # Gives the connection back to the pool. None once that was done.
        self._release: Callable[[GsbConnection], None] | None = release
        self._error: PolybusError | None = None
        self._address = address
        self._changed: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        return self._changed is not None

    def on_reply(self, code: int, kind: int, data: Buffer) -> bool:
        if code != codec.StatusCode.OK:
            self._end(error_from_reply(data, self._address))
            if kind == PARTIAL:  # a failure ends the stream, even if the service sends more
                self._connection.cancel(self.request_id)
            return True
        if kind == PARTIAL or len(data):  # type: ignore[arg-type]
            self.items.append(data)
            self._connection.unread.charge(self, len(data) + ITEM_BYTES)  # type: ignore[arg-type]
        if kind == FULL:
            self._end(None)
        elif self._changed is not None:
            self._notify()
        return kind == FULL

    def fail(self, error: PolybusError) -> None:
        if not self.ended:
            self._end(error)

    async def take_items(self, timeout_s: float | None) -> deque[Buffer]:
        """Wait for items and return all of them; none at the end."""
        unread = self._connection.unread
        while not self.items and not self.ended:
            self._changed = asyncio.get_running_loop().create_future()
            unread.on_wait()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed
            except TimeoutError:
                self.cancel()
                raise DeadlinePassed(f"{self._address}: no item within {timeout_s:g} s") from None
            finally:
                self._changed = None
        taken, self.items = self.items, deque()
        unread.release(self)
        if self.ended:
            self._release_connection()
        if not taken and self._error is not None:
            raise self._error
        return taken

    def cancel(self) -> None:
        """Drop unread items and cancel the call."""
        self.items.clear()
        if not self.ended:
            self.ended = True
            if self._connection.is_up:
                self._connection.cancel(self.request_id)
        self._connection.unread.release(self)
        self._release_connection()

    def _release_connection(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release(self._connection)

    def _end(self, error: PolybusError | None) -> None:
        self.ended, self._error = True, error
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class Stream(AsyncContext):
    """The items that a service yields, as an async iterator. Made by `Client.stream`.

    The call begins with the first step. It is cancelled if the iteration ends early: by
    `aclose`, at the end of an `async with`, or when the iterator is garbage-collected. One task
    at a time may read.
    """

    def __init__(
        self,
        open_call: Callable[[], Awaitable[StreamBuffer]],
        address: str,
        timeout_s: float | None,
    ) -> None:
        self._open_call = open_call
        self._address = address
        self._timeout_s = timeout_s
        self._received: StreamBuffer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batch: deque[Buffer] = deque()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if not self._batch and not await self.begin():
            raise StopAsyncIteration
        return self.next_item()

    async def begin(self) -> bool:
        """Wait for items and fetch all of them. Returns False at the end."""
        if self._closed:
            return False
        if self._received is None:
            self._loop = asyncio.get_running_loop()
            self._received = await self._open_call()
        self._batch = await self._received.take_items(self._timeout_s)
        if not self._batch:
            self._closed = True
        return bool(self._batch)

    def next_item(self) -> Any:
        """Return the next fetched item. Raises IndexError if there is none."""
        return decode_value(self._batch.popleft(), self._address)

    async def aclose(self) -> None:
        """End the stream and cancel its call. Does nothing if it has already ended."""
        self._closed = True
        self._batch.clear()
        if self._received is not None:
            self._received.cancel()

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        received = getattr(self, "_received", None)
        if received is None or (received.ended and not received.items):
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(received.cancel)


def decode_value(data: Buffer, address: str) -> Any:
    """Return the value that a service sent. Raises `BadFrame` if it is not msgpack."""
    try:
        return codec.unpack(data)  # type: ignore[arg-type]
    except ValueError as error:
        invalid = BadFrame("data")
        invalid.add_note(f"{address} sent data that is not msgpack: {error}")
        raise invalid from None
