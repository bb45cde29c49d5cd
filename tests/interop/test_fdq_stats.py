"""`topic.stats` compared with counts of the handlers."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import Any

import pytest

from polybus import fdq
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

KEYS, EACH = 20, 15
BAD, SHAKY = "key-3", "key-7"  # one always fails, one fails the first time
PATIENCE_S = 60


class Handlers:
    """The runs of two consumers of a group, counted by shard."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.emitted: Counter[int] = Counter()
        self.redelivered: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.given_up: Counter[int] = Counter()

    def __call__(self, envelope: fdq.Envelope) -> None:
        with self._lock:
            self.emitted[envelope.shard] += 1
            self.redelivered[envelope.shard] += envelope.delivery > 1
        if envelope.shard_key == BAD or (envelope.shard_key == SHAKY and envelope.delivery == 1):
            if envelope.delivery == 2:
                with self._lock:
                    self.given_up[envelope.shard] += 1
            raise ValueError("not now")
        with self._lock:
            self.done[envelope.shard] += 1


def topic_stats(url: str) -> dict[str, Any]:
    return fdq.stats(url, "t")


@pytest.mark.parametrize("where", ["bus", "memory"])
def test_stats_equal_recounted_messages(where):
    if where == "memory":
        recount("memory:recount")
    else:
        with NativeBus() as bus:
            recount(bus.url)


def recount(url: str) -> None:
    handlers = Handlers()
    with fdq.Producer(url) as producer:
        for round_ in range(EACH):
            batch = [fdq.MessageRequest(f"key-{at}", b"%d" % round_) for at in range(KEYS)]
            producer.produce_batch("t", batch)
        consumers = [fdq.Consumer(url) for _ in range(2)]
        for number, consumer in enumerate(consumers):
            consumer.consume("t", f"c-{number}", handlers, max_deliver=2, first_backoff_s=0.01)
        until(lambda: topic_stats(url)["all"]["acked"] == KEYS * EACH, "all is acked", PATIENCE_S)
        for consumer in consumers:
            consumer.close()
        found = topic_stats(url)
        (group,) = found["groups"]
        letters = list(fdq.replay(url, "t.dlq"))
        check(found, group, handlers)
    assert [one.shard_key for one in letters] == [BAD] * EACH
    assert {one.headers["polybus.topic"] for one in letters} == {b"t"}


def check(found: dict[str, Any], group: dict[str, Any], handlers: Handlers) -> None:
    for shard in found["shards"]:
        number = shard["shard"]
        assert shard["inserted"] == shard["routed"] == shard["acked"]
        assert shard["acked"] == handlers.done[number] + handlers.given_up[number]
        assert shard["emitted"] == handlers.emitted[number]
        assert shard["redelivered"] == handlers.redelivered[number]
        assert shard["dead_lettered"] == handlers.given_up[number]
    assert (group["lag"], group["lag_s"], group["members"]) == (0, 0.0, [])
    assert sum(group["ack_latency"].values()) == sum(handlers.done.values())  # no dead letters
    assert found["all"]["dead_lettered"] == EACH
    assert found["all"]["redelivered"] == 2 * EACH
