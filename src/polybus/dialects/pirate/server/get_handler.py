"""GET: moves LAST, stores it, and returns the first message above it.

Sending a message does not count as reading it: a later GET with a higher LAST does. LAST never
goes back, so a delayed or repeated GET does no harm.

Messages are read from the log in ranges and cached, because a subscriber that catches up asks
for one message after another, and other subscribers of the topic ask for the same ones. The
cache is bounded in bytes, whatever the number of subscribers. The size of a message is known
only after it is read, so at most MAX_PARALLEL_READS run at a time, and each next one starts
when the loop has taken the result of one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    Request,
    SubscriberContext,
    error_from_future,
)
from polybus.errors import Denied, DoesNotExist, MalformedRequest, PolybusError
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.topic import ALL

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.client_table import ClientEntry
    from polybus.dialects.pirate.server.subscription_table import (
        LastWriter,
        Subscription,
        SubscriptionTable,
    )
    from polybus.model.identity import Identity
    from polybus.model.rows import Column, Rows
    from polybus.model.topic import Topic


MAX_BYTES: Final = 32 << 20
READ_ROWS: Final = 512
READ_BYTES: Final = 256 << 10
MAX_PARALLEL_READS: Final = 4  # each may be 64 MiB
ROW_BYTES: Final = 24  # id, time and offset of a row
LARGE_BYTES: Final = 1 << 20  # larger messages are not cached


class CachedMessage(NamedTuple):
    id: int
    timestamp_ns: int
    body: bytes | memoryview


class CachedRange:
    """All messages of a topic with ids above `low` and up to `high`."""

    __slots__ = ("bodies", "high", "ids", "low", "offsets", "size", "times", "topic")

    def __init__(self, topic: int, low: int, rows: Rows) -> None:
        self.topic = topic
        self.low = low
        self.ids = _column("q", rows.ids)
        self.times = _column("q", rows.timestamps_ns)
        self.offsets = _column("i", rows.body_offsets)
        self.bodies = rows.bodies
        self.high = self.ids[-1]
        self.size = len(rows.bodies) + ROW_BYTES * rows.count

    def first_after(self, last: int) -> CachedMessage:
        at = bisect_right(self.ids, last)
        body = self.bodies[self.offsets[at] : self.offsets[at + 1]]
        return CachedMessage(self.ids[at], self.times[at], body)


OnMessage = Callable[[CachedMessage | PolybusError | None], None]


class MessageCache:
    """Ranges of messages that were read from the log, the least recently used evicted first."""

    def __init__(self, context: SubscriberContext) -> None:
        self._context = context
        self._topics: dict[int, dict[int, CachedRange]] = {}  # by topic and `low`
        self._lows: dict[int, list[int]] = {}  # the same keys, sorted
        self._used: OrderedDict[tuple[int, int], CachedRange] = OrderedDict()
        self._reading: dict[tuple[int, int], list[OnMessage]] = {}
        self._queued_reads: deque[tuple[Topic, int]] = deque()  # those not started
        self.size = 0

    def get(self, topic: Topic, last: int, then: OnMessage) -> None:
        """Call `then` with the first message above `last`, or with None if there is none."""
        found = self._cached_range(topic.number, last)
        if found is not None:
            then(found.first_after(last))
            return
        self._read(topic, last).append(then)

    def prefetch(self, topic: Topic, last: int) -> None:
        """Start reading a message that will be asked for soon."""
        if self._cached_range(topic.number, last) is None:
            self._read(topic, last)

    def forget(self, topic: int) -> None:
        for low in self._lows.pop(topic, ()):
            self.size -= self._used.pop((topic, low)).size
        self._topics.pop(topic, None)

    def _cached_range(self, topic: int, last: int) -> CachedRange | None:
        lows = self._lows.get(topic)
        if not lows:
            return None
        at = bisect_right(lows, last) - 1
        if at < 0:
            return None
        found = self._topics[topic][lows[at]]
        if found.high <= last:
            return None
        self._used.move_to_end((topic, found.low))
        return found

    def _read(self, topic: Topic, last: int) -> list[OnMessage]:
        place = topic.number, last
        waiting = self._reading.get(place)
        if waiting is None:
            waiting = self._reading[place] = []
            self._queued_reads.append((topic, last))
            self._start_read()
        return waiting

    def _start_read(self) -> None:
        if (
            not self._queued_reads
            or len(self._reading) - len(self._queued_reads) >= MAX_PARALLEL_READS
        ):
            return
        topic, last = self._queued_reads.popleft()
        store = self._context.durable.store

        def read() -> Rows:
            return store.read(topic.number, ALL, last + 1, max_rows=READ_ROWS, max_bytes=READ_BYTES)

        self._context.workers(read, lambda future: self._on_read(topic, last, future))

    def _on_read(self, topic: Topic, last: int, future: Future[Rows]) -> None:
        waiting = self._reading.pop((topic.number, last))
        answer: CachedMessage | PolybusError | None = error_from_future(future)
        if answer is None and (rows := future.result()).count:
            messages = CachedRange(topic.number, last, rows)
            self._context.durable.advance(topic.number, messages.high + 1)
            answer = messages.first_after(last)
            if messages.size <= LARGE_BYTES and self._context.durable.find_by_number(topic.number):
                self._insert(messages)
        self._start_read()
        for then in waiting:
            then(answer)

    def _insert(self, messages: CachedRange) -> None:
        topic, low = messages.topic, messages.low
        old = self._used.pop((topic, low), None)
        if old is not None:
            self.size -= old.size
        else:
            lows = self._lows.setdefault(topic, [])
            lows.insert(bisect_right(lows, low), low)
        self._topics.setdefault(topic, {})[low] = messages
        self._used[topic, low] = messages
        self.size += messages.size
        while self.size > MAX_BYTES:
            self._evict(*next(iter(self._used)))

    def _evict(self, topic: int, low: int) -> None:
        self.size -= self._used.pop((topic, low)).size
        del self._topics[topic][low]
        self._lows[topic].remove(low)
        if not self._lows[topic]:
            del self._lows[topic], self._topics[topic]


def _column(kind: str, raw: Column) -> array[int]:
    column = array(kind)
    column.frombytes(raw)
    return column


class GetHandler:
    """Executes GET."""

    def __init__(
        self,
        context: SubscriberContext,
        table: SubscriptionTable,
        lasts: LastWriter,
        cache: MessageCache,
    ) -> None:
        self._context = context
        self._table = table
        self._lasts = lasts
        self._cache = cache

    def get(self, client: ClientEntry, request: Request, caller: Identity, then: OnResult) -> None:
        if client.is_fenced(request):
            then(client.fenced_error(request))
            return
        topic = self._context.durable.find(request.topic)
        found = self._table.find(topic.number, client.id) if topic is not None else None
        if topic is None or found is None:
            then(DoesNotExist(f"not subscribed to {request.topic!r}; send SUB first"))
            return
        newest = self._context.durable.next_id(topic) - 1
        error = self._refusal(caller, request, newest)
        if error is not None:
            then(error)
            return
        found.seen_s = self._context.clock()
        found.last = max(found.last, request.last)
        if found.saved >= found.last:
            self._answer(topic, found.last, then)
        else:
            self._save(topic, found, newest, then)

    def _save(self, topic: Topic, moved: Subscription, newest: int, then: OnResult) -> None:
        last = moved.last
        if last < newest:
            self._cache.prefetch(topic, last)  # while LAST is being committed

        def saved(error: PolybusError | None) -> None:
            if error is None:
                self._answer(topic, last, then)
            else:
                then(error)

        self._lasts.save(moved, saved)

    def _answer(self, topic: Topic, last: int, then: OnResult) -> None:
        if last >= self._context.durable.next_id(topic) - 1:
            then(None)
        else:
            self._cache.get(topic, last, then)

    def _refusal(self, caller: Identity, request: Request, newest: int) -> PolybusError | None:
        if self._context.policy.has_rules_for(SUBSCRIBE):
            try:
                self._context.binding.check_allowed(caller, SUBSCRIBE, request.topic)
            except Denied as error:
                return error
        if request.last > newest:
            return MalformedRequest(
                f"LAST must be at most {newest}, the newest id of {request.topic!r}, got "
                f"{request.last}; if the bus was restored from a backup, UNSUB and SUB again"
            )
        return None
