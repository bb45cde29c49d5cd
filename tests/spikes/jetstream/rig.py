"""Short verbs for the spike's tests, with plain values as results."""

from __future__ import annotations

import time
from collections.abc import Callable

from polybus.model.commit import Append, Commit, CommitResult
from polybus.model.rows import Rows
from polybus.model.topic import ALL, Topic
from polybus.testing.conformance.sample_blocks import block, messages
from tests.spikes.jetstream.engine import JetStreamSpike

TIMEOUT_S = 20.0
POLL_S = 0.01


def append(topic: Topic, shard: int, *bodies: bytes) -> Append:
    return Append(topic.number, shard, block(*bodies))


def put(store: JetStreamSpike, *appends: Append) -> CommitResult:
    return store.commit(Commit(appends)).result(TIMEOUT_S)


def bodies(rows: Rows) -> list[bytes]:
    return [message.body for message in messages(rows)]


def assert_dense(store: JetStreamSpike, topic: Topic) -> None:
    """Check that ids and offsets have no gap or overlap, and that time does not go back."""
    bounds, found = store.bounds(topic.number), messages(store.read(topic.number, ALL, 0))
    assert [message.id for message in found] == list(range(1, bounds.next_id))
    times = [message.timestamp_ns for message in found]
    assert times == sorted(times)
    for shard, (start, end, _) in enumerate(bounds.shards):
        offsets = [message.offset for message in messages(store.read(topic.number, shard, start))]
        assert offsets == list(range(start, end))


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(POLL_S)
