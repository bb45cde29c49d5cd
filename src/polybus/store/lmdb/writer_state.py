"""The open books of the writer: what it knows, and the batch that its next changes go to.

`catalog`, `stamps`, `staging` and `commits` are the rules; each of their functions
checks first and then changes both, so that one that raised has changed nothing.
States of topics and shards change with each commit, and are encoded once a batch.
"""

from __future__ import annotations

from collections.abc import Callable

from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.stage_leases import StageLeases
from polybus.store.lmdb.state_cache import OpenSnapshot, ShardState, StateCache, TopicState
from polybus.store.lmdb.write_batch import WriteBatch

Clock = Callable[[], float]


class WriterState:
    def __init__(self, reading: OpenSnapshot, clock_s: Clock) -> None:
        self._reading = reading
        self.leases = StageLeases(clock_s)
        self.cache = StateCache(reading)
        self.batch = WriteBatch()
        self._topics: dict[int, TopicState] = {}
        self._shards: dict[tuple[int, int], ShardState] = {}
        self._counted = False

    def next_number(self, kind: str) -> int:
        """The next number of a kind, which is never given again."""
        counters = self.cache.counters
        number: int = getattr(counters, kind)
        setattr(counters, kind, number + 1)
        self._counted = True
        return number

    def mark_topic(self, state: TopicState) -> None:
        self._topics[state.topic.number] = state
        self.batch.topics.add(state.topic.number)

    def mark_shard(self, topic: int, number: int, shard: ShardState) -> None:
        self._shards[topic, number] = shard
        self.batch.topics.add(topic)

    def forget_topic(self, number: int) -> None:
        """A dropped topic's state must not be written again."""
        self.batch.topics.add(number)
        self.cache.topics[number] = None  # the disk may still have it
        self._topics.pop(number, None)
        for target in [target for target in self._shards if target[0] == number]:
            del self._shards[target]

    def take_batch(self) -> WriteBatch:
        """The batch as it stands, complete; the next changes go to a new one."""
        batch = self.batch
        for number, state in self._topics.items():
            batch.put(
                store_keys.state(number),
                stored_values.TOPIC_STATE.pack(state.next_id, state.time_ns),
            )
        for target, shard in self._shards.items():
            raw = stored_values.SHARD_STATE.pack(shard.start, shard.end, shard.added)
            batch.put(store_keys.shard_state(*target), raw)
        if self._counted:
            batch.put(store_keys.COUNTERS, self.cache.counters.encode())
        self.batch = WriteBatch()
        self.leases.mark_in_flight()
        self._clear()
        return batch

    def rollback(self) -> None:
        """What was not written is forgotten, with all that was built on it."""
        self.batch = WriteBatch()
        self.cache = StateCache(self._reading)
        self.leases.rollback()
        self._clear()

    def _clear(self) -> None:
        self._topics, self._shards, self._counted = {}, {}, False
