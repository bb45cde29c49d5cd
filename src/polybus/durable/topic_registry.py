"""The registry of durable topics: lookup by name, and production of batches.

All methods may be called from any thread: sessions on the loop and threads of the native
port share the registry. Only `register` and `forget`, which change the meaning of a name,
must be called on the loop (topic_names.py).

The registry knows the next id of each topic from its commits, so the loop does not have to
ask the store.

A batch is split over the open shards of the topic by the hash of its keys; messages without
a key go round the shards in runs. If the topic is resharded before the commit is executed, the
store splits the batch again. A topic with `max_bytes` refuses a batch that would exceed it,
uncommitted and delayed bytes included. The size is counted here, and read from the
store only when the bound seems to be reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock, RLock
from typing import TYPE_CHECKING

from polybus.bus.traffic import SharedTraffic
from polybus.durable.delayed_messages import DelayedMessages
from polybus.durable.retention_limits import RetentionLimits
from polybus.errors import Damaged, DoesNotExist, LimitReached, Paused, ShardSealed, StageGone
from polybus.model.commit import Append, Commit
from polybus.model.shard_routes import count_runs, split_block

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.commit import CommitResult
    from polybus.model.stamp import Stamp
    from polybus.model.topic import Topic
    from polybus.store.contract import Store

MAX_BYTES = "max_bytes"  # a setting of a topic; absent or 0: no bound
# A topic's setting: `read` removes a message once every subscriber and group has read it.
KEEP, KEEP_ALL, KEEP_READ = "keep", "all", "read"
# A topic's setting: `dead-letter` keeps messages that expire before a group gets them.
EXPIRED, EXPIRED_DROP, EXPIRED_DEAD_LETTER = "expired", "drop", "dead-letter"
# A topic's setting: its first subscriber created it, and its last one removes it.
WITH_SUBSCRIBERS = "with_subscribers"
# A topic's setting: the sides that are paused. Producing is refused, or consuming is held back.
PAUSED, PRODUCE_SIDE, CONSUME_SIDE = "paused", "produce", "consume"


def paused_sides(topic: Topic) -> Sequence[str]:
    """Return the sides of a topic that are paused: produce, consume."""
    sides = topic.settings.get(PAUSED)
    return [str(side) for side in sides] if isinstance(sides, list) else ()


class DurableTopics:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.traffic = SharedTraffic()  # of the native port
        self._by_name: dict[str, Topic] = {}
        self._by_number: dict[int, Topic] = {}
        self._limited: dict[int, Topic] = {}  # by number: topics with retention limits
        self._kept_until_read: set[int] = set()  # numbers of topics with `keep = "read"`
        self._sizes: dict[int, int] = {}
        self._in_flight_bytes: dict[int, int] = {}  # per topic with max_bytes
        self._next_ids: dict[int, int] = {}
        self._lock = Lock()
        # A second lock: it is held during calls of the store, whose thread takes the first.
        self._charging = Lock()
        # Held while retention decides and trims, and while a group is created or moved: a trim must
        # not remove messages of a reader that it did not see.
        self.trim_lock = RLock()
        # Settings of new topics, unless their creator chooses others.
        self.default_settings: Mapping[str, object] = {}
        self._next_run = 0  # of messages without a key
        self.damaged = store.damaged_topics()
        self._damage = {topic.number: reason for topic, reason in self.damaged}
        for topic in store.topics():
            if not self.is_damaged(topic):
                self.register(topic, store.bounds(topic.number).next_id)
        # Registered as well: their names stay theirs, and the records of their readers are kept.
        for topic, _ in self.damaged:
            self.register(topic)
        self.delayed = DelayedMessages(self)

    def register(self, topic: Topic, next_id: int = 0) -> None:
        """Add or replace a topic."""
        self._by_name[topic.name] = topic
        self._by_number[topic.number] = topic
        if RetentionLimits.of(topic):
            self._limited[topic.number] = topic
        else:
            self._limited.pop(topic.number, None)
        if topic.settings.get(KEEP) == KEEP_READ:
            self._kept_until_read.add(topic.number)
        else:
            self._kept_until_read.discard(topic.number)
        self.advance(topic.number, next_id)

    def forget(self, topic: Topic) -> None:
        self._by_name.pop(topic.name, None)
        self._by_number.pop(topic.number, None)
        self._limited.pop(topic.number, None)
        self._kept_until_read.discard(topic.number)
        self._sizes.pop(topic.number, None)
        self._next_ids.pop(topic.number, None)

    def next_id(self, topic: Topic) -> int:
        """Return the next id: all messages with lower ids are visible to readers."""
        return self._next_ids.get(topic.number, 1)

    def find(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def get(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise DoesNotExist(f"there is no durable topic {name!r}")
        return topic

    def check_intact(self, topic: Topic) -> None:
        """Raise `Damaged` if the store refuses the topic.

        For requests that do not read from the store. Reads and commits raise it themselves.
        """
        if self.is_damaged(topic):
            raise Damaged(self._damage[topic.number])

    def is_damaged(self, topic: Topic) -> bool:
        """Return True if the store refuses the topic."""
        return topic.number in self._damage

    def find_by_number(self, number: int) -> Topic | None:
        return self._by_number.get(number)

    @property
    def count(self) -> int:
        return len(self._by_name)

    def topics(self) -> list[Topic]:
        return sorted(self._by_name.copy().values(), key=lambda topic: topic.name)

    @property
    def keeps_any_until_read(self) -> bool:
        """Return True if a topic keeps messages until they are read."""
        return bool(self._kept_until_read)

    def limited_topics(self) -> list[Topic]:
        """Return the topics that have retention limits."""
        return list(self._limited.copy().values())

    def produce(
        self, topic: Topic, block: Block, stamp: Stamp | None = None, *, in_order: bool = False
    ) -> Future[CommitResult]:
        """Submit a batch: all of it becomes visible at once, or none.

        With `in_order`, a batch without keys goes to one shard, so its ids are in order.
        """
        commit = Commit(self.build_appends(topic, block, in_order=in_order), stamp=stamp)
        if not topic.settings.get(MAX_BYTES):
            return self.commit(commit)
        self.add_in_flight(topic, block.size_bytes)
        future = self.commit(commit)
        future.add_done_callback(lambda _: self.add_in_flight(topic, -block.size_bytes))
        return future

    def commit(self, commit: Commit) -> Future[CommitResult]:
        future = self.store.commit(commit)
        future.add_done_callback(self._committed)
        return future

    def publish(self, commit: Commit) -> CommitResult:
        """Commit and return when durable. Stages may have blocks for sealed shards."""
        while True:
            try:
                return self.commit(commit).result()
            except ShardSealed:  # the topic was resharded since a block was staged
                # A repeat of this request may have published the stages: the next commit knows.
                with suppress(StageGone):
                    for stage in commit.stages:
                        while self.store.reroute_stage(stage):
                            pass

    def build_appends(
        self, topic: Topic, block: Block, *, in_order: bool = False
    ) -> tuple[Append, ...]:
        """Split a batch over the open shards.

        Raises `Paused` if the topic takes no messages, `LimitReached` beyond its max_bytes.
        """
        self.check_produce(topic)
        self.reserve_bytes(topic, block.size_bytes)
        return self.route(topic, block, in_order=in_order)

    def route(self, topic: Topic, block: Block, *, in_order: bool = False) -> tuple[Append, ...]:
        """Split a batch over the open shards. Its bytes are reserved already."""
        # The caller may hold the topic from before a reshard.
        shards = self._by_number.get(topic.number, topic).open_shards
        turn = self._next_run
        if len(shards) == 1:
            return (Append(topic.number, shards[0], block),)
        # Two threads may read the same value, which makes the spread a little less even.
        self._next_run = turn + (1 if in_order else count_runs(block))
        if in_order:
            return (Append(topic.number, shards[turn % len(shards)], block),)
        return split_block(topic.number, shards, block, turn)

    def check_produce(self, topic: Topic) -> None:
        """Raise `Paused` if producing to the topic is paused."""
        # The caller may hold the topic from before the pause: it waited for room in a budget.
        if PRODUCE_SIDE in paused_sides(self._by_number.get(topic.number, topic)):
            text = f"topic {topic.name} is paused for producers; retry after it is resumed"
            raise Paused(text)

    def is_consume_paused(self, number: int) -> bool:
        """Return True if consuming the topic is paused, by its current settings."""
        topic = self._by_number.get(number)
        return topic is not None and CONSUME_SIDE in paused_sides(topic)

    def reserve_bytes(self, topic: Topic, size: int) -> None:
        limit = topic.settings.get(MAX_BYTES)
        if not isinstance(limit, int) or limit <= 0:
            return
        with self._charging:
            known = self._sizes.get(topic.number)
            if known is None or known + size > limit:
                # In this order: a commit in between is counted twice rather than not at all.
                known = self._in_flight_bytes.get(topic.number, 0)
                known += sum(shard.size_bytes for shard in self.store.bounds(topic.number).shards)
                known += self.delayed.totals(topic.number).bytes
            fits = known + size <= limit
            if topic.number in self._by_number:
                self._sizes[topic.number] = known + size if fits else known
        if not fits:
            text = f"topic {topic.name} holds {known} bytes, and may hold {limit}"
            raise LimitReached(MAX_BYTES, text)

    def add_in_flight(self, topic: Topic, size: int) -> None:
        """Add to the uncommitted bytes of a topic with max_bytes."""
        with self._lock:
            left = self._in_flight_bytes.get(topic.number, 0) + size
            if left:
                self._in_flight_bytes[topic.number] = left
            else:
                self._in_flight_bytes.pop(topic.number, None)

    def _committed(self, future: Future[CommitResult]) -> None:
        """Handle a finished commit. Runs on the store's thread."""
        if future.cancelled() or future.exception() is not None:
            return
        for span in future.result().spans:
            self.advance(span.topic, span.first_id + span.count)

    def advance(self, number: int, next_id: int) -> None:
        """Raise the next id of a topic.

        A reader calls it because its rows may arrive before the notice of their commit, and a
        dialect that commits without `produce` calls it after each commit.
        """
        with self._lock:
            if number in self._by_number:
                self._next_ids[number] = max(self._next_ids.get(number, 1), next_id)
