"""One subscription of a client, read at its own pace.

A waiting Get delays every later request on its connection, so each subscription has a
connection of its own.

Requests are sent in *rounds*: one Get that may wait, followed by Gets that do not, as many
as are wanted together. There is at most one round at a time. A round that was sent is
answered even if its caller was cancelled or timed out; the messages are kept for the next
call, so none is lost.

A subscription ends once, with an error: TopicDeleted after the notice, DoesNotExist after
`unsubscribe` or when the bus has ended the subscription, or the loss of the connection.
Messages received before the end are returned first.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

from polybus.clients.async_client import AsyncContext
from polybus.dialects.freud import codec
from polybus.dialects.freud.client.answer_batch import AnswerBatch, Record, encode_gets
from polybus.dialects.freud.client.freud_connection import FreudConnection
from polybus.dialects.freud.codec import Code
from polybus.errors import BadFrame, DoesNotExist, PolybusError, TopicDeleted, UsageError

if TYPE_CHECKING:
    from polybus.dialects.freud.client.client import ClientOptions


class Subscription(AsyncContext):
    """An async iterator of the messages produced since `Client.subscribe` returned.

        async for record in subscription:
            print(record.message_id, record.timestamp_ns, record.body)

    The loop ends when the topic is deleted (`notice` is then set) or `unsubscribe` is
    called. Any other end raises: the connection was lost, or the bus has ended the
    subscription. Only one task at a time may read.
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
        """The topic; empty if `Client.attach` opened the subscription by its id."""
        return self._topic

    @property
    def id(self) -> bytes:
        """The subscriber id."""
        return self._id

    @property
    def notice(self) -> Record | None:
        """The deletion notice of the topic, once it was received."""
        return self.inbox.notice

    # --- reading

    async def get(self, timeout_s: float | None = None) -> Record | None:
        """Return the next message, or None if none arrives in time (0: do not wait).

        A call may be cancelled: a message that arrives later is kept for the next call.
        Raises TopicDeleted, or another error, once all messages were returned.
        """
        records = await self.get_many(1, timeout_s)
        return records[0] if records else None

    async def get_many(self, max_messages: int, timeout_s: float | None = None) -> list[Record]:
        """Wait for a message. Returns up to `max_messages`, or [] if none arrives in time.

        A `timeout_s` of 0 does not wait: use it to drain a topic. One call returns at
        most 4096 messages.
        """
        if max_messages < 1:
            raise UsageError(f"max_messages must be >= 1, got {max_messages}")
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
        """End the subscription. Unread messages are dropped; a waiting `get` raises."""
        if self.inbox.end is not None:
            return
        self.inbox.is_unsubscribing = True
        try:
            await self._leave(self)
        finally:
            self.inbox.records.clear()
            self.inbox.finish(self.inbox.gone_error())

    async def detach(self) -> bytes:
        """Disconnect and leave the subscription to the bus. Returns its id, for `Client.attach`.

        The bus keeps it for `detached_subscription_s` and collects its messages. Messages that
        were fetched already can still be read here.
        """
        if self.inbox.end is None:
            await self.inbox.detach()
        return self._id

    async def _on_exit(self, error: BaseException | None) -> None:
        await self.unsubscribe()


# More Gets per round gain nothing: the bus must read them all before it answers.
MAX_ROUND_GETS = 4096
WAIT_FOREVER = -1
DO_NOT_WAIT = 0
# Limit for one more round trip after a timeout, in case the bus is busy.
SETTLE_TIMEOUT_S = 0.25

GONE = (
    "the subscription {subject} does not exist: it was unsubscribed or removed, its topic was"
    " deleted and the notice not read in time, it was detached for too long or evicted for others"
    " of its user, or a rule denies it"
)


class SubscriptionInbox:
    """Received records that were not read, and the rounds of Gets that fetch more.

    It is the receiver of all answers on its connection. `settle` returns when the bus has
    answered a request on another connection; `on_end` is called once. Another thread may
    pop from `records`.
    """

    def __init__(
        self,
        topic: str,
        subscriber: bytes,
        connection: FreudConnection,
        options: ClientOptions,
        settle: Callable[[], Awaitable[object]],
        on_end: Callable[[], None],
    ) -> None:
        self.records: deque[Record] = deque()
        self.notice: Record | None = None
        self.end: PolybusError | None = None
        self.unanswered = 0  # Gets of the current round without an answer
        # While unsubscribing, the bus may answer a waiting Get before the Unsubscribe.
        self.is_unsubscribing = False
        self._is_detaching = False
        self._subject = f"to {topic!r}" if topic else subscriber.hex()
        self._topic = topic
        self._subscriber = subscriber
        self._connection = connection
        self._answer_timeout_s = options.answer_timeout_s
        self._prefetch = min(options.prefetch, MAX_ROUND_GETS)
        self._next_round = 1
        self._settle = settle
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._filling = False

    async def fill(self, count: int, timeout_s: float | None) -> None:
        """Wait for records or the timeout. Raises if the subscription ended instead."""
        if self.end is None:
            if self._filling:
                raise UsageError(f"another task is reading from the subscription {self._subject}")
            self._filling = True
            try:
                await self._fill(min(count, MAX_ROUND_GETS), timeout_s)
            finally:
                self._filling = False
        if not self.records and self.end is not None:
            raise self.end

    async def wait_round(self) -> None:
        """Wait for the rest of a round whose first answer has arrived; it follows at once."""
        while self.unanswered and self.records and self.end is None:
            if not await self._wait_change(self._answer_timeout_s):
                return

    async def fetch_next(self) -> bool:
        """Fetch records for iteration. Returns False after a regular end."""
        requested = self._next_round
        try:
            await self.fill(requested, None)
        except DoesNotExist:
            if self.notice is None and not self.is_unsubscribing:
                raise
            return False
        # As many as arrived this time, or twice that if there may be more.
        arrived = len(self.records)
        self._next_round = min(self._prefetch, 2 * arrived if arrived >= requested else arrived)
        return True

    def finish(self, error: PolybusError) -> None:
        """End the subscription with this error, unless it has ended already."""
        if self.end is None:
            self.end = error
            self._connection.close()
            self._on_end()
        self._changed.set()

    def gone_error(self) -> DoesNotExist:
        """Return the error for a subscription that the bus has ended."""
        if self.is_unsubscribing:
            return DoesNotExist(f"the subscription {self._subject} was unsubscribed")
        return DoesNotExist(GONE.format(subject=self._subject))

    async def detach(self) -> None:
        """Hang up, and keep the messages that the bus has sent before it closes."""
        self._is_detaching = True
        self._connection.finish()
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await self._connection.ended.wait()
        except TimeoutError:
            self._connection.abort()
        self.finish(self._detached_error())

    @property
    def idle_connection(self) -> FreudConnection | None:
        """The connection, if no Get waits there and delays other requests."""
        return None if self.unanswered or not self._connection.is_up else self._connection

    # --- called by the connection

    def on_answers(self, batch: AnswerBatch, start: int, end: int) -> None:
        self.unanswered -= end - start
        while start < end and self.end is None:
            after = batch.run_end(start, end)
            code = batch.code(start)
            if code == Code.OK:
                records = batch.records(start, after)
                # The notice is the last message of a topic.
                if records[-1].is_notice:
                    self.notice = records.pop()
                self.records.extend(records)
                if self.notice is not None:
                    self.finish(TopicDeleted(self._deleted_text(self.notice)))
            elif code == Code.DOESNT_EXIST:
                self.finish(self.gone_error())
            elif code != Code.NOTHING_HAPPENED:
                raise BadFrame("unexpected_code")
            start = after
        self._changed.set()

    def fail(self, error: PolybusError) -> None:
        self.unanswered = 0
        self.finish(self._detached_error() if self._is_detaching else error)

    # --- helpers

    def _deleted_text(self, notice: Record) -> str:
        name = notice.body.removeprefix(codec.NOTICE_PREFIX).decode("utf-8", "backslashreplace")
        return f"topic {self._topic or name!r} was deleted"

    def _detached_error(self) -> UsageError:
        return UsageError(f"the subscription {self._subject} was detached; attach it again")

    async def _fill(self, count: int, timeout_s: float | None) -> None:
        clock = asyncio.get_running_loop().time
        deadline = math.inf if timeout_s is None else clock() + timeout_s
        while not self.records and self.end is None:
            left_s = deadline - clock()
            if self.unanswered:
                if not await self._wait_change(left_s):
                    await self._collect_late_answers()
                    return
            elif left_s > 0:
                self._ask(count, WAIT_FOREVER if timeout_s is None else math.ceil(left_s))
            else:
                await self._poll(count)
                return

    def _ask(self, count: int, max_blocking_s: int) -> None:
        if not self._connection.is_up:
            self.finish(self._connection.make_loss_error())
            return
        requests = encode_gets(self._subscriber, 1, min(max_blocking_s, codec.MAX_BLOCKING_S), True)
        if count > 1:
            requests += encode_gets(self._subscriber, count - 1, DO_NOT_WAIT, True)
        self._changed.clear()
        self.unanswered = count
        self._connection.send(requests, count, self)

    async def _poll(self, count: int) -> None:
        """Request messages without waiting at the bus."""
        self._ask(count, DO_NOT_WAIT)
        while self.unanswered and self.end is None:
            if not await self._wait_change(self._answer_timeout_s):
                raise self._connection.timeout_error(self._answer_timeout_s)

    async def _collect_late_answers(self) -> None:
        """After a timeout while a Get waits: receive messages that the bus sent before it.

        The bus's answer on another connection arrives after its earlier writes on this one.
        """
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._settle()
        except (TimeoutError, PolybusError):
            return  # no message is lost: later ones are kept for the next call
        for _ in range(2):  # turns of the loop that read the bytes in the socket
            await asyncio.sleep(0)

    async def _wait_change(self, timeout_s: float) -> bool:
        if timeout_s <= 0:
            return False
        try:
            async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True
