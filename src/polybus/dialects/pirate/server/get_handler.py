"""GET: moves LAST and returns the first message above it.

Sending a message does not count as reading it: a later GET with a higher LAST does. LAST never
goes back, so a delayed or repeated GET does no harm. No GET waits for the disk: LAST is stored
with the next commit of positions, and messages are removed only by stored positions
(read_retention.py). After a crash the next GET brings its LAST again.

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
from functools import partial
from typing import Final, NamedTuple

from polybus.dialects.pirate.codec import ClientRequest
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.client_table import ClientEntry, ClientTable
from polybus.dialects.pirate.server.subscriber_context import (
    OnResult,
    SubscriberContext,
    error_from_future,
    unknown_user_error,
)
from polybus.dialects.pirate.server.subscription_table import Subscription, SubscriptionTable
from polybus.errors import Damaged, Denied, DoesNotExist, MalformedRequest, PolybusError
from polybus.model.access_rule import SUBSCRIBE
from polybus.model.commit import Commit, CommitResult
from polybus.model.identity import Identity
from polybus.model.rows import Column, Rows
from polybus.model.topic import ALL, Topic

MAX_BYTES: Final = 32 << 20
READ_ROWS: Final = 512
READ_BYTES: Final = 256 << 10
MAX_PARALLEL_READS: Final = 4  # each may be 64 MiB
ROW_BYTES: Final = 24  # id, time and offset of a row
LARGE_BYTES: Final = 1 << 20  # larger messages are not cached


class GetHandler:
    """Executes GET."""

    def __init__(
        self,
        context: SubscriberContext,
        clients: ClientTable,
        table: SubscriptionTable,
        lasts: LastWriter,
        cache: MessageCache,
    ) -> None:
        self._context = context
        self._clients = clients
        self._table = table
        self._lasts = lasts
        self._cache = cache

    def get(self, request: ClientRequest, caller: Identity, then: OnResult) -> None:
        """Execute a GET. Calls `then` with a message, None if there is none, or the error."""
        client = self._clients.find_ready(request.client)
        if client is not None:
            self._get_now(request, caller, then, client)
        else:
            run = partial(self._get_now, request, caller, then)
            self._clients.queue(request.client, run, then)

    def _get_now(
        self, request: ClientRequest, caller: Identity, then: OnResult, client: ClientEntry
    ) -> None:
        if client.is_fenced(request):
            then(client.fenced_error(request))
            return
        context = self._context
        topic = context.durable.find(request.topic)
        subscription = self._table.find(topic.number, client.id) if topic is not None else None
        if topic is None or subscription is None:
            then(DoesNotExist(f"not subscribed to {request.topic!r}; send SUB first"))
            return
        try:
            if context.policy.can_deny(SUBSCRIBE, request.topic.encode()):
                context.binding.check_allowed(caller, SUBSCRIBE, request.topic)
            context.durable.check_intact(topic)
        except (Denied, Damaged) as error:
            is_unknown = isinstance(error, Denied) and caller.is_in_doubt
            then(unknown_user_error() if is_unknown else error)
            return
        newest = context.durable.next_id(topic) - 1
        if request.last > newest:
            text = (
                f"LAST must be at most {newest}, the newest id of {request.topic!r}, got "
                f"{request.last}; if the bus was restored from a backup, UNSUB and SUB again"
            )
            then(MalformedRequest(text))
            return
        subscription.seen_s = context.clock()
        subscription.last = last = max(subscription.last, request.last)
        if subscription.saved < last:
            self._lasts.save(subscription)
        self._answer(topic, last, then)

    def _answer(self, topic: Topic, last: int, then: OnResult) -> None:
        durable = self._context.durable
        if last >= durable.next_id(topic) - 1 or durable.is_consume_paused(topic.number):
            then(None)
        else:
            self._cache.get(topic, last, then)


# --- LAST on disk


class LastWriter:
    """Stores moved positions, many per commit. No reader waits for it."""

    def __init__(self, context: SubscriberContext, table: SubscriptionTable) -> None:
        self._context = context
        self._table = table
        self._unsaved: dict[Subscription, None] = {}
        self._commits = 0  # in progress

    def save(self, moved: Subscription) -> None:
        """Store a position soon."""
        if not self._unsaved:
            self._context.run_on_loop(self.on_turn_end)  # in case no other turn end comes first
        self._unsaved[moved] = None

    def on_turn_end(self) -> None:
        """Commit the moved positions, one commit at a time: the disk takes many in one."""
        if not self._commits:
            self.flush()

    def flush(self) -> None:
        """Submit all moved positions, so that later commits come after them."""
        # Without those of removed subscriptions, whose records are gone.
        present = [one for one in self._unsaved if self._table.find(*one.key) is one]
        self._unsaved.clear()
        for start in range(0, len(present), subscriber_records.MAX_CHANGES_PER_COMMIT):
            some = present[start : start + subscriber_records.MAX_CHANGES_PER_COMMIT]
            # LAST as it is in this commit: it may move again before the commit is on disk.
            moved = [(one, one.last) for one in some]
            changes = [subscriber_records.last_change(one.key, last) for one, last in moved]
            self._commits += 1
            self._context.commit(Commit(changes=tuple(changes)), partial(self._on_committed, moved))

    def _on_committed(
        self, moved: list[tuple[Subscription, int]], future: Future[CommitResult]
    ) -> None:
        self._commits -= 1
        # After a failure the next GET of each client saves its position again.
        if error_from_future(future) is None:
            for subscription, last in moved:
                subscription.saved = max(subscription.saved, last)
                self._table.changed_topics.add(subscription.key.topic)
        self.on_turn_end()


# --- messages in memory


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


def _column(kind: str, raw: Column) -> array[int]:
    column = array(kind)
    column.frombytes(raw)
    return column


OnMessage = Callable[[CachedMessage | PolybusError | None], None]


class MessageCache:
    """Ranges of messages that were read from the log, the least recently used evicted first."""

    def __init__(self, context: SubscriberContext) -> None:
        self._context = context
        # By topic and `low`, the least recently used first.
        self._ranges: OrderedDict[tuple[int, int], CachedRange] = OrderedDict()
        self._lows: dict[int, list[int]] = {}  # the same keys by topic, sorted
        self._reading: dict[tuple[int, int], list[OnMessage]] = {}
        self._queued_reads: deque[tuple[Topic, int]] = deque()  # those not started
        self.size = 0

    def get(self, topic: Topic, last: int, then: OnMessage) -> None:
        """Call `then` with the first message above `last`, or with None if there is none."""
        cached = self._find(topic.number, last)
        if cached is not None:
            then(cached.first_after(last))
        else:
            self._read(topic, last).append(then)

    def forget(self, topic: int) -> None:
        for low in self._lows.pop(topic, ()):
            self.size -= self._ranges.pop((topic, low)).size

    def _find(self, topic: int, last: int) -> CachedRange | None:
        lows = self._lows.get(topic)
        if not lows:
            return None
        at = bisect_right(lows, last) - 1
        if at < 0:
            return None
        cached = self._ranges[topic, lows[at]]
        if cached.high <= last:
            return None
        self._ranges.move_to_end((topic, cached.low))
        return cached

    def _read(self, topic: Topic, last: int) -> list[OnMessage]:
        """Read from `last` on, or join a read in progress. Returns its callbacks."""
        waiting = self._reading.get((topic.number, last))
        if waiting is None:
            waiting = self._reading[topic.number, last] = []
            self._queued_reads.append((topic, last))
            self._start_read()
        return waiting

    def _start_read(self) -> None:
        started = len(self._reading) - len(self._queued_reads)
        if not self._queued_reads or started >= MAX_PARALLEL_READS:
            return
        topic, last = self._queued_reads.popleft()
        store = self._context.durable.store
        read = partial(
            store.read, topic.number, ALL, last + 1, max_rows=READ_ROWS, max_bytes=READ_BYTES
        )
        self._context.workers(read, partial(self._on_read, topic, last))

    def _on_read(self, topic: Topic, last: int, future: Future[Rows]) -> None:
        waiting = self._reading.pop((topic.number, last))
        answer: CachedMessage | PolybusError | None = error_from_future(future)
        if answer is None and (rows := future.result()).count:
            messages = CachedRange(topic.number, last, rows)
            self._context.durable.advance(topic.number, messages.high + 1)
            answer = messages.first_after(last)
            # A topic that was dropped during the read was already forgotten.
            if messages.size <= LARGE_BYTES and self._context.durable.find_by_number(topic.number):
                self._insert(messages)
        self._start_read()
        for then in waiting:
            then(answer)

    def _insert(self, messages: CachedRange) -> None:
        key = topic, low = messages.topic, messages.low
        old = self._ranges.pop(key, None)
        if old is not None:
            self.size -= old.size
        else:
            lows = self._lows.setdefault(topic, [])
            lows.insert(bisect_right(lows, low), low)
        self._ranges[key] = messages
        self.size += messages.size
        while self.size > MAX_BYTES:
            (topic, low), evicted = self._ranges.popitem(last=False)
            self.size -= evicted.size
            self._lows[topic].remove(low)
            if not self._lows[topic]:
                del self._lows[topic]
