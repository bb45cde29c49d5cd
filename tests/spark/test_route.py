"""`polybus pipeline route`: copies, SQL, errors, and continuing from a checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from polybus.errors import DoesNotExist, NotConnected, Trimmed, UsageError
from polybus.model.arrow import HEADERS_TYPE
from polybus.spark.pipelines import message_sql
from polybus.spark.pipelines.route import route
from polybus.spark.source.topic_schema import SCHEMA
from tests.rig.native_bus import NativeBus


def messages(client: Any, topic: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(topic) for row in batch.to_pylist()]


def numbers(client: Any, topic: str) -> list[int]:
    return sorted(json.loads(row["body"])["n"] for row in messages(client, topic))


@pytest.fixture
def feed(client, topic):
    """Produce numbered orders of five customers as JSON."""
    client.create_topic(topic, shards=2)
    sent = 0

    def produce(count: int) -> None:
        nonlocal sent
        orders = range(sent, sent + count)
        bodies = [json.dumps({"n": n, "euros": n * 10}).encode() for n in orders]
        with client.producer() as producer:
            producer.produce(topic, bodies, [f"c{n % 5}" for n in orders]).result()
        sent += count

    return produce


@pytest.fixture
def run(spark, bus, topic, tmp_path):
    def run(**given: Any) -> Any:
        options = {"bus": bus.url, "checkpoint": str(tmp_path / "checkpoint"), "once": True}
        return route(spark, given.pop("topic", topic), **{**options, **given})

    return run


def test_matching_messages_are_copied_once(feed, run, client, topic):
    out = f"{topic}.large"
    query = {"into": out, "where": "get_json_object(cast(body AS string), '$.euros') >= 300"}
    feed(50)
    assert run(**query, rows_per_batch=20).rows == 50
    assert numbers(client, out) == list(range(30, 50))
    feed(10)
    assert run(**query).rows == 10
    assert numbers(client, out) == list(range(30, 60))
    assert run(**query).rows == 0


def test_messages_keep_keys_order_and_headers(client, run, topic):
    client.create_topic(topic, shards=4)
    with client.producer() as producer:
        for first in range(0, 200, 20):
            some = range(first, first + 20)
            columns = [[f"k{n % 7}" for n in some], [b"%d" % n for n in some]]
            headers = pa.array([[("n", b"%d" % n)] for n in some], HEADERS_TYPE)
            names = ["shard_key", "body", "headers"]
            producer.produce_rows(topic, pa.record_batch([*columns, headers], names)).result()
    run(into=f"{topic}.out", rows_per_batch=30)
    routed = messages(client, f"{topic}.out")
    for row in routed:
        assert row["shard_key"] == f"k{int(row['body']) % 7}"
        assert dict(row["headers"]) == {"n": row["body"]}
    by_key: dict[str, list[int]] = {}
    for row in sorted(routed, key=lambda row: (row["shard"], row["offset"])):
        by_key.setdefault(row["shard_key"], []).append(int(row["body"]))
    assert sum(map(len, by_key.values())) == 200
    assert all(of_key == sorted(of_key) for of_key in by_key.values())


def test_sql_changes_messages_and_their_topics(feed, run, client, topic):
    feed(20)
    out = f"{topic}.by"
    run(
        select=f"""upper(cast(body AS string)) AS body, shard_key,
            concat('{out}.', offset % 2) AS topic"""
    )
    outputs = [messages(client, f"{out}.{n}") for n in (0, 1)]
    assert abs(len(outputs[0]) - len(outputs[1])) <= 2
    bodies = [row["body"] for rows in outputs for row in rows]
    assert sorted(json.loads(body)["EUROS"] for body in bodies) == list(range(0, 200, 10))


def test_topic_is_copied_to_another_bus(feed, run, topic):
    feed(30)
    with NativeBus() as other, other.client() as there:
        run(into=topic, into_bus=other.url)
        assert numbers(there, topic) == list(range(30))


def test_trimmed_messages_are_skipped_with_accept_loss(feed, run, client, topic):
    feed(5)
    assert run(into=f"{topic}.out").rows == 5
    feed(5)
    client.trim(topic, {shard["shard"]: shard["end"] for shard in client.bounds(topic)["shards"]})
    feed(5)
    with pytest.raises(Trimmed, match="--accept-loss goes on"):
        run(into=f"{topic}.out")
    run(into=f"{topic}.out", accept_loss=True)
    assert numbers(client, f"{topic}.out") == [*range(5), *range(10, 15)]


def test_latest_skips_existing_messages(feed, run, client, topic):
    feed(5)
    assert run(into=f"{topic}.out", start="latest").rows == 0
    feed(3)
    assert run(into=f"{topic}.out", start="latest").rows == 3
    assert numbers(client, f"{topic}.out") == [5, 6, 7]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"into": "x", "where": "id >"}, "--where 'id >' does not parse: Syntax error"),
        ({"into": "x", "where": "ide > 3"}, "`ide` cannot be resolved"),
        ({"into": "x", "where": "id"}, "is not a boolean"),
        ({"into": "x", "where": ""}, "--where '' does not parse"),
        ({"into": "x", "select": " "}, "--select is empty"),
        ({"into": "x", "select": "body FROM y"}, "does not parse"),
        ({"into": "x", "select": "body, shard_ky"}, "`shard_ky` cannot be resolved"),
        ({"into": "x", "select": "body, id AS number"}, "column 'number' cannot be written"),
        ({"into": "x", "select": "id AS body"}, "column body is bigint"),
        ({"into": "x", "select": "shard_key"}, "there is no column body"),
        ({"into": "x", "select": "*"}, "name the columns in --select"),
        ({"into": "x", "select": "max(body) AS body"}, "must not aggregate or sort"),
        ({"into": "x", "select": "DISTINCT body"}, "must not aggregate or sort"),
        ({"into": "x", "start": "17"}, "--from must be earliest or latest, got '17'"),
        ({}, "no target topic: give --into TOPIC"),
        ({"into": "x", "checkpoint": None}, "--checkpoint FOLDER is missing"),
        ({"into": "x", "checkpoint": "/proc/here"}, "--checkpoint /proc/here is not writable"),
        ({"into": "x", "bus": "nats://x"}, "NATS is not supported"),
    ],
)
def test_invalid_arguments_are_reported(feed, run, client, given, message):
    feed(1)
    with pytest.raises(UsageError) as caught:
        run(**given)
    assert message in str(caught.value).splitlines()[0]


def test_missing_topic_is_reported(run, client):
    with pytest.raises(DoesNotExist, match="there is no durable topic 'nowhere'; polybus topic ls"):
        run(topic="nowhere", into="x")


def test_missing_bus_is_reported(run):
    with pytest.raises(NotConnected):
        run(into="x", bus="polybus://127.0.0.1:1")


def test_loop_is_refused(feed, run, topic):
    feed(1)
    with pytest.raises(UsageError, match="loop forever"):
        run(into=topic)
    with pytest.raises(UsageError, match="loop forever"):
        run(topic=f"{topic}*", into=f"{topic}.out")
    with pytest.raises(UsageError, match=f"loop forever: {topic}"):
        run(select="body, topic")


def test_checkpoint_of_another_route_is_refused(feed, run, client, topic):
    feed(1)
    run(into=f"{topic}.out")
    client.create_topic(f"{topic}.other")
    with pytest.raises(UsageError, match="this checkpoint belongs to a query over topic"):
        run(topic=f"{topic}.other", into=f"{topic}.out")


@pytest.mark.parametrize(
    ("where", "select", "names"),
    [
        (None, None, ["shard", "shard_key", "body", "headers"]),
        ("id > 3", "'x' AS body", ["shard", "id"]),
        (None, "upper(topic) AS topic, body", ["topic", "shard", "body"]),
        ("offset IN (SELECT n FROM VALUES (1) AS t(n))", "body", ["shard", "offset", "body"]),
        (None, "*", SCHEMA.names),
    ],
)
def test_only_needed_columns_are_read(spark, where, select, names):
    assert message_sql.needed_columns(spark, where, select).names == names
