"""`topic.stats` combines the counts of the store, of groups and of queries."""

from __future__ import annotations

from typing import Any

from polybus.durable.delayed_messages import DelayedTotals
from polybus.model.topic import Bounds, ShardBounds, Topic
from polybus.native.port.topic_statistics import COUNTS, compose_topic_stats

TOPIC = Topic("orders", 1, (2,))
BOUNDS = Bounds(3, 18, 5, (ShardBounds(2, 10, 400), ShardBounds(0, 7, 300)))


def shard(number: int, **counts: Any) -> dict[str, Any]:
    none = dict.fromkeys(
        ("emitted", "acked", "redelivered", "dead_lettered", "expired", "lag", "trimmed_unread"), 0
    )
    return {"shard": number, "lag_s": 0.0, **none, **counts}


def group(name: str, *shards: dict[str, Any]) -> dict[str, Any]:
    return {"group": name, "members": [], "shards": list(shards), "ack_latency": {}}


def test_topic_without_readers():
    found = compose_topic_stats(TOPIC, BOUNDS, (), ())
    none = {"emitted": 0, "acked": 0, "redelivered": 0, "dead_lettered": 0, "expired": 0}
    assert found["topic"] == "orders"
    assert found["all"] == {"inserted": 17, "routed": 17, "trimmed": 2, "bytes": 700, **none}
    assert found["shards"][0] == {
        "shard": 0, "inserted": 10, "routed": 10, "trimmed": 2, "bytes": 400, **none,
    }  # fmt: skip
    assert found["groups"] == found["queries"] == []
    assert found["delayed"] == {"messages": 0, "bytes": 0, "next_due_ns": None}


def test_delayed_messages_are_shown():
    found = compose_topic_stats(TOPIC, BOUNDS, (), (), (), DelayedTotals(3, 400, 17))
    assert found["delayed"] == {"messages": 3, "bytes": 400, "next_due_ns": 17}


def test_counts_of_groups_are_summed_by_shard_and_for_the_topic():
    first = group("a", shard(0, acked=8, emitted=9, redelivered=1), shard(1, acked=5, emitted=5))
    second = group("b", shard(1, acked=2, emitted=4, redelivered=2, dead_lettered=1, expired=1))
    found = compose_topic_stats(TOPIC, BOUNDS, [first, second], ())
    assert [one["acked"] for one in found["shards"]] == [8, 7]
    assert [one["emitted"] for one in found["shards"]] == [9, 9]
    whole = {key: found["all"][key] for key in COUNTS[4:]}
    assert whole == {"emitted": 18, "acked": 15, "redelivered": 3, "dead_lettered": 1, "expired": 1}


def test_group_lag_is_a_sum_and_delay_that_of_its_slowest_shard():
    late = group("a", shard(0, lag=3, lag_s=0.5), shard(1, lag=4, lag_s=2.5, trimmed_unread=7))
    (found,) = compose_topic_stats(TOPIC, BOUNDS, [late], ())["groups"]
    assert (found["lag"], found["lag_s"], found["trimmed_unread"]) == (7, 2.5, 7)
    (idle,) = compose_topic_stats(TOPIC, BOUNDS, [group("b")], ())["groups"]
    assert (idle["lag"], idle["lag_s"], idle["acked"]) == (0, 0.0, 0)


def test_queries_are_passed_through():
    query = {"query": "q", "name": "n", "offsets": {"0": 3}, "lag": 14}
    assert compose_topic_stats(TOPIC, BOUNDS, (), [query])["queries"] == [query]
