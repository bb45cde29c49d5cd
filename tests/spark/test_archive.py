"""Archiving: every message once, in files that count, and nothing of what went wrong."""

from __future__ import annotations

import polybus.spark
from polybus.spark.archives import versions
from polybus.spark.archives.folder import Folder
from polybus.spark.pipelines import archive

PATIENCE_S = 60.0


def fill(client, topic, numbers, headers=None):
    with client.producer() as producer:
        bodies = [b"%d" % n for n in numbers]
        keys = [f"k{n % 7}" for n in numbers]
        producer.produce(topic, bodies, keys).result(PATIENCE_S)


def rows_of(frame):
    return sorted(frame.collect(), key=lambda row: (row.topic, row.shard, row.offset))


def test_what_is_read_with_the_archive_is_what_the_log_had(spark, bus, client, topic, tmp_path):
    client.create_topic(topic, shards=3)
    fill(client, topic, range(300))
    log = rows_of(polybus.spark.table(spark, topic, bus=bus.url))
    summary = archive(spark, topic, str(tmp_path / "a"), bus=bus.url, once=True)
    assert summary.rows == 300
    fill(client, topic, range(300, 350))
    both = {"bus": bus.url, "archive": str(tmp_path / "a")}
    whole = rows_of(polybus.spark.table(spark, topic, bus=bus.url))
    assert whole[:1] == log[:1] and len(whole) == 350
    assert rows_of(polybus.spark.table(spark, topic, **both)) == whole
    plain = spark.read.format("polybus").option("topic", topic).options(**both).load()
    assert rows_of(plain) == whole
    client.trim(
        topic, {n: s.end for n, s in versions.newest(Folder(tmp_path / "a"), topic).shards.items()}
    )
    assert rows_of(polybus.spark.table(spark, topic, **both)) == whole
    assert (
        rows_of(spark.read.format("polybus").option("topic", topic).options(**both).load()) == whole
    )
    again = archive(spark, topic, str(tmp_path / "a"), bus=bus.url, once=True)
    assert again.rows == 50
    assert rows_of(polybus.spark.table(spark, topic, **both)) == whole
