"""One subscription, read at its own pace.

A waiting Get holds up everything behind it on its connection, so every
subscription has a connection of its own.


What a subscription has received and its user has not read yet, and how it gets more.

Requests go out in *rounds*: one Get that may wait, and behind it Gets that do
not, as many as are wanted together. There is at most one round at a time. One
that was sent is answered, whether or not its caller still waits. So what comes
is kept here for whoever asks next: a read that is cancelled, or whose time is
up, loses no message.

It ends once, with the error that says why: `TopicDeleted` after the notice,
which nothing can follow, `DoesNotExist` when we have unsubscribed or the bus
knows the subscription no more, or the loss of the connection. What was received
before the end comes first.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from polybus.dialects.freud import codec
from polybus.dialects.freud.client.answer_batch import AnswerBatch, Record, encode_gets
from polybus.dialects.freud.client.freud_connection import FreudConnection
from polybus.dialects.freud.codec import Code
from polybus.errors import BadFrame, DoesNotExist, PolybusError, TopicDeleted, UsageError

if TYPE_CHECKING:
    from polybus.dialects.freud.client.client import ClientOptions


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


# More Gets at once gain nothing, and the bus would have to read them all before it answers.
MAX_ROUND_GETS = 4096
WAIT_FOREVER = -1
DO_NOT_WAIT = 0
# When time is up the bus is asked once more, but a bus that is held up is not waited for.
SETTLE_TIMEOUT_S = 0.25

GONE = (
    "the subscription to {topic!r} is gone: its topic was deleted and the notice not read in time,"
    " it was not used for subscriber_timeout_s, or a rule does not allow it any more"
)


class SubscriptionInbox:
    """See the top of the file. It is who expects the answers on its link.

    `settle` returns when the bus has answered something on another connection;
    `on_end` is called once. `records` may be read from by another thread.
    """

    def __init__(
        self,
        topic: str,
        subscriber: bytes,
        link: FreudConnection,
        options: ClientOptions,
        settle: Callable[[], Awaitable[object]],
        on_end: Callable[[], None],
    ) -> None:
        self.records: deque[Record] = deque()
        self.notice: Record | None = None
        self.end: PolybusError | None = None
        self.unanswered = 0  # answers of the round that are still to come
        self.is_unsubscribing = (
            False  # we unsubscribe: the bus may say so first to a Get that waits
        )
        self._topic = topic
        self._subscriber = subscriber
        self._link = link
        self._answer_timeout_s = options.answer_timeout_s
        self._prefetch = min(options.prefetch, MAX_ROUND_GETS)
        self._next_round = 1
        self._settle = settle
        self._on_end = on_end
        self._changed = asyncio.Event()
        self._filling = False

    async def fill(self, count: int, timeout_s: float | None) -> None:
        """Return when there are records, or time is up; raise if the end has come instead."""
        if self.end is None:
            await self._fill_exclusive(min(count, MAX_ROUND_GETS), timeout_s)
        if not self.records and self.end is not None:
            raise self.end

    async def wait_round(self) -> None:
        """Once the first of a round has come, the others are answered at once: wait for them."""
        while self.unanswered and self.records and self.end is None:
            if not await self._wait_change(self._answer_timeout_s):
                return

    async def fetch_next(self) -> bool:
        """Fetch what iteration reads next; False when it is over, as it should be."""
        asked = self._next_round
        try:
            await self.fill(asked, None)
        except DoesNotExist:
            if self.notice is None and not self.is_unsubscribing:
                raise
            return False
        # As many as came this time, or twice that if there may be more.
        came = len(self.records)
        self._next_round = min(self._prefetch, 2 * came if came >= asked else came)
        return True

    def finish(self, error: PolybusError) -> None:
        """Nothing more will come."""
        if self.end is None:
            self.end = error
            self._link.close()
            self._on_end()
        self._changed.set()

    def gone_error(self) -> DoesNotExist:
        """The bus knows it no more."""
        if self.is_unsubscribing:
            return DoesNotExist(f"unsubscribed from {self._topic!r}")
        return DoesNotExist(GONE.format(topic=self._topic))

    @property
    def idle_link(self) -> FreudConnection | None:
        """The connection, if nothing that is sent there now would wait behind a Get."""
        return None if self.unanswered or not self._link.is_up else self._link

    # --- what the link calls

    def on_request(self, batch: AnswerBatch, start: int, end: int) -> None:
        self.unanswered -= end - start
        while start < end and self.end is None:
            after = batch.run_end(start, end)
            code = batch.code(start)
            if code == Code.OK:
                self._receive(batch.records(start, after))
            elif code == Code.DOESNT_EXIST:
                self.finish(self.gone_error())
            elif code != Code.NOTHING_HAPPENED:
                raise BadFrame("unexpected_code")
            start = after
        self._changed.set()

    def fail(self, error: PolybusError) -> None:
        self.unanswered = 0
        self.finish(error)

    # --- inside

    def _receive(self, records: list[Record]) -> None:
        if records[-1].is_notice:
            self.notice = records.pop()
        self.records.extend(records)
        if self.notice is not None:
            self.finish(TopicDeleted(f"topic {self._topic!r} was deleted"))

    async def _fill_exclusive(self, count: int, timeout_s: float | None) -> None:
        if self._filling:
            raise UsageError(f"another task is reading from the subscription to {self._topic!r}")
        self._filling = True
        try:
            await self._fill(count, timeout_s)
        finally:
            self._filling = False

    async def _fill(self, count: int, timeout_s: float | None) -> None:
        clock = asyncio.get_running_loop().time
        deadline = math.inf if timeout_s is None else clock() + timeout_s
        while not self.records and self.end is None:
            left_s = deadline - clock()
            if self.unanswered:
                if not await self._wait_change(left_s):
                    return await self._collect_late_answers()
            elif left_s > 0:
                self._ask(count, WAIT_FOREVER if timeout_s is None else math.ceil(left_s))
            else:
                return await self._poll(count)
        return None

    def _ask(self, count: int, max_blocking_s: int) -> None:
        if not self._link.is_up:
            return self.finish(self._link.make_loss_error())
        requests = encode_gets(self._subscriber, 1, min(max_blocking_s, codec.MAX_BLOCKING_S), True)
        if count > 1:
            requests += encode_gets(self._subscriber, count - 1, DO_NOT_WAIT, True)
        self._changed.clear()
        self.unanswered = count
        return self._link.send(requests, count, self)

    async def _poll(self, count: int) -> None:
        """Ask without waiting: the answer is final."""
        self._ask(count, DO_NOT_WAIT)
        while self.unanswered and self.end is None:
            if not await self._wait_change(self._answer_timeout_s):
                raise self._link.timeout_error(self._answer_timeout_s)

    async def _collect_late_answers(self) -> None:
        """Time is up while a Get waits: let what the bus has sent by now arrive.

        Its answer on another connection comes after what it has written here before.
        """
        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self._settle()
        except (TimeoutError, PolybusError):
            return  # nothing is lost: what comes is kept for the next call
        for _ in range(2):  # a turn of the loop reads what lies in the socket
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
