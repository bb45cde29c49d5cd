"""Retention of topics that keep unread messages: trims messages that every reader has read.

In a topic with `keep = "read"` a message is trimmed once every subscriber's stored LAST has
reached it and every group is past it, within a second. A topic without readers keeps all
messages. The position of a group is read from its stored records, so it is never ahead of the
position after a crash.

Shards are trimmed by offset, and LAST is an id. In a topic with one shard both advance together,
so one read confirms the offset. With several shards the offset of each is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext, error_from_future
from polybus.durable.topic_registry import KEEP, KEEP_READ, WITH_SUBSCRIBERS
from polybus.errors import DoesNotExist, PolybusError
from polybus.groups import group_records as groups

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.subscribe_handler import SubscribeHandler
    from polybus.dialects.pirate.server.subscription_table import SubscriptionTable
    from polybus.model.topic import Bounds, ShardBounds, Topic
    from polybus.store.contract import Store

INTERVAL_S: Final = 0.4
MAX_PARALLEL_TRIMS: Final = 8  # parallel trims share the cost of a sync


class RetentionTask(NamedTuple):
    """A topic to trim. `read` is the id that all subscribers have reached."""

    topic: Topic
    read: int | None


class ReadRetention:
    """Trims read messages, in rounds."""

    def __init__(
        self, context: SubscriberContext, table: SubscriptionTable, subscribing: SubscribeHandler
    ) -> None:
        self._context = context
        self._table = table
        self._subscribing = subscribing
        self._next_s = 0.0
        self._running = 0
        self.collected = 0

    def tick(self, now_s: float) -> None:
        """Start a round if it is due and the last one has ended."""
        if self._running or now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        self._running = 1
        self._context.workers(
            lambda: _topics_with_groups(self._context.durable.store), self._on_groups_read
        )

    def _on_groups_read(self, future: Future[set[int]]) -> None:
        self._running = 0
        if error_from_future(future) is not None:
            return
        grouped = future.result()
        moved, self._table.changed_topics = self._table.changed_topics, set()
        due = [found for number in moved | grouped if (found := self._due(number))]
        for start in range(min(MAX_PARALLEL_TRIMS, len(due))):
            self._start_share(due[start::MAX_PARALLEL_TRIMS])

    def _due(self, number: int) -> RetentionTask | None:
        topic = self._context.durable.find_by_number(number)
        if topic is None or topic.settings.get(KEEP) != KEEP_READ:
            return None
        if not self._table.has(number):
            self._subscribing.remove_unused(topic)
        return RetentionTask(topic, self._table.read_by_all(number))

    def _start_share(self, share: Sequence[RetentionTask]) -> None:
        self._running += 1
        store = self._context.durable.store
        self._context.workers(
            lambda: sum(_collect(store, one) for one in share),
            lambda future: self._on_share_done(share, future),
        )

    def _on_share_done(self, share: Sequence[RetentionTask], future: Future[int]) -> None:
        self._running -= 1
        error = error_from_future(future)
        if error is None:
            self.collected += future.result()
        else:  # the next round retries
            self._table.changed_topics.update(one.topic.number for one in share)
            if not future.cancelled():
                self._context.log.warning("collection failed", reason=str(error))

    def enqueue_unused_topics(self) -> None:
        """Check topics whose last subscriber may have left just before the last shutdown."""
        for topic in self._context.durable.topics():
            if topic.settings.get(WITH_SUBSCRIBERS):
                self._table.changed_topics.add(topic.number)


# --- on a worker


def _topics_with_groups(store: Store) -> set[int]:
    """Return the numbers of all topics with groups."""
    return {
        groups.read_roster_key(one.key)[0] for one in subscriber_records.scan(store, groups.ROSTERS)
    }


def _collect(store: Store, due: RetentionTask) -> int:
    """Trim a topic. Returns the number of removed messages."""
    try:
        bounds = store.bounds(due.topic.number)
        before = _trim_offsets(store, due, bounds)
        if before:
            store.trim(due.topic.number, before)
    except DoesNotExist:  # dropped in the meantime
        return 0
    return sum(offset - bounds.shards[shard].start for shard, offset in before.items())


def _trim_offsets(store: Store, due: RetentionTask, bounds: Bounds) -> dict[int, int]:
    """Return the first kept offset of each shard that can be trimmed."""
    held = list(_group_floors(store, due.topic, bounds))
    if due.read is None and not held:
        return {}
    if due.read is not None and due.read + 1 <= bounds.first_id:
        return {}
    cuts = {}
    for number, shard in enumerate(bounds.shards):
        if shard.start == shard.end:
            continue
        cut = min(
            [_unread_offset(store, due, bounds, number, shard), *(one[number] for one in held)]
        )
        if cut > shard.start:
            cuts[number] = cut
    return cuts


def _group_floors(store: Store, topic: Topic, bounds: Bounds) -> list[dict[int, int]]:
    """Return, for each group, the first unread offset of each shard."""
    found = []
    for roster in subscriber_records.scan(store, groups.roster_prefix(topic.number)):
        name = groups.read_roster_key(roster.key)[1]
        lows = {number: one.start for number, one in enumerate(bounds.shards)}
        for record in subscriber_records.scan(store, groups.shard_prefix(topic.number, name)):
            lows[int(record.key[-4:], 16)] = groups.decode_progress(record.value).low
        found.append(lows)
    return found


def _unread_offset(
    store: Store, due: RetentionTask, bounds: Bounds, shard: int, at: ShardBounds
) -> int:
    """Return the first offset of a shard that some subscriber has not read."""
    if due.read is None or due.read >= bounds.next_id - 1:
        return at.end
    if len(bounds.shards) == 1:
        guess = at.end - (bounds.next_id - 1 - due.read)
        if at.start <= guess < at.end and _message_id(store, due, shard, guess) == due.read + 1:
            return guess
    low, high = at.start, at.end  # offsets before `low` are read; `high` and later ones are not
    while low < high:
        middle = (low + high) // 2
        if _message_id(store, due, shard, middle) <= due.read:
            low = middle + 1
        else:
            high = middle
    return low


def _message_id(store: Store, due: RetentionTask, shard: int, offset: int) -> int:
    rows = store.read(due.topic.number, shard, offset, offset + 1, max_rows=1, max_bytes=1)
    if not rows.count:
        raise PolybusError(f"topic {due.topic.name}: no message at offset {offset}")
    return int.from_bytes(rows.ids[:8], "little", signed=True)
