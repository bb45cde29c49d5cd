"""Producers of our own store, in this process: each waits for its answer before it goes on.

One thread plays them all, as the event loop of a bus does, and as the load generator does for the
other servers. Whatever belongs to a commit is inside the measured time: making the block out of
columns, with its checksum, and a stamp for each commit.
"""

import threading
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Self

from bench.harness.load import LoadFailed
from bench.store.contract import bodies
from polybus.model.block import Block
from polybus.model.commit import Append, Commit, CommitResult
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.model.topic import Topic
from polybus.store.contract import ShardEnd, Store

STALL_S = 30.0


class Batch:
    """Return messages as columns, as a dialect passes them."""

    def __init__(self, messages: int) -> None:
        parts = bodies(messages)
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + len(part))
        self.messages = messages
        self._bodies = b"".join(parts)
        self._offsets = array("i", ends)

    def block(self, now_ms: int) -> Block:
        return Block.from_columns(self._bodies, self._offsets, insertion_ms=now_ms)


class Groups:
    """Counts the messages that became visible together: the groups of the engine."""

    def __init__(self, store: Store, topic: int) -> None:
        bounds = enumerate(store.bounds(topic).shards)
        self._topic = topic
        self._ends = {shard: one.end for shard, one in bounds}
        self.sizes: list[int] = []
        self._stop = store.watch(self._take)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop()

    def _take(self, news: Sequence[ShardEnd]) -> None:
        added = 0
        for _topic, shard, end in (one for one in news if one.topic == self._topic):
            added += end - self._ends[shard]
            self._ends[shard] = end
        self.sizes.append(added)


class Producer:
    """One producer: its stamps, and the queue of its results."""

    def __init__(self, name: str, store: Store, topic: Topic, shard: int, batch: Batch) -> None:
        self._store, self._topic, self._shard, self._batch = store, topic.number, shard, batch
        self._name = name
        self._epoch, self._counter = store.open_producer(name, ProducerOptions())

    def commit(self) -> Future[CommitResult]:
        self._counter += 1
        block = self._batch.block(time.time_ns() // 1_000_000)
        stamp = Stamp(self._name, self._epoch, self._counter)
        return self._store.commit(
            Commit(appends=(Append(self._topic, self._shard, block),), stamp=stamp)
        )


class Answers:
    """Results from the engine's thread to ours, with one wake-up for all that are queued."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, Future[CommitResult]]] = []
        self._some = threading.Event()

    def put(self, who: int, future: Future[CommitResult]) -> None:
        self._ready.append((who, future))
        if len(self._ready) == 1:
            self._some.set()

    def take(self) -> list[tuple[int, Future[CommitResult]]]:
        if not self._some.wait(STALL_S):
            raise LoadFailed(f"no answer for {STALL_S:g} s")
        self._some.clear()
        ready, self._ready = self._ready, []
        return ready


class Crowd:
    """All producers of one case; `run` lets each commit a number of times."""

    def __init__(self, store: Store, topic: Topic, producers: int, batch: Batch) -> None:
        shards = topic.open_shards
        self._producers = [
            Producer(f"{topic.name}-{at}", store, topic, shards[at % len(shards)], batch)
            for at in range(producers)
        ]
        self.messages_per_turn = producers * batch.messages

    def run(self, turns: int) -> float:
        """Return the seconds from the first commit to the last result."""
        answers = Answers()
        left = [turns] * len(self._producers)
        started_s = time.perf_counter()
        for who in range(len(left)):
            self._commit(who, answers)
        missing = turns * len(left)
        while missing:
            for who, future in answers.take():
                future.result()
                missing -= 1
                left[who] -= 1
                if left[who]:
                    self._commit(who, answers)
        return time.perf_counter() - started_s

    def _commit(self, who: int, answers: Answers) -> None:
        self._producers[who].commit().add_done_callback(partial(answers.put, who))
