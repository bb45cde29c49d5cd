"""Streams, the sink and the archive over topics that are resharded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle

import polybus.spark
from polybus.spark.pipelines import archive
from tests.rig.observer import until
from tests.spark.test_sink import Feed, messages

PATIENCE_S = 90
KEYS = 5


@contextmanager
def resharding(client, topic: str, *sizes: int) -> Iterator[None]:
    """Reshard a topic again and again during a `with`."""
    is_over = threading.Event()

    def run() -> None:
        for shards in cycle(sizes):
            client.reshard(topic, shards)
            if is_over.wait(0.2):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


def test_stream_reads_every_message_once_over_reshards(spark, bus, client, topic, tmp_path):
    feed = Feed(client, topic)
    read = spark.readStream.format("polybus").option("bus", bus.url).option("topic", topic)
    batches: dict[int, list[bytes]] = {}  # by number: a batch may run again after a stop

    def keep(frame, number: int) -> None:
        batches[number] = [bytes(row.body) for row in frame.select("body").collect()]

    def found() -> list[bytes]:
        return [body for batch in batches.values() for body in batch]

    def start(**trigger):
        writer = read.option("maxRowsPerBatch", 30).load().writeStream.foreachBatch(keep)
        checkpoint = str(tmp_path / "checkpoint")
        return writer.option("checkpointLocation", checkpoint).trigger(**trigger).start()

    sent = feed(50)
    query = start(processingTime="0 seconds")
    for shards in (5, 1, 3):
        client.reshard(topic, shards)
        sent += feed(50)
    until(lambda: len(found()) >= len(sent), "the query reads all", PATIENCE_S)
    query.stop()
    client.reshard(topic, 4)
    sent += feed(50)
    start(availableNow=True).awaitTermination(PATIENCE_S)
    assert sorted(found()) == sorted(sent)
    (progress,) = client.topic_stats(topic)["queries"]
    assert progress["lag"] == 0


def test_sink_publishes_epochs_once_and_in_order_over_reshards(spark, bus, client, topic, tmp_path):
    feed = Feed(client, topic + ".in")
    client.create_topic(topic, shards=2)
    sent = feed(200)
    rows = spark.readStream.format("polybus").option("bus", bus.url).option("topic", feed.topic)
    with resharding(client, topic, 5, 1, 3):
        query = (
            rows.option("maxRowsPerBatch", 20)
            .load()
            .select("shard_key", "body")
            .writeStream.format("polybus")
            .options(bus=bus.url, topic=topic, checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(PATIENCE_S)
    assert client.topic(topic)["generation"] > 2
    written = messages(client, topic)
    assert sorted(row["body"] for row in written) == sorted(sent)
    source = messages(client, feed.topic)
    for number in range(KEYS):
        key = f"k{number}"
        wanted = [row["body"] for row in source if row["shard_key"] == key]
        assert [row["body"] for row in written if row["shard_key"] == key] == wanted


def test_batch_that_was_staged_before_a_reshard_is_published(client, topic):
    client.create_topic(topic, shards=2)
    stages = [client.stage() for _ in range(2)]
    keys = [f"k{number}" for number in range(20)]
    for number, stage in enumerate(stages):
        stage.put(topic, [b"%d a" % number] * 20, keys)
    client.reshard(topic, 5)
    for number, stage in enumerate(stages):
        stage.put(topic, [b"%d b" % number] * 20, keys)
        stage.flush()
    client.publish(stages)
    rows = messages(client, topic)
    for key in keys:
        bodies = [row["body"] for row in rows if row["shard_key"] == key]
        assert bodies == [b"0 a", b"0 b", b"1 a", b"1 b"]
    assert {row["shard"] for row in rows} <= set(range(2, 7))


def test_archive_holds_every_generation(spark, bus, client, topic, tmp_path):
    feed, folder = Feed(client, topic), str(tmp_path / "archive")
    sent = feed(40)
    archive(spark, topic, folder, bus=bus.url, once=True)
    client.reshard(topic, 3)
    sent += feed(40)
    archive(spark, topic, folder, bus=bus.url, once=True)
    client.trim(topic, {shard["shard"]: shard["end"] for shard in client.bounds(topic)["shards"]})
    sent += feed(10)
    rows = polybus.spark.table(spark, topic, bus=bus.url, archive=folder).collect()
    assert sorted(bytes(row.body) for row in rows) == sorted(sent)
    assert {row.shard for row in rows} == {0, 1, 2, 3, 4}
