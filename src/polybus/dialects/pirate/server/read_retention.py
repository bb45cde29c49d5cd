"""Retention of topics that keep unread messages: trims messages that every reader has read.

In a topic with `keep = "read"` a message is trimmed once every subscriber's stored LAST has
reached it and every group is past it, within a second. A topic without readers keeps all
messages. The position of a group is read from its stored records, so it is never ahead of the
position after a crash.
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
from polybus.errors import Damaged, DoesNotExist
from polybus.groups import group_records
from polybus.groups.reader_positions import read_group_positions
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
        # Most buses have no such topic, and a round would wake a thread for nothing.
        if not self._context.durable.keeps_any_until_read:
            return
        self._running = 1
        store = self._context.durable.store

        def read_topics_with_groups() -> set[int]:
            numbers = set()
            for roster in subscriber_records.scan(store, group_records.ROSTERS):
                with suppress(Damaged):  # the coordinator logs it
                    numbers.add(group_records.read_roster_key(roster.key)[0])
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
    groups = read_group_positions(store, topic, bounds)
    if read is None and not groups:
        return {}
    if read is not None and read + 1 <= bounds.first_id:
        return {}
    cuts = {}
    for number, shard in enumerate(bounds.shards):
        if shard.start == shard.end:
            continue
        unread = _unread_offset(store, task, bounds, number)
        cut = min([unread, *(group.shards[number][0] for group in groups)])
        if cut > shard.start:
            cuts[number] = cut
    return cuts


def _unread_offset(store: Store, task: RetentionTask, bounds: Bounds, shard: int) -> int:
    """Return the first offset of a shard that some subscriber has not read."""
    topic, read = task
    if read is None or read >= bounds.next_id - 1:
        return bounds.shards[shard].end
    return store.find_id(topic.number, shard, read + 1)
