"""Durable topics as the whole bus sees them: by name, and written to by batches.

Everything here may be called from any thread: the loop's sessions and the native
port's threads share it. Only `known` and `forget`, which change what a name is,
are the loop's (see `binding.py`).

Where a topic's ids have got to is known here, from what was committed, so that
the loop never has to ask the store for it.

A batch is cut over the topic's open shards by the hash of its keys; what has no
key goes to one shard a batch, round robin. A topic with `max_bytes` refuses what
would take it over that, what is on its way to the disk included; its size is
counted up here and read from the store only when it seems to be reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

from polybus.bus.traffic import SharedTraffic
from polybus.errors import DoesNotExist, LimitReached
from polybus.model.commit import Append, Commit

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.commit import CommitResult
    from polybus.model.stamp import Stamp
    from polybus.model.topic import Topic
    from polybus.store.contract import Store

MAX_BYTES = "max_bytes"  # a topic's setting; absent or 0: as much as the disk holds
# A topic's setting: what it keeps. `read`: a message goes once everyone has read it.
KEEP, KEEP_ALL, KEEP_READ = "keep", "all", "read"
# A topic's setting: it was made by its first subscriber, and goes with its last.
WITH_SUBSCRIBERS = "with_subscribers"


class DurableTopics:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.traffic = SharedTraffic()  # of the native port
        self._by_name: dict[str, Topic] = {}
        self._by_number: dict[int, Topic] = {}
        self._sizes: dict[int, int] = {}
        self._in_flight_bytes: dict[int, int] = {}  # bytes, of topics with max_bytes
        self._next_ids: dict[int, int] = {}
        self._lock = Lock()
        # Another one, since the store is asked under it, and its thread takes the first.
        self._charging = Lock()
        self._next_shard = count()
        for topic in store.topics():
            self.register(topic, store.bounds(topic.number).next_id)

    def register(self, topic: Topic, next_id: int = 0) -> None:
        """The topic is there, or is now as given."""
        self._by_name[topic.name] = topic
        self._by_number[topic.number] = topic
        self._advance(topic.number, next_id)

    def forget(self, topic: Topic) -> None:
        self._by_name.pop(topic.name, None)
        self._by_number.pop(topic.number, None)
        self._sizes.pop(topic.number, None)
        self._next_ids.pop(topic.number, None)

    def next_id(self, topic: Topic) -> int:
        """All messages with lower ids are there for readers."""
        return self._next_ids.get(topic.number, 1)

    def advance(self, topic: Topic, next_id: int) -> None:
        """Somebody has read messages up to there: news of their commit may still be on its way."""
        self._advance(topic.number, next_id)

    def find(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def get(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise DoesNotExist(f"there is no durable topic {name!r}")
        return topic

    def find_by_number(self, number: int) -> Topic | None:
        return self._by_number.get(number)

    @property
    def count(self) -> int:
        return len(self._by_name)

    def topics(self) -> list[Topic]:
        return sorted(self._by_name.copy().values(), key=lambda topic: topic.name)

    def produce(
        self, topic: Topic, block: Block, stamp: Stamp | None = None
    ) -> Future[CommitResult]:
        """Hands a batch to the store: all of it becomes visible at once, or none."""
        commit = Commit(appends=self.build_appends(topic, block), stamp=stamp)
        if not topic.settings.get(MAX_BYTES):
            return self.commit(commit)
        self._add_in_flight(topic.number, block.size_bytes)
        future = self.commit(commit)
        future.add_done_callback(lambda _: self._add_in_flight(topic.number, -block.size_bytes))
        return future

    def commit(self, commit: Commit) -> Future[CommitResult]:
        future = self.store.commit(commit)
        future.add_done_callback(self._committed)
        return future

    def build_appends(self, topic: Topic, block: Block) -> tuple[Append, ...]:
        """The batch cut over the topic's open shards. `LimitReached` if it is too much."""
        self.reserve_bytes(topic, block.size_bytes)
        shards = topic.open_shards
        parts: Iterable[tuple[int, Block]] = ((0, block),)
        if len(shards) > 1:
            parts = block.split(len(shards), next(self._next_shard) % len(shards))
        return tuple(Append(topic.number, shards[index], part) for index, part in parts)

    def reserve_bytes(self, topic: Topic, size: int) -> None:
        limit = topic.settings.get(MAX_BYTES)
        if not isinstance(limit, int) or limit <= 0:
            return
        with self._charging:
            known = self._sizes.get(topic.number)
            if known is None or known + size > limit:
                # In this order: what arrives in between counts twice rather than never.
                known = self._in_flight_bytes.get(topic.number, 0) + self._stored_bytes(
                    topic.number
                )
            fits = known + size <= limit
            if topic.number in self._by_number:
                self._sizes[topic.number] = known + size if fits else known
        if not fits:
            text = f"topic {topic.name} holds {known} bytes, and may hold {limit}"
            raise LimitReached(MAX_BYTES, text)

    def _stored_bytes(self, number: int) -> int:
        return sum(shard.size_bytes for shard in self.store.bounds(number).shards)

    def add_in_flight(self, topic: Topic, size: int) -> None:
        """So much is on its way to the disk, or (negative) no longer; of topics with a bound."""
        self._add_in_flight(topic.number, size)

    def _add_in_flight(self, number: int, size: int) -> None:
        with self._lock:
            left = self._in_flight_bytes.get(number, 0) + size
            if left:
                self._in_flight_bytes[number] = left
            else:
                self._in_flight_bytes.pop(number, None)

    def _committed(self, future: Future[CommitResult]) -> None:
        """On the store's thread."""
        if future.cancelled() or future.exception() is not None:
            return
        for span in future.result().spans:
            self._advance(span.topic, span.first_id + span.count)

    def advance_all(self, next_ids: Mapping[int, int]) -> None:
        """What was committed is there for readers; for who commits by the store itself."""
        for number, next_id in next_ids.items():
            self._advance(number, next_id)

    def _advance(self, number: int, next_id: int) -> None:
        with self._lock:
            if number in self._by_number:
                self._next_ids[number] = max(self._next_ids.get(number, 1), next_id)
