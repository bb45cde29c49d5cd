"""The open books of the writer: what it knows, and the batch that its next changes go to.

`catalog`, `stamps`, `staging` and `commits` are the rules; each of their functions
checks first and then changes both, so that one that raised has changed nothing.
States of topics and shards change with each commit, and are encoded once a batch.
"""

from __future__ import annotations

from collections.abc import Callable

from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.stage_leases import Leases
from polybus.store.lmdb.state_cache import Known, Reading, Shard, TopicState
from polybus.store.lmdb.write_batch import Batch

Clock = Callable[[], float]


class Books:
    def __init__(self, reading: Reading, clock_s: Clock) -> None:
        self._reading = reading
        self.leases = Leases(clock_s)
        self.known = Known(reading)
        self.batch = Batch()
        self._topics: dict[int, TopicState] = {}
        self._shards: dict[tuple[int, int], Shard] = {}
        self._counted = False

    def number(self, kind: str) -> int:
        """The next number of a kind, which is never given again."""
        counters = self.known.counters
        number: int = getattr(counters, kind)
        setattr(counters, kind, number + 1)
        self._counted = True
        return number

    def touch(self, state: TopicState) -> None:
        self._topics[state.topic.number] = state
        self.batch.topics.add(state.topic.number)

    def touch_shard(self, topic: int, number: int, shard: Shard) -> None:
        self._shards[topic, number] = shard
        self.batch.topics.add(topic)

    def forget_topic(self, number: int) -> None:
        """A dropped topic's state must not be written again."""
        self.batch.topics.add(number)
        self.known.topics[number] = None  # the disk may still have it
        self._topics.pop(number, None)
        for target in [target for target in self._shards if target[0] == number]:
            del self._shards[target]

    def turn_page(self) -> Batch:
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
            batch.put(store_keys.COUNTERS, self.known.counters.encode())
        self.batch = Batch()
        self.leases.leave()
        self._clear()
        return batch

    def burn(self) -> None:
        """What was not written is forgotten, with all that was built on it."""
        self.batch = Batch()
        self.known = Known(self._reading)
        self.leases.undo()
        self._clear()

    def _clear(self) -> None:
        self._topics, self._shards, self._counted = {}, {}, False
