"""Consumers that join and leave cleanly: no message is processed twice.

Handlers fail now and then, and every fifth one commits a transaction. Consumers leave by
`close`. So each message succeeds once, in order per key, and no two runs of a key overlap,
also when its shard moves.
"""

import logging
import random
import threading
import time
from collections import Counter, defaultdict
from functools import partial

import pytest

from polybus import fdq
from tests.rig.observer import until

URL = "memory:coming-and-going"
ROUNDS = 14
KEYS = [None, *(f"k{n}" for n in range(30))]


class Handlers:
    """The recorded runs of all consumers of a test."""

    def __init__(self, topic, chance):
        self.ended = Counter()
        self.order = defaultdict(list)
        self.overlaps = []
        self.runs = 0
        self.may_fail = True
        self._topic = topic
        self._chance = chance
        self._running = set()
        self._lock = threading.Lock()

    def __call__(self, envelope):
        key = envelope.shard, envelope.offset if envelope.shard_key is None else envelope.shard_key
        with self._lock:
            self.runs += 1
            if key in self._running:
                self.overlaps.append(envelope)
            self._running.add(key)
        try:
            self._work(envelope)
        finally:
            with self._lock:
                self._running.discard(key)
        with self._lock:
            self.ended[envelope.shard, envelope.offset] += 1
            self.order[key].append(envelope.offset)

    def has_run(self, runs):
        return self.runs >= runs

    def _work(self, envelope):
        with self._lock:
            chance = self._chance.random()
        if chance < 0.05:
            time.sleep(chance / 10)  # a slow handler
        if self.may_fail and 0.05 < chance < 0.08:
            raise ValueError("by chance")
        if chance > 0.8:
            with envelope.transaction() as tx:
                tx.produce(f"{self._topic}.out", envelope.shard_key, b"%d" % envelope.id)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_message_is_processed_twice(seed, caplog):
    caplog.set_level(logging.CRITICAL, "polybus.fdq")
    chance, topic = random.Random(seed), f"t{seed}"
    handlers, consumers, count = Handlers(topic, random.Random(-seed)), {}, 0

    def start(name):
        consumers[name] = fdq.Consumer(URL, dead_s=120.0)
        consumers[name].consume(
            topic,
            name,
            handlers,
            executors=chance.choice([1, 3]),
            max_deliver=1000,
            first_backoff_s=0.001,
            last_backoff_s=0.02,
        )

    with fdq.Producer(URL) as producer:
        for _ in range(ROUNDS):
            name = f"c{chance.randrange(4)}"
            if name in consumers:
                consumers.pop(name).close()
            else:
                start(name)
            requests = [(chance.choice(KEYS), b"") for _ in range(chance.randrange(1, 300))]
            producer.produce_batch(topic, requests)
            count += len(requests)
            if consumers:
                until(partial(handlers.has_run, count // 2), "half of it")
        handlers.may_fail = False
        start("last")
        until(lambda: fdq.stats(URL, topic)["all"]["acked"] == count, "all is acked")
        for consumer in consumers.values():
            consumer.close()
        assert set(handlers.ended.values()) == {1}, "one was done twice"
        assert len(handlers.ended) == count
        assert not handlers.overlaps
        assert all(offsets == sorted(offsets) for offsets in handlers.order.values())
        stats = fdq.stats(URL, topic)["all"]
        assert (stats["emitted"], stats["redelivered"]) == (handlers.runs, handlers.runs - count)
        outputs = Counter(one.message for one in fdq.replay(URL, f"{topic}.out"))
        assert set(outputs.values()) == {1}
