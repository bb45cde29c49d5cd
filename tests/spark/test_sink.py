"""The sink: what is written, where to, and that it is there once."""

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
    return spark.shard_range(0, NUMBERS, 1, 4).selectExpr("cast(id as string) as body")


class Feed:
    """Numbered messages for a topic that a stream reads."""

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
    """Runs a stream from the feed to the topic until it has read all; its checkpoint stays."""

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


def test_rows_become_messages_of_a_topic_that_was_not_there(spark, bus, client, topic, numbers):
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


def test_messages_of_one_key_keep_their_order(spark, bus, client, topic):
    rows = spark.shard_range(0, 5000, 1, 1).selectExpr(
        "cast(id as string) as body", "concat('k', id % 7) as shard_key"
    )
    write(rows, bus.url, topic=topic)
    by_key: dict[str, list[int]] = {}
    for row in messages(client, topic):
        by_key.setdefault(row["shard_key"], []).append(int(row["body"]))
    assert len(by_key) == 7
    for key, found in by_key.items():
        assert found == list(range(int(key[1:]), 5000, 7))


def test_a_write_is_all_or_nothing(spark, bus, client, topic):
    rows = spark.shard_range(0, 100, 1, 4).selectExpr(
        "if(id = 99, cast(raise_error('one is bad') as string), cast(id as string)) as body"
    )
    with pytest.raises(Exception, match="one is bad"):
        write(rows, bus.url, topic=topic)
    assert _is_empty(client, topic)


def test_a_write_adds_and_the_same_transaction_is_done_once(bus, client, topic, numbers):
    for _ in range(2):
        write(numbers, bus.url, topic=topic)
    for _ in range(2):
        write(numbers, bus.url, topic=topic, transactionId=f"{topic}.2026-11-16")
    assert len(bodies(client, topic)) == 3 * NUMBERS


def test_no_rows_are_no_messages(bus, client, topic, numbers):
    write(numbers.filter("false"), bus.url, topic=topic, transactionId=topic)
    assert _is_empty(client, topic)


# --- streams


def test_a_stream_goes_on_where_it_was(client, topic, feed, copy):
    sent = feed(35)
    assert len(copy().recentProgress) >= 4
    assert sorted(bodies(client, topic)) == sorted(sent)
    sent += feed(5)
    copy()
    assert sorted(bodies(client, topic)) == sorted(sent)


def test_an_epoch_that_was_published_and_not_noted_by_spark_is_there_once(
    client, topic, feed, copy, tmp_path
):
    """What a driver leaves that dies between the two: its last commit is not in Spark's log."""
    sent = feed(25)
    copy()
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda p: int(p.name))
    newest.unlink()
    Path(newest.with_name(f".{newest.name}.crc")).unlink(missing_ok=True)
    sent += feed(5)
    copy()
    assert sorted(bodies(client, topic)) == sorted(sent)


def test_a_known_producer_with_a_fresh_checkpoint_is_refused_or_goes_on(client, topic, feed, copy):
    sent = feed(10)
    copy("first", producerId=topic)
    told = refused(lambda: copy("second", producerId=topic))
    assert "set onNewCheckpoint=continue" in told
    assert sorted(bodies(client, topic)) == sorted(sent)
    copy("second", producerId=topic, onNewCheckpoint="continue")
    assert sorted(bodies(client, topic)) == sorted(2 * sent)
    feed(1)
    told = refused(lambda: copy("first", producerId=topic, onNewCheckpoint="continue"))
    assert "was replaced by" in told
    assert "producerId of its own" in told


# --- what cannot be: as Spark shows it; all of it, without Spark, is in test_sink_refusals.py


def refused(action: Callable[[], object]) -> str:
    """The first line of what Spark raises: it must say what to do."""
    try:
        action()
    except PySparkException as error:
        return str(error).splitlines()[0]
    raise AssertionError("it was done")


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ("id as body", "column body is bigint: cast it to binary or string"),
        ("if(id = 3, null, 'x') as body", "a body is null: write only rows that have one"),
    ],
)
def test_rows_that_cannot_be_written(spark, bus, client, topic, columns, told):
    rows = spark.shard_range(0, 10, 1, 1).selectExpr(columns)
    assert told in refused(lambda: write(rows, bus.url, topic=topic))
    assert _is_empty(client, topic)


def test_an_option_that_there_is_not(bus, numbers, feed, copy):
    told = refused(lambda: write(numbers, bus.url, topics="x"))
    assert "there is no option 'topics': use one of bus, topic, producerId" in told
    feed(1)
    told = refused(lambda: copy(startingOffsets="earliest"))
    assert "there is no option 'startingoffsets'" in told


def test_a_topic_is_not_overwritten(numbers, bus, topic):
    writer = numbers.write.format("polybus").mode("overwrite").options(bus=bus.url, topic=topic)
    assert "append" in refused(writer.save)


def test_what_was_read_is_not_sent_back_by_mistake(spark, bus, client, topic):
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
