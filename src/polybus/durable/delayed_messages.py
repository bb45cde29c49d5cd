"""Messages that are not due yet: kept aside as records, and appended when they are due.

One commit appends the messages and removes their records, so each is appended exactly once,
whatever ends the bus in between. The shard of a message is chosen when it is appended. Memory
holds a few numbers per topic with delayed messages, and the batches of one commit.

A message is charged to `max_bytes` of its topic when it is accepted, and not again when it is
appended: an accepted message is never refused. A topic that was dropped takes its delayed
messages with it, in bounded steps.

Any thread may call the methods, but only one may call `append_due`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.durable import delayed_records
from polybus.errors import LimitReached
from polybus.model.block import Block
from polybus.model.commit import MAX_COMMIT_KEYS, Commit, RecordChange
from polybus.model.delivery_time import encode_due

if TYPE_CHECKING:
    from polybus.bus.shares import ShareTable
    from polybus.durable.delayed_records import DelayedBatch
    from polybus.durable.topic_registry import DurableTopics
    from polybus.model.commit import CommitResult
    from polybus.model.identity import Identity
    from polybus.model.stamp import Stamp
    from polybus.model.topic import Topic

NEVER_NS: Final = 1 << 63
# Of one commit: it is one step of the store's writer, and other clients wait for it.
MAX_COMMIT_BYTES: Final = 4 << 20
MAX_COMMIT_RECORDS: Final = 512


class DelayedTotals(NamedTuple):
    """Delayed messages of a topic, their bytes, and when the first is due (None: none is)."""

    messages: int = 0
    bytes: int = 0
    next_due_ns: int | None = None


@dataclass(slots=True)
class _TopicDelays:
    """The counts include batches that are not on disk yet; `next_due_ns` does not."""

    messages: int = 0
    bytes: int = 0
    next_due_ns: int = NEVER_NS
    # The earliest batch that came to disk since `append_due` began to scan.
    arrived_due_ns: int = NEVER_NS


class DelayedMessages:
    def __init__(self, topics: DurableTopics) -> None:
        self._topics = topics
        self._store = topics.store
        self._lock = Lock()
        self._by_topic: dict[int, _TopicDelays] = {}
        self._by_account: dict[str, int] = {}
        self._shares: ShareTable | None = None
        self._max_per_topic = 0
        self._next_sequence = 0
        self.appended = 0  # messages since the start
        self.dropped = 0  # messages of dropped topics since the start
        # Called on any thread when a batch is due before all others.
        self.on_earlier: Callable[[], None] = lambda: None
        for topic, batch in delayed_records.scan_headers(self._store):
            if batch is None:  # `append_due` then raises `Damaged`
                self._by_topic.setdefault(topic, _TopicDelays()).next_due_ns = 0
                continue
            self._add(topic, batch.count, batch.size_bytes, batch.account)
            delays = self._by_topic[topic]
            delays.next_due_ns = min(delays.next_due_ns, batch.due_ns)
            self._next_sequence = max(self._next_sequence, batch.sequence + 1)

    def set_limits(self, shares: ShareTable, max_per_topic: int) -> None:
        """Bound the messages: all together with a share per account, and per topic."""
        with self._lock:
            self._shares, self._max_per_topic = shares, max_per_topic
            held = dict(self._by_account)
        for account, messages in held.items():
            shares.restore(account, messages)

    # --- callers

    def produce(
        self, topic: Topic, block: Block, due_ns: int, stamp: Stamp | None, caller: Identity
    ) -> Future[CommitResult]:
        """Keep a batch until it is due. Its result has no ids; its note is the due time.

        Raises:
            Paused: the topic takes no messages.
            LimitReached: the topic is full, or there are too many delayed messages.
            TooLarge: the batch is too large for one commit.
        """
        with self._lock:
            sequence = self._next_sequence
            self._next_sequence += 1
        account = caller.account_name
        changes = delayed_records.encode_batch(topic.number, due_ns, sequence, block, account)
        self._topics.check_produce(topic)
        self._topics.reserve_bytes(topic, block.size_bytes)
        self._reserve(topic, block, caller)
        future = self._store.commit(Commit(changes=changes, stamp=stamp, note=encode_due(due_ns)))
        future.add_done_callback(partial(self._on_committed, topic.number, block, due_ns, account))
        return future

    def totals(self, topic: int) -> DelayedTotals:
        with self._lock:
            delays = self._by_topic.get(topic)
            if delays is None:
                return DelayedTotals()
            due_ns = min(delays.next_due_ns, delays.arrived_due_ns)
            next_due_ns = due_ns if due_ns < NEVER_NS else None
            return DelayedTotals(delays.messages, delays.bytes, next_due_ns)

    def overview(self) -> dict[str, int]:
        """Return the counts of the whole bus."""
        with self._lock:
            each = list(self._by_topic.values())
            return {
                "messages": sum(delays.messages for delays in each),
                "bytes": sum(delays.bytes for delays in each),
                "topics": len(each),
                "appended": self.appended,
                "dropped": self.dropped,
            }

    def on_dropped(self, topic: Topic) -> None:
        """Have the delayed messages of a topic removed. Does not wait."""
        with self._lock:
            delays = self._by_topic.get(topic.number)
            if delays is None:
                return
            delays.next_due_ns = delays.arrived_due_ns = 0
        self.on_earlier()

    # --- the scheduler

    def next_due_ns(self) -> int:
        """Return when the first message of all topics is due."""
        with self._lock:
            return min((delays.next_due_ns for delays in self._by_topic.values()), default=NEVER_NS)

    def due_topics(self, now_ns: int) -> list[int]:
        with self._lock:
            due = [(d.next_due_ns, n) for n, d in self._by_topic.items() if d.next_due_ns <= now_ns]
        return [number for _, number in sorted(due)]

    def append_due(self, number: int, now_ns: int) -> None:
        """Append the next due messages of a topic, in due order, in one commit.

        If it fails, nothing has changed, and the topic stays due.
        """
        topic = self._topics.find_by_number(number)
        with self._lock:
            delays = self._by_topic[number]
            delays.arrived_due_ns = NEVER_NS
        if topic is None:
            self._remove_dropped(number)
            return
        batches, next_due_ns = self._take_due(topic, now_ns)
        if batches:
            block = Block.concat([batch.block() for batch in batches])
            removals = tuple(
                RecordChange(key, None, version)
                for batch in batches
                for key, version in batch.records
            )
            appends = self._topics.route(topic, block)
            self._topics.commit(Commit(appends, changes=removals)).result()
        with self._lock:
            delays.next_due_ns = min(next_due_ns, delays.arrived_due_ns)
            delays.arrived_due_ns = NEVER_NS
        for batch in batches:
            self.appended += batch.count
            self._release(number, batch.count, batch.size_bytes, batch.account)

    def _take_due(self, topic: Topic, now_ns: int) -> tuple[list[DelayedBatch], int]:
        """Return due batches for one commit, and the due time of the first one after them."""
        # A commit touches the records, the shards and the topic.
        room = min(MAX_COMMIT_RECORDS, MAX_COMMIT_KEYS - len(topic.open_shards) - 1)
        batches: list[DelayedBatch] = []
        records = size = 0
        for batch in delayed_records.scan_batches(self._store, topic.number):
            records += len(batch.records)
            size += batch.size_bytes
            is_full = batches and (records > room or size > MAX_COMMIT_BYTES)
            if batch.due_ns > now_ns or is_full:
                return batches, batch.due_ns
            batches.append(batch)
        return batches, NEVER_NS

    def _remove_dropped(self, number: int) -> None:
        """Remove some records of a dropped topic."""
        keys, headers = delayed_records.scan_records(self._store, number, MAX_COMMIT_RECORDS)
        if keys:
            changes = tuple([RecordChange(key, None) for key in keys])
            self._store.commit(Commit(changes=changes)).result()
        for batch in headers:
            self.dropped += batch.count
            self._release(number, batch.count, batch.size_bytes, batch.account)
        with self._lock:
            delays = self._by_topic.get(number)
            if delays is not None and not keys:
                # Batches in flight make it due again when they are on disk.
                delays.next_due_ns = delays.arrived_due_ns

    # --- counts

    def _reserve(self, topic: Topic, block: Block, caller: Identity) -> None:
        if self._shares is not None:
            self._shares.take(caller, block.count)
        with self._lock:
            known = self._by_topic.get(topic.number)
            most = self._max_per_topic
            fits = not most or (known.messages if known else 0) + block.count <= most
            if fits:
                self._add(topic.number, block.count, block.size_bytes, caller.account_name)
        if not fits:
            if self._shares is not None:
                self._shares.release(caller.account_name, block.count)
            text = f"topic {topic.name} must have at most {most} delayed messages; retry later"
            raise LimitReached("max_topic_delayed", text)

    def _on_committed(
        self,
        number: int,
        block: Block,
        due_ns: int,
        account: str,
        future: Future[CommitResult],
    ) -> None:
        """Handle the end of a commit. Runs on the store's thread."""
        is_stored = not future.cancelled() and future.exception() is None
        if not is_stored or future.result().duplicate:
            self._release(number, block.count, block.size_bytes, account)
            return
        with self._lock:
            delays = self._by_topic.get(number)
            if delays is None:  # it was due, and is appended already
                return
            is_earlier = due_ns < min(delays.next_due_ns, delays.arrived_due_ns)
            delays.next_due_ns = min(delays.next_due_ns, due_ns)
            delays.arrived_due_ns = min(delays.arrived_due_ns, due_ns)
        if is_earlier:
            self.on_earlier()

    def _add(self, number: int, messages: int, size: int, account: str) -> None:
        """Count a batch. The caller holds the lock, if other threads exist."""
        delays = self._by_topic.setdefault(number, _TopicDelays())
        delays.messages += messages
        delays.bytes += size
        self._by_account[account] = self._by_account.get(account, 0) + messages

    def _release(self, number: int, messages: int, size: int, account: str) -> None:
        with self._lock:
            delays = self._by_topic[number]
            delays.messages -= messages
            delays.bytes -= size
            if not delays.messages:
                del self._by_topic[number]
            left = self._by_account[account] - messages
            if left:
                self._by_account[account] = left
            else:
                del self._by_account[account]
        if self._shares is not None:
            self._shares.release(account, messages)
