"""What `polybus inspect` looks at: a running bus, or the files of a store.

The files are read without the bus, beside it or after it has gone: what groups and counts
are is computed from the records by the same code as in the bus.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from polybus.dialects.pirate.server.subscriber_lags import read_subscriber_lags
from polybus.durable.query_progress import list_query_progress
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import DoesNotExist
from polybus.groups.coordinator import Coordinator
from polybus.groups.group_state import GroupContext
from polybus.groups.shard_ends import ShardEnds
from polybus.model.arrow import batch_of
from polybus.model.name_pattern import Pattern
from polybus.model.topic import ALL
from polybus.native.port.topic_actions import describe_topic
from polybus.native.port.topic_statistics import compose_topic_stats, list_group_infos

if TYPE_CHECKING:
    from polybus.model.topic import Topic
    from polybus.native import Client
    from polybus.store.contract import Store

INT64_BYTES = 8


class InspectSource(Protocol):
    def topics(self, pattern: str) -> list[dict[str, Any]]:
        """As `topic.list` tells them."""

    def stats(self, topic: str) -> dict[str, Any]:
        """As `topic.stats` tells them."""

    def messages(self, topic: str, shard: int | str, count: int) -> Iterator[dict[str, Any]]:
        """The first so many that are there, of a shard or of all, by the columns of a read."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class BusSource:
    def __init__(self, client: Client) -> None:
        self._client = client

    def topics(self, pattern: str) -> list[dict[str, Any]]:
        if "*" not in pattern:
            self._client.topic(pattern)  # that it is not there is an error, not an empty tree
        return self._client.topics(pattern)

    def stats(self, topic: str) -> dict[str, Any]:
        return self._client.topic_stats(topic)

    def messages(self, topic: str, shard: int | str, count: int) -> Iterator[dict[str, Any]]:
        if count:
            for batch in self._client.read(topic, shard, max_rows=count):
                yield from batch.to_pylist()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()


class StoreSource:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._topics = {topic.name: topic for topic in store.topics()}
        self._groups = _coordinator(store)

    def topics(self, pattern: str) -> list[dict[str, Any]]:
        if "*" not in pattern and pattern not in self._topics:
            raise DoesNotExist(f"there is no durable topic {pattern!r}")
        wanted = Pattern(pattern)
        return [
            describe_topic(one)
            for one in self._topics.values()
            if wanted.matches(one.name.encode())
        ]

    def stats(self, topic: str) -> dict[str, Any]:
        known = self._topics[topic]
        bounds = self._store.bounds(known.number)
        return compose_topic_stats(
            known,
            bounds,
            list_group_infos(self._groups, known),
            list_query_progress(self._store, known, bounds),
            read_subscriber_lags(self._store, known, bounds),
        )

    def messages(self, topic: str, shard: int | str, count: int) -> Iterator[dict[str, Any]]:
        known, left = self._topics[topic], count
        at = self._start(known, shard)
        while left > 0:
            rows = self._store.read(known.number, shard, at, max_rows=left)  # type: ignore[arg-type]
            if not rows.count:
                return
            last = rows.ids if shard == ALL else rows.offsets
            at = int.from_bytes(last[-INT64_BYTES:], "little") + 1
            left -= rows.count
            yield from batch_of(rows).to_pylist()

    def _start(self, topic: Topic, shard: int | str) -> int:
        bounds = self._store.bounds(topic.number)
        return bounds.first_id if shard == ALL else bounds.shards[int(shard)].start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._store.close()


def _coordinator(store: Store) -> Coordinator:
    """One that is only asked: it wakes nobody and gives up nothing."""
    means = GroupContext(
        DurableTopics(store),
        ShardEnds(store),
        clock=time.monotonic,
        wall_ns=time.time_ns,
        wake=lambda _topic: None,
        dead_letters=lambda topic: topic,
    )
    return Coordinator(means)
