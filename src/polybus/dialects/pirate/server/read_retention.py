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
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscribe_handler import SubscribeHandler
from polybus.dialects.pirate.server.subscriber_context import SubscriberContext, error_from_future
from polybus.dialects.pirate.server.subscription_table import SubscriptionTable
from polybus.durable.topic_registry import KEEP, KEEP_READ, WITH_SUBSCRIBERS
from polybus.errors import Damaged, DoesNotExist, PolybusError
from polybus.groups import group_records as groups
from polybus.model.topic import Bounds, Topic
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
        # The last subscriber of a topic may have left just before the last shutdown.
        for topic in context.durable.topics():
            if topic.settings.get(WITH_SUBSCRIBERS):
                table.changed_topics.add(topic.number)

    def tick(self, now_s: float) -> None:
        """Start a round if it is due and the last one has ended."""
        if self._running or now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        self._running = 1
        store = self._context.durable.store

        def read_topics_with_groups() -> set[int]:
            numbers = set()
            for roster in subscriber_records.scan(store, groups.ROSTERS):
                with suppress(Damaged):  # the coordinator logs it
                    numbers.add(groups.read_roster_key(roster.key)[0])
            return numbers

        self._context.workers(read_topics_with_groups, self._start_trims)

    def _start_trims(self, future: Future[set[int]]) -> None:
        self._running = 0
        if error_from_future(future) is not None:
            return
        changed, self._table.changed_topics = self._table.changed_topics, set()
        tasks = []
        for number in changed | future.result():
            topic = self._context.durable.find_by_number(number)
            if topic is None or topic.settings.get(KEEP) != KEEP_READ:
                continue
            if not self._table.has(number):
                self._subscribing.remove_unused(topic)
            tasks.append(RetentionTask(topic, self._table.read_by_all(number)))
        store = self._context.durable.store
        for start in range(min(MAX_PARALLEL_TRIMS, len(tasks))):
            share = tasks[start::MAX_PARALLEL_TRIMS]
            self._running += 1
            self._context.workers(
                partial(_trim_topics, store, share), partial(self._on_trimmed, share)
            )

    def _on_trimmed(self, share: Sequence[RetentionTask], future: Future[int]) -> None:
        self._running -= 1
        error = error_from_future(future)
        if error is None:
            self.collected += future.result()
            return
        self._table.changed_topics.update(task.topic.number for task in share)  # retried next time
        if not future.cancelled():
            self._context.log.warning("collection failed", reason=str(error))


# --- on a worker


def _trim_topics(store: Store, tasks: Sequence[RetentionTask]) -> int:
    """Trim topics. Returns the number of removed messages."""
    removed = 0
    for task in tasks:
        try:
            bounds = store.bounds(task.topic.number)
            before = _trim_offsets(store, task, bounds)
            if before:
                store.trim(task.topic.number, before)
        except (DoesNotExist, Damaged):  # dropped in the meantime, or left as it is
            continue
        removed += sum(offset - bounds.shards[shard].start for shard, offset in before.items())
    return removed


def _trim_offsets(store: Store, task: RetentionTask, bounds: Bounds) -> dict[int, int]:
    """Return the first kept offset of each shard that can be trimmed."""
    topic, read = task
    group_offsets: list[dict[int, int]] = []  # per group: the first unread offset of each shard
    for roster in subscriber_records.scan(store, groups.roster_prefix(topic.number)):
        name = groups.read_roster_key(roster.key)[1]
        # A group without progress in a shard has read nothing of it.
        offsets = {number: shard.start for number, shard in enumerate(bounds.shards)}
        for record in subscriber_records.scan(store, groups.shard_prefix(topic.number, name)):
            number = groups.read_shard_key(record.key)
            offsets[number] = groups.decode_progress(record.value).low
        group_offsets.append(offsets)
    if read is None and not group_offsets:
        return {}
    if read is not None and read + 1 <= bounds.first_id:
        return {}
    cuts = {}
    for number, shard in enumerate(bounds.shards):
        if shard.start == shard.end:
            continue
        unread = _unread_offset(store, task, bounds, number)
        cut = min([unread, *(offsets[number] for offsets in group_offsets)])
        if cut > shard.start:
            cuts[number] = cut
    return cuts


def _unread_offset(store: Store, task: RetentionTask, bounds: Bounds, shard: int) -> int:
    """Return the first offset of a shard that some subscriber has not read."""
    topic, read = task
    start, end = bounds.shards[shard].start, bounds.shards[shard].end
    if read is None or read >= bounds.next_id - 1:
        return end

    def message_id(offset: int) -> int:
        rows = store.read(topic.number, shard, offset, offset + 1, max_rows=1, max_bytes=1)
        if not rows.count:
            raise PolybusError(f"topic {topic.name}: no message at offset {offset}")
        return int.from_bytes(rows.ids[:8], "little", signed=True)

    if len(bounds.shards) == 1:
        guess = end - (bounds.next_id - 1 - read)
        if start <= guess < end and message_id(guess) == read + 1:
            return guess
    low, high = start, end  # offsets before `low` are read; `high` and later ones are not
    while low < high:
        middle = (low + high) // 2
        if message_id(middle) <= read:
            low = middle + 1
        else:
            high = middle
    return low
