"""The sink in Spark: batch writes, streams, and exactly once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import expr

from polybus.errors import DoesNotExist

NUMBERS = 1000


def bodies(client: Any, topic: str) -> list[bytes]:
    return [body for batch in client.read(topic) for body in batch.column("body").to_pylist()]


def messages(client: Any, topic: str) -> list[dict[str, Any]]:
    return [row for batch in client.read(topic) for row in batch.to_pylist()]


def write(rows: Any, url: str, **options: str) -> None:
    rows.write.format("polybus").mode("append").option("bus", url).options(**options).save()


@pytest.fixture
def numbers(spark):
    return spark.range(0, NUMBERS, 1, 4).selectExpr("cast(id as string) as body")


class Feed:
    """Produces numbered messages for a topic that a stream reads."""

    def __init__(self, client: Any, topic: str) -> None:
        self.topic = topic
        self._sent = 0
        client.create_topic(topic, shards=2)
        self._producer = client.producer()

    def __call__(self, count: int) -> list[bytes]:
        first, self._sent = self._sent, self._sent + count
        given = [b"%d" % n for n in range(first, self._sent)]
        self._producer.produce(self.topic, given, [f"k{n % 5}" for n in range(count)]).result()
        return given


@pytest.fixture
def feed(client, topic):
    return Feed(client, topic + ".in")


@pytest.fixture
def copy(spark, bus, feed, topic, tmp_path):
    """Run a stream from the feed to the topic until all is read. Keeps the checkpoint."""

    def run(checkpoint: str = "checkpoint", rows: Any = None, **options: Any) -> Any:
        read = spark.readStream.format("polybus").option("bus", bus.url)
        if rows is None:
            rows = read.option("topic", feed.topic).option("maxRowsPerBatch", 10).load()
        query = (
            rows.select("shard_key", "body")
            .writeStream.format("polybus")
            .option("bus", bus.url)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .options(**{"topic": topic, **options})
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return query

    return run


# --- batch


def test_write_creates_the_topic(spark, bus, client, topic, numbers):
    write(numbers, bus.url, topic=topic)
    assert sorted(map(int, bodies(client, topic))) == list(range(NUMBERS))
    again = spark.read.format("polybus").option("bus", bus.url).option("topic", topic).load()
    assert again.count() == NUMBERS


def test_keys_headers_and_topics_are_columns(spark, bus, client, topic):
    rows = spark.sql(
        f"""select * from values
        ('a', cast('1' as binary), '{topic}.x', map('h', cast('v' as binary))),
        ('a', cast('2' as binary), '{topic}.y', null),
        (null, cast('3' as binary), null, map())
        as t(shard_key, body, topic, headers)"""
    ).coalesce(1)
    write(rows, bus.url, topic=f"{topic}.z")
    (x,) = messages(client, f"{topic}.x")
    assert (x["shard_key"], x["body"], x["headers"]) == ("a", b"1", [("h", b"v")])
    (y,) = messages(client, f"{topic}.y")
    assert (y["shard_key"], y["headers"]) == ("a", None)
    (z,) = messages(client, f"{topic}.z")
    assert (z["shard_key"], z["body"]) == (None, b"3")


def test_messages_of_a_key_keep_their_order(spark, bus, client, topic):
    rows = spark.range(0, 5000, 1, 1).selectExpr(
        "cast(id as string) as body", "concat('k', id % 7) as shard_key"
    )
    write(rows, bus.url, topic=topic)
    by_key: dict[str, list[int]] = {}
    for row in messages(client, topic):
        by_key.setdefault(row["shard_key"], []).append(int(row["body"]))
    assert len(by_key) == 7
    for key, numbers in by_key.items():
        assert numbers == list(range(int(key[1:]), 5000, 7))


def test_write_is_all_or_nothing(spark, bus, client, topic):
    rows = spark.range(0, 100, 1, 4).selectExpr(
        "if(id = 99, cast(raise_error('one is bad') as string), cast(id as string)) as body"
    )
    with pytest.raises(Exception, match="one is bad"):
        write(rows, bus.url, topic=topic)
    assert _is_empty(client, topic)


def test_write_appends_and_a_transaction_is_done_once(bus, client, topic, numbers):
    for _ in range(2):
        write(numbers, bus.url, topic=topic)
    for _ in range(2):
        write(numbers, bus.url, topic=topic, transactionId=f"{topic}.2026-11-16")
    assert len(bodies(client, topic)) == 3 * NUMBERS


def test_write_without_rows(bus, client, topic, numbers):
    write(numbers.filter("false"), bus.url, topic=topic, transactionId=topic)
    assert _is_empty(client, topic)


# --- streams


def test_stream_continues_from_its_checkpoint(client, topic, feed, copy):
    sent = feed(35)
    assert len(copy().recentProgress) >= 4
    assert sorted(bodies(client, topic)) == sorted(sent)
    sent += feed(5)
    copy()
    assert sorted(bodies(client, topic)) == sorted(sent)


def test_epoch_missing_in_the_commit_log_is_published_once(client, topic, feed, copy, tmp_path):
    """The driver died between its publish and Spark's commit log."""
    sent = feed(25)
    copy()
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda p: int(p.name))
    newest.unlink()
    Path(newest.with_name(f".{newest.name}.crc")).unlink(missing_ok=True)
    sent += feed(5)
    copy()
    assert sorted(bodies(client, topic)) == sorted(sent)


def test_known_producer_with_a_new_checkpoint(client, topic, feed, copy):
    sent = feed(10)
    copy("first", producerId=topic)
    message = refused(lambda: copy("second", producerId=topic))
    assert "set onNewCheckpoint=continue" in message
    assert sorted(bodies(client, topic)) == sorted(sent)
    copy("second", producerId=topic, onNewCheckpoint="continue")
    assert sorted(bodies(client, topic)) == sorted(2 * sent)
    feed(1)
    message = refused(lambda: copy("first", producerId=topic, onNewCheckpoint="continue"))
    assert "was replaced by" in message
    assert "another producerId" in message


# --- errors as Spark prints them; test_sink_errors.py has all of them, without Spark


def refused(action: Callable[[], object]) -> str:
    """Return the first line of Spark's error, which must name the remedy."""
    try:
        action()
    except PySparkException as error:
        return str(error).splitlines()[0]
    raise AssertionError("it was done")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("id as body", "column body is bigint: cast it to binary or string"),
        ("if(id = 3, null, 'x') as body", "a body is null: write only rows that have one"),
    ],
)
def test_invalid_rows_are_reported(spark, bus, client, topic, columns, message):
    rows = spark.range(0, 10, 1, 1).selectExpr(columns)
    assert message in refused(lambda: write(rows, bus.url, topic=topic))
    assert _is_empty(client, topic)


def test_unknown_option_is_reported(bus, numbers, feed, copy):
    message = refused(lambda: write(numbers, bus.url, topics="x"))
    assert "unknown option 'topics': use one of bus, topic, producerId" in message
    feed(1)
    message = refused(lambda: copy(startingOffsets="earliest"))
    assert "unknown option 'startingoffsets'" in message


def test_overwrite_is_refused(numbers, bus, topic):
    writer = numbers.write.format("polybus").mode("overwrite").options(bus=bus.url, topic=topic)
    assert "append" in refused(writer.save)


def test_column_topic_of_the_source_is_refused(spark, bus, client, topic):
    with client.producer() as producer:
        producer.produce(topic, [b"x"]).result()
    rows = spark.read.format("polybus").options(bus=bus.url, topic=topic).load()
    assert "drop the source's column topic" in refused(
        lambda: write(rows, bus.url, topic=f"{topic}.copy")
    )
    write(rows.drop("topic"), bus.url, topic=f"{topic}.copy")
    assert bodies(client, f"{topic}.copy") == [b"x"]
    routed = rows.withColumn("topic", expr("if(offset > 7, 'elsewhere', null)"))
    write(routed, bus.url, topic=f"{topic}.copy")
    assert bodies(client, f"{topic}.copy") == [b"x", b"x"]


def _is_empty(client: Any, topic: str) -> bool:
    try:
        return bodies(client, topic) == []
    except DoesNotExist:
        return True
