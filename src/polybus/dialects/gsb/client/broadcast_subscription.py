"""Subscriptions: the messages of a topic, as an async iterator.

The bus sends each message of a topic once per connection; the client gives it to all its
subscriptions to that topic. A subscription whose reader is slow drops messages over
`max_unread_bytes` and counts them in `lost`; it blocks no other reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Self

from polybus.clients.async_client import AsyncContext
from polybus.dialects.gsb import codec
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.errors import PolybusError

# The cost of a message besides its body: one object.
MESSAGE_BYTES = 128


class Broadcast(NamedTuple):
    """One message. `body` is raw bytes; other dialects may have published it."""

    topic: str
    body: bytes
    caller: str

    @property
    def data(self) -> Any:
        """The body as a value. Raises ValueError if it is not msgpack."""
        return codec.unpack(self.body)


class Subscription(AsyncContext):
    """An async iterator of new messages of a topic. Made by `Client.subscribe`.

    It continues after a reconnect; messages published while the connection was down are lost.
    The iteration ends with `unsubscribe`, or with an error if the client is closed or fails.
    """

    def __init__(
        self, topic: str, max_bytes: int, leave: Callable[[Subscription], Awaitable[None]]
    ) -> None:
        self._topic = topic
        self._max_bytes = max_bytes
        self._leave = leave
        self._messages: deque[Broadcast] = deque()
        self._held_bytes = 0
        self._lost = 0
        self._changed = asyncio.Event()
        self._ended = False
        self._error: PolybusError | None = None

    @property
    def topic(self) -> str:
        return self._topic

    @property
    def lost(self) -> int:
        """Number of messages dropped because too many bytes were unread."""
        return self._lost

    def put(self, message: Broadcast) -> None:
        size = len(message.body) + MESSAGE_BYTES
        if self._held_bytes + size > self._max_bytes and self._messages:
            self._lost += 1
            return
        self._held_bytes += size
        self._messages.append(message)
        self._changed.set()

    def end(self, error: PolybusError | None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def get(self, timeout_s: float | None = None) -> Broadcast | None:
        """Wait for the next message. Returns None after `timeout_s` or at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self)
        except (TimeoutError, StopAsyncIteration):
            return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Broadcast:
        while not self._messages:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._messages.popleft()
        self._held_bytes -= len(message.body) + MESSAGE_BYTES
        return message

    async def unsubscribe(self) -> None:
        """End the subscription and drop its unread messages."""
        if not self._ended:
            self.end(None)
            self._messages.clear()
            await self._leave(self)

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.unsubscribe()


class BroadcastSubscriptions:
    """All subscriptions of one client."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Subscription]] = {}

    def on_broadcast(self, broadcast: pb.BroadcastRequest) -> None:
        message = Broadcast(broadcast.topic, broadcast.data, broadcast.caller)
        for subscription in self.topics.get(broadcast.topic, ()):
            subscription.put(message)

    def add(self, subscription: Subscription) -> None:
        self.topics.setdefault(subscription.topic, []).append(subscription)

    def remove(self, subscription: Subscription) -> bool:
        """Remove a subscription. Returns True if it was the last of its topic."""
        others = self.topics.get(subscription.topic, [])
        if subscription in others:
            others.remove(subscription)
        if not others:
            self.topics.pop(subscription.topic, None)
        return not others

    def end(self, error: PolybusError) -> None:
        for subscriptions in self.topics.values():
            for subscription in subscriptions:
                subscription.end(error)
