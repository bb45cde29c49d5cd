"""Sources of `polybus inspect`: a running bus, or the files of a store.

The files are read without the bus, whether or not it runs. The same code as in the bus
computes groups and counts from the stored records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from polybus.bus.alarms import Alarms
from polybus.bus.dialect_registry import installed_dialects
from polybus.bus.shares import unshared_table
from polybus.durable.query_progress import list_query_progress
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import DoesNotExist
from polybus.groups.coordinator import Coordinator
from polybus.groups.dead_letter_queue import DeadLetterTargets
from polybus.groups.group_state import GroupContext
from polybus.groups.shard_ends import ShardEnds
from polybus.model.arrow import batch_of
from polybus.model.name_pattern import Pattern
from polybus.model.topic import ALL
from polybus.native.inprocess.inprocess_bus import StdlibLog
from polybus.native.port.topic_actions import describe_topic
from polybus.native.port.topic_statistics import compose_topic_stats, list_group_infos

if TYPE_CHECKING:
    from polybus.model.topic import Topic
    from polybus.native import Client
    from polybus.store.contract import Store

INT64_BYTES = 8


class InspectSource(Protocol):
    def topics(self, pattern: str) -> Sequence[Mapping[str, Any]]:
        """Return the topics in the format of `topic.list`."""

    def stats(self, topic: str) -> Mapping[str, Any]:
        """Return counts in the format of `topic.stats`."""

    def messages(self, topic: str, shard: int | str, count: int) -> Iterator[dict[str, Any]]:
        """Return the first `count` messages of a shard or of all, as rows of the read schema."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class BusSource:
    def __init__(self, client: Client) -> None:
        self._client = client

    def topics(self, pattern: str) -> Sequence[Mapping[str, Any]]:
        if "*" not in pattern:
            self._client.topic(pattern)  # a missing topic is an error, not an empty tree
        return self._client.topics(pattern)

    def stats(self, topic: str) -> Mapping[str, Any]:
        return self._client.topic_stats(topic)

    def messages(self, topic: str, shard: int | str, count: int) -> Iterator[dict[str, Any]]:
        if count:
            for batch in self._client.read(topic, shard, max_rows=count):
                yield from batch.to_pylist()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


class StoreSource:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._topics = {topic.name: topic for topic in store.topics()}
        self._durable = DurableTopics(store)
        self._groups = _coordinator(self._durable)

    def topics(self, pattern: str) -> Sequence[Mapping[str, Any]]:
        if "*" not in pattern and pattern not in self._topics:
            raise DoesNotExist(f"there is no durable topic {pattern!r}")
        wanted = Pattern(pattern)
        return [
            describe_topic(topic)
            for topic in self._topics.values()
            if wanted.matches(topic.name.encode())
        ]

    def stats(self, topic: str) -> Mapping[str, Any]:
        known = self._topics[topic]
        bounds = self._store.bounds(known.number)
        return compose_topic_stats(
            known,
            bounds,
            list_group_infos(self._groups, known),
            list_query_progress(self._store, known, bounds),
            installed_dialects().read_subscribers(self._store, known, bounds),
            self._durable.delayed.totals(known.number),
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

    def __exit__(self, *_: object) -> None:
        self._store.close()


def _coordinator(durable: DurableTopics) -> Coordinator:
    """Return a coordinator for queries: it wakes no member and writes no dead letters."""
    alarms = Alarms(time.time_ns, StdlibLog("polybus.cli"))
    context = GroupContext(
        durable,
        ShardEnds(durable.store),
        clock=time.monotonic,
        wall_ns=time.time_ns,
        wake=lambda _topic: None,
        dead_letters=DeadLetterTargets(lambda topic: topic, alarms, time.monotonic),
    )
    return Coordinator(context, unshared_table("max_groups", 0))
