"""The state of the writer: leases, cached records, and the batch that gathers changes.

`topic_catalog`, `producer_stamps`, `staged_blocks` and `commit_execution` hold the rules.
Each of their functions checks first and then changes cache and batch together, so that a
function that raises has changed nothing. States of topics and shards change with every
commit and are encoded once per batch.

The cache is ahead of the disk by the batch that gathers and the one in flight. When a
transaction fails, the whole cache is dropped and loaded again from the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from polybus.errors import DoesNotExist
from polybus.model.topic import Topic
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.quarantine import Quarantine
from polybus.store.lmdb.stored_values import StoreCounters
from polybus.store.lmdb.write_batch import WriteBatch


class StageLeases:
    """Expiry times of stages, by the monotonic clock of this process.

    The store holds only the length of each lease. When it is opened, every stage gets a
    fresh lease, so that stages survive the time the bus was down.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[int, float] = {}

    def start(self, stage: int, lease_s: float) -> None:
        self._ends[stage] = self._clock() + lease_s

    def end(self, stage: int) -> float | None:
        """End a lease. Returns the time at which it would have expired, None if there is none."""
        return self._ends.pop(stage, None)

    def restore(self, ended: Mapping[int, float]) -> None:
        """Restore leases that unwritten batches ended."""
        # Newer values win: a lease that was renewed after a batch ended it keeps the renewal.
        self._ends = {**ended, **self._ends}

    def is_active(self, stage: int) -> bool:
        # At its expiry time a lease has expired, as in `expired`.
        end = self._ends.get(stage)
        return end is not None and self._clock() < end

    def expired(self) -> list[int]:
        now = self._clock()
        return [stage for stage, end in list(self._ends.items()) if end <= now]

    def next_expiry_s(self) -> float | None:
        """Return the seconds until the next lease expires, 0 if one has, None without leases."""
        ends = list(self._ends.values())
        return max(0.0, min(ends) - self._clock()) if ends else None


MAX_CACHED: Final = 20_000  # entries per table; all tables together take some ten megabytes


@dataclass(slots=True)
class CachedShard:
    start: int
    end: int
    added: int  # bytes appended since it was created


@dataclass(slots=True)
class CachedTopic:
    topic: Topic
    next_id: int
    time_ns: int
    open: range
    shards: dict[int, CachedShard] = field(default_factory=dict)


@dataclass(slots=True)
class CachedProducer:
    number: int
    epoch: int
    counter: int
    dense: bool
    kept: int
    slots: int = 0  # slots ever used; the next result goes to slot `slots % kept`
    results: dict[int, bytes] = field(default_factory=dict)  # encoded, by slot


@dataclass(slots=True)
class CachedStage:
    lease_s: float
    holds: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


def scan_prefix(transaction: Transaction, prefix: bytes) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield keys and values with this prefix, in order. The views are valid for one step."""
    with transaction.cursor() as cursor:
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key()[: len(prefix)]) == prefix:
            yield cursor.item()
            found = cursor.next()


OpenSnapshot = Callable[[], AbstractContextManager[Transaction]]


class StateCache:
    """Records of the store that the writer has loaded or changed, including unwritten changes."""

    def __init__(self, open_snapshot: OpenSnapshot, quarantine: Quarantine) -> None:
        self._open_snapshot = open_snapshot
        self._quarantine = quarantine
        self._counters: StoreCounters | None = None
        self.topics: dict[int, CachedTopic | None] = {}  # None: dropped, even if not yet written
        self.producers: dict[str, CachedProducer | None] = {}
        self.versions: dict[bytes, int] = {}
        self.stages: dict[int, CachedStage | None] = {}
        self.names: dict[bytes, stored_values.NameRecord | None] = {}
        self.tables: tuple[dict[Any, Any], ...] = (
            self.topics,
            self.producers,
            self.versions,
            self.stages,
            self.names,
        )

    @property
    def is_large(self) -> bool:
        return any(len(table) > MAX_CACHED for table in self.tables)

    @property
    def counters(self) -> StoreCounters:
        if self._counters is None:
            raw = self._get(store_keys.COUNTERS)
            self._counters = StoreCounters.decode(raw) if raw else StoreCounters()
        return self._counters

    def name(self, raw: bytes) -> stored_values.NameRecord | None:
        if raw not in self.names:
            self._quarantine.check_name(raw)
            found = self._get(store_keys.name(raw))
            self.names[raw] = stored_values.read_name(found) if found else None
        return self.names[raw]

    def topic(self, number: int) -> CachedTopic:
        found = self.topics.get(number)
        if found is not None:
            return found
        # None in the table means dropped; absent means not loaded.
        if number in self.topics:
            raise DoesNotExist(f"topic number {number} was dropped")
        self._quarantine.check(number)
        with self._open_snapshot() as transaction:
            raw = transaction.get(store_keys.topic(number))
            state = transaction.get(store_keys.state(number))
            if raw is None or state is None:
                raise DoesNotExist(f"there is no topic number {number}")
            topic, _ = stored_values.read_topic(raw)
            next_id, time_ns = stored_values.TOPIC_STATE.unpack(state)
        found = self.topics[number] = CachedTopic(topic, next_id, time_ns, topic.open_shards)
        return found

    def shard(self, state: CachedTopic, number: int) -> CachedShard:
        found = state.shards.get(number)
        if found is None:
            raw = self._get(store_keys.shard_state(state.topic.number, number))
            found = (
                CachedShard(*stored_values.SHARD_STATE.unpack(raw)) if raw else CachedShard(0, 0, 0)
            )
            state.shards[number] = found
        return found

    def producer(self, name: str) -> CachedProducer | None:
        found = self.producers.get(name)
        # None in the table means that there is no such producer, so it is not looked up again.
        if found is None and name not in self.producers:
            found = self.producers[name] = self._load_producer(name.encode())
        return found

    def version(self, key: bytes) -> int:
        """Return the version of a record, 0 if it does not exist."""
        found = self.versions.get(key)
        if found is None:
            raw = self._get(store_keys.record(key))
            found = self.versions[key] = stored_values.read_number(raw) if raw else 0
        return found

    def stage(self, number: int) -> CachedStage | None:
        if number not in self.stages:
            stage = None
            key = store_keys.stage(number)
            with self._open_snapshot() as transaction:
                found = transaction.get(key)
                if found is not None:
                    stage = CachedStage(*stored_values.STAGE.unpack(found))
                    for held, value in scan_prefix(transaction, key):
                        # The prefix also matches the record of the stage itself.
                        if len(held) > len(key):
                            target = store_keys.target_of_stage(held)
                            stage.holds[target] = stored_values.STAGE_SHARD.unpack(value)
            self.stages[number] = stage
        return self.stages[number]

    def _get(self, key: bytes) -> bytes | None:
        with self._open_snapshot() as transaction:
            found = transaction.get(key)
            return None if found is None else bytes(found)

    def _load_producer(self, raw: bytes) -> CachedProducer | None:
        with self._open_snapshot() as transaction:
            found = transaction.get(store_keys.producer(raw))
            if found is None:
                return None
            number, epoch, counter, dense, kept = stored_values.read_producer(found)
            producer = CachedProducer(number, epoch, counter, dense, kept)
            found = [transaction.get(store_keys.result(number, slot)) for slot in range(kept)]
            # The newest result is not marked in the store: it is the one with the highest counter.
            listed = [
                (stored_values.counter_of(value), slot, bytes(value))
                for slot, value in enumerate(found)
                if value is not None
            ]
        for counter, slot, result in sorted(listed):
            producer.results[slot] = result
            producer.counter = max(producer.counter, counter)
            producer.slots = slot + 1  # after the newest
        if len(listed) > producer.slots:  # the ring has wrapped: all of its slots are used
            producer.slots += kept
        return producer


class WriterState:
    """State that the tasks of the writer read and change."""

    def __init__(
        self, open_snapshot: OpenSnapshot, clock_s: Callable[[], float], quarantine: Quarantine
    ) -> None:
        self._open_snapshot = open_snapshot
        self._quarantine = quarantine
        self.leases = StageLeases(clock_s)
        self.cache = StateCache(open_snapshot, quarantine)
        self.batch = WriteBatch()
        # Changed since the last batch was taken. Their records are encoded once per batch.
        self._topics: dict[int, CachedTopic] = {}
        self._shards: dict[tuple[int, int], CachedShard] = {}
        self._counted = False
        self._leases_in_flight: dict[int, float] = {}  # ended by the batch in flight

    def next_number(self, kind: str) -> int:
        """Return the next number of a kind. A stored number is never reused."""
        # The counters are written with the batch, so the numbers of a batch that was rolled back
        # are used again.
        counters = self.cache.counters
        number: int = getattr(counters, kind)
        setattr(counters, kind, number + 1)
        self._counted = True
        return number

    def mark_append(
        self, target: tuple[int, int], state: CachedTopic, shard: CachedShard, time_ns: int
    ) -> None:
        """Note a new end of a shard, and the time of the append."""
        state.time_ns = time_ns
        # Marked once per batch and shard; later commits of the batch change the marked state in
        # place.
        if target not in self.batch.ends:
            self.batch.topics.add(target[0])
            self._topics[target[0]] = state
            self._shards[target] = shard
        self.batch.ends[target] = shard.end

    def mark_topic(self, state: CachedTopic) -> None:
        self._topics[state.topic.number] = state
        self.batch.topics.add(state.topic.number)

    def mark_shard(self, topic: int, number: int, shard: CachedShard) -> None:
        self._shards[topic, number] = shard
        self.batch.topics.add(topic)

    def forget_topic(self, number: int) -> None:
        """Drop a topic from cache and batch: its state must not be written again."""
        self.batch.topics.add(number)
        self.cache.topics[number] = None  # the disk may still have it, so it must not be loaded
        self._topics.pop(number, None)
        # A list, because the dict changes in the loop.
        for target in [target for target in self._shards if target[0] == number]:
            del self._shards[target]

    def take_batch(self) -> WriteBatch:
        """Complete and return the batch. The next changes go to a new one."""
        batch = self.batch
        # The batch deletes none of these keys, so they need no check of `deletes`.
        for number, state in self._topics.items():
            raw = stored_values.TOPIC_STATE.pack(state.next_id, state.time_ns)
            batch.puts[store_keys.state(number)] = raw
        for target, shard in self._shards.items():
            raw = stored_values.SHARD_STATE.pack(shard.start, shard.end, shard.added)
            batch.puts[store_keys.shard_state(*target)] = raw
        if self._counted:
            batch.puts[store_keys.COUNTERS] = self.cache.counters.encode()
        self.batch = WriteBatch()
        self._topics, self._shards, self._counted = {}, {}, False
        # Leases that this batch ended must come back if it fails.
        self._leases_in_flight = batch.ended_leases
        return batch

    def confirm(self) -> None:
        """Note that the batch in flight is on disk."""
        self._leases_in_flight = {}
        # While a batch gathers, it depends on the cache. Without one, large tables may be emptied.
        if not self.batch:
            for table in self.cache.tables:
                if len(table) > MAX_CACHED:
                    table.clear()

    def rollback(self) -> None:
        """Drop all unwritten changes, and the cache, which depends on them."""
        self.leases.restore(self._leases_in_flight | self.batch.ended_leases)
        self._leases_in_flight = {}
        self.batch = WriteBatch()
        self.cache = StateCache(self._open_snapshot, self._quarantine)
        self._topics, self._shards, self._counted = {}, {}, False
