"""Topics as tables: what stands in them, and between which points."""

from __future__ import annotations


def test_rows(spark, bus, client, topic):
    with client.producer() as producer:
        producer.produce(topic, [b"one", b"two"], ["a", None]).result()
    df = spark.read.format("polybus").option("bus", bus.url).option("topic", topic).load()
    assert {(row.body, row.shard_key) for row in df.collect()} == {(b"one", "a"), (b"two", None)}
