"""One subscription, read at its own pace.

A waiting Get holds up everything behind it on its connection, so every
subscription has a connection of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from polybus.dialects.freud.client.answer_batch import Record
from polybus.dialects.freud.client.subscription_inbox import SubscriptionInbox
from polybus.errors import UsageError


class Subscription:
    """Made by `Client.subscribe`: an async iterator of what is produced from then on.

        async for record in subscription:
            print(record.message_id, record.timestamp_ns, record.body)

    The loop ends when the topic was deleted (then `notice` is set) or somebody
    called `unsubscribe`. Any other end is an error: the connection was lost, or
    the bus knows the subscription no more. One task at a time may read.
    """

    def __init__(
        self,
        topic: str,
        subscriber_id: bytes,
        inbox: SubscriptionInbox,
        leave: Callable[[Subscription], Awaitable[None]],
    ) -> None:
        self.inbox = inbox
        self._topic = topic
        self._id = subscriber_id
        self._leave = leave

    @property
    def topic(self) -> str:
        return self._topic

    @property
    def id(self) -> bytes:
        """What the bus knows it by."""
        return self._id

    @property
    def notice(self) -> Record | None:
        """The notice that the topic was deleted, once it has come."""
        return self.inbox.notice

    # --- reading

    async def get(self, timeout_s: float | None = None) -> Record | None:
        """The next message, waiting for it; None if there was none in time (0: do not wait).

        It may be cancelled: what comes late is kept for the next call. Messages
        come before the end; then it is `TopicDeleted`, or another error.
        """
        found = await self.get_many(1, timeout_s)
        return found[0] if found else None

    async def get_many(self, max_messages: int, timeout_s: float | None = None) -> list[Record]:
        """Wait for a message, and take what is there by then, at most so many; [] if none came.

        A `timeout_s` of 0 does not wait: so a topic is drained. One call brings at
        most 4096.
        """
        if max_messages < 1:
            raise UsageError(f"max_messages is at least 1, not {max_messages}")
        records = self.inbox.records
        if not records:
            await self.inbox.fill(max_messages, timeout_s)
        if len(records) < max_messages:
            await self.inbox.wait_round()
        return [records.popleft() for _ in range(min(max_messages, len(records)))]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        if not self.inbox.records and not await self.inbox.fetch_next():
            raise StopAsyncIteration
        return self.inbox.records.popleft()

    # --- its end

    async def unsubscribe(self) -> None:
        """End it, at the bus and here. What was not read is gone; whoever waits is told."""
        if self.inbox.end is not None:
            return
        self.inbox.is_unsubscribing = True
        try:
            await self._leave(self)
        finally:
            self.inbox.records.clear()
            self.inbox.finish(self.inbox.gone_error())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.unsubscribe()
