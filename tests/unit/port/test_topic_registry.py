"""Durable topics as the whole bus sees them, on the reference engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.durable.topic_registry import PAUSED, PRODUCE_SIDE, DurableTopics
from polybus.errors import DoesNotExist, LimitReached, Paused
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.testing.conformance.sample_blocks import block


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory:") as opened:
        yield opened


def test_stored_topics_are_registered_at_start(store):
    topic = store.create("t", 1, {})
    DurableTopics(store).produce(topic, block(b"a", b"b")).result(10)
    durable = DurableTopics(store)
    assert durable.get("t") == durable.find("t") == durable.find_by_number(topic.number) == topic
    assert durable.topics() == [topic]
    assert durable.next_id(topic) == 3
    durable.forget(topic)
    assert (durable.find("t"), durable.find_by_number(topic.number), durable.topics()) == (
        None,
        None,
        [],
    )
    with pytest.raises(DoesNotExist):
        durable.get("t")


def test_batches_without_keys_rotate_over_shards(store):
    topic = store.create("t", 3, {})
    durable = DurableTopics(store)
    durable.register(topic)
    spans = [durable.produce(topic, block(b"x", b"y")).result(10).spans for _ in range(6)]
    assert [[(one.shard, one.count) for one in each] for each in spans] == [
        [(0, 2)], [(1, 2)], [(2, 2)], [(0, 2)], [(1, 2)], [(2, 2)],
    ]  # fmt: skip
    assert durable.next_id(topic) == 13


def test_pause_holds_for_a_caller_with_the_topic_from_before_it(store):
    topic = store.create("t", 1, {})
    durable = DurableTopics(store)
    durable.register(store.configure("t", {PAUSED: [PRODUCE_SIDE]}))
    with pytest.raises(Paused):
        durable.produce(topic, block(b"a"))


def test_a_key_stays_in_its_shard_and_a_batch_is_one_commit(store):
    topic = store.create("t", 4, {})
    durable = DurableTopics(store)
    done = durable.produce(topic, block(b"1", b"2", b"3", keys=["a", "b", "a"])).result(10)
    assert sum(one.count for one in done.spans) == 3
    rows = store.read(topic.number, "all", 1)
    assert rows.count == 3
    again = durable.produce(topic, block(b"4", keys=["a"])).result(10)
    assert again.spans[0].shard in {one.shard for one in done.spans}


def test_max_bytes_counts_bytes_in_flight(store, monkeypatch):
    size = block(b"x" * 100).size_bytes
    topic = store.create("t", 1, {"max_bytes": 3 * size})
    durable = DurableTopics(store)
    durable.register(topic)
    for _ in range(3):
        durable.produce(topic, block(b"x" * 100)).result(10)
    with pytest.raises(LimitReached) as caught:
        durable.produce(topic, block(b"x" * 100))
    assert caught.value.limit == "max_bytes"
    store.trim(topic.number, {0: 3})
    monkeypatch.setattr(durable, "_in_flight_bytes", {topic.number: 3 * size})
    with pytest.raises(LimitReached):
        durable.produce(topic, block(b"x" * 100))
    durable._in_flight_bytes.clear()
    durable.produce(topic, block(b"x" * 100)).result(10)  # trimming has made room
    assert durable._in_flight_bytes == {}
