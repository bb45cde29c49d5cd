"""Reads of a whole topic into Arrow, from the first message to the last.

Both topics hold the same messages: one written in blocks of 1000, one written a message at a time
by 16 producers and then re-blocked. What is read is checked once, before anything is measured.
"""

import time

from bench.harness.load import LoadFailed
from bench.harness.results import RATE, Metric, Values
from bench.harness.rounds import TRIAL_S
from bench.store.contract import SIZE
from bench.store.producers import Batch, Crowd
from polybus.model import arrow
from polybus.model.topic import Topic
from polybus.store.contract import Store

BYTES = Metric("bytes_per_message", "B a message", higher_is_better=False)
BLOCK_MESSAGES = 1000
PRODUCERS = 16


class Reader:
    """Reads one topic repeatedly."""

    pid = None

    def __init__(self, name: str, store: Store, topic: Topic) -> None:
        self.name = name
        self._store, self._topic = store, topic.number
        (shard,) = store.bounds(self._topic).shards
        self._end = shard.end
        self._bytes = shard.size_bytes
        self._passes = 1

    def _pass(self) -> int:
        at = rows = 0
        while at < self._end:
            batch = arrow.batch_of(self._store.read(self._topic, 0, at))
            at += batch.num_rows
            rows += batch.num_rows
        return rows

    def _run(self) -> float:
        started_s = time.perf_counter()
        for _ in range(self._passes):
            if self._pass() != self._end:
                raise LoadFailed(f"{self.name}: not all {self._end} messages were read")
        return time.perf_counter() - started_s

    def calibrate(self, wanted_s: float) -> None:
        self._check()
        while (took_s := self._run()) < TRIAL_S:
            self._passes *= 2
        self._passes = max(1, round(self._passes * wanted_s / took_s))

    def measure(self) -> Values:
        rate = self._end * self._passes / self._run()
        return {RATE.key: rate, BYTES.key: self._bytes / self._end}

    def _check(self) -> None:
        """Check that every message is read, in order and complete."""
        at = 0
        while at < self._end:
            rows = self._store.read(self._topic, 0, at)
            offsets = memoryview(rows.offsets).cast("q")
            wanted = range(at, at + rows.count)
            if list(offsets) != list(wanted) or rows.size_bytes != rows.count * SIZE:
                raise LoadFailed(f"{self.name}: wrong messages from {at} on")
            at += rows.count


def written_in_blocks(store: Store, name: str, messages: int) -> Topic:
    """Commit one after the other, so that no two share a transaction."""
    topic = store.create(name, 1, {})
    Crowd(store, topic, 1, Batch(BLOCK_MESSAGES)).run(messages // BLOCK_MESSAGES)
    return topic


def written_one_by_one(store: Store, name: str, messages: int) -> Topic:
    topic = store.create(name, 1, {})
    Crowd(store, topic, PRODUCERS, Batch(1)).run(messages // PRODUCERS)
    return topic
