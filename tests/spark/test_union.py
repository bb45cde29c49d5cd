"""Archive and log as one table: no row twice, none missing, whatever runs beside it."""

from __future__ import annotations

import json
from threading import Event, Thread

import pytest
from pyspark.sql import functions as f

import polybus.spark
from polybus.errors import Damaged
from polybus.spark.access import opened
from polybus.spark.archives import versions
from polybus.spark.archives.folder import Folder
from polybus.spark.pipelines import archive, retain
from polybus.testing.watch import until

PATIENCE_S = 60.0
ROWS = 90


def fill(client, topic, numbers):
    with client.producer() as producer:
        keys = [f"k{n % 7}" for n in numbers]
        producer.produce(topic, [b"%d" % n for n in numbers], keys).result(PATIENCE_S)


def rows_of(frame):
    return sorted(frame.collect(), key=lambda row: (row.topic, row.shard, row.offset))


@pytest.fixture
def whole(spark, bus, client, topic, tmp_path):
    """All rows of a topic of which two thirds are archived, and one third is gone from the log."""
    client.create_topic(topic, shards=2)
    fill(client, topic, range(ROWS // 3))
    archive(spark, topic, str(tmp_path), bus=bus.url, once=True)
    early = {n: span.end for n, span in versions.newest(Folder(tmp_path), topic).shards.items()}
    fill(client, topic, range(ROWS // 3, 2 * ROWS // 3))
    archive(spark, topic, str(tmp_path), bus=bus.url, once=True)
    fill(client, topic, range(2 * ROWS // 3, ROWS))
    rows = rows_of(polybus.spark.table(spark, topic, bus=bus.url))
    client.trim(topic, early)
    return rows


@pytest.fixture
def both(bus, topic, tmp_path):
    return {"bus": bus.url, "topic": topic, "archive": str(tmp_path)}


def ways(spark, options):
    """By Spark's own reader, and by the format alone."""
    given = {name: str(value) for name, value in options.items()}
    yield polybus.spark.table(spark, **options)
    yield spark.read.format("polybus").options(**given).load()


def test_both_ways_have_all_rows_of_all_columns(spark, whole, both):
    for frame in ways(spark, both):
        assert rows_of(frame) == whole
        assert frame.columns == list(whole[0].asDict())


def test_both_ways_have_the_rows_between_two_points(spark, whole, both, topic):
    times = sorted({row.timestamp_ns for row in whole})
    ms = [-(-time // 1_000_000) for time in (times[0] + 1, times[-1])]
    cuts = [
        ({"startingTimestamp": ms[0], "endingTimestamp": ms[1]}, _between_ms(*ms)),
        ({"startingTimestamp": ms[1]}, _between_ms(ms[1], 1 << 62)),
        (
            {
                "startingOffsets": json.dumps({topic: {"0": 7}}),
                "endingOffsets": json.dumps({topic: {"1": 40}}),
            },
            lambda row: row.offset >= 7 if row.shard == 0 else row.offset < 40,
        ),
        ({"endingOffsets": json.dumps({topic: {"0": 2, "1": 3}})}, _before({0: 2, 1: 3})),
        ({"startingOffsets": "latest"}, lambda row: False),
    ]
    for options, holds in cuts:
        for frame in ways(spark, {**both, **options}):
            assert rows_of(frame) == [row for row in whole if holds(row)], options


def _between_ms(start, end):
    return lambda row: start * 1_000_000 <= row.timestamp_ns < end * 1_000_000


def _before(ends):
    return lambda row: row.offset < ends[row.shard]


def test_spark_reads_the_files_by_itself_and_only_what_a_query_needs(spark, whole, both, capsys):
    sums = polybus.spark.table(spark, **both).agg(f.sum(f.length("body")))
    assert sums.collect()[0][0] == sum(len(row.body) for row in whole)
    sums.explain()
    plan = capsys.readouterr().out
    assert "FileScan parquet" in plan
    assert "ReadSchema: struct<body:binary>" in plan


def test_a_table_that_is_computed_later_has_the_rows_of_when_it_was_made(
    spark, bus, client, whole, both, topic, tmp_path
):
    frames = list(ways(spark, both))
    assert [frame.count() for frame in frames] == [ROWS, ROWS]
    fill(client, topic, range(ROWS, ROWS + 20))
    archive(spark, topic, str(tmp_path), bus=bus.url, once=True)
    retain(spark, str(tmp_path), topic, bus=bus.url, once=True)
    assert [one.start for one in opened(bus.url).shards(topic).values()] == [
        one.end for one in opened(bus.url).shards(topic).values()
    ]
    for frame in frames:
        assert rows_of(frame) == whole


def test_a_topic_that_was_dropped_is_still_in_the_archive(
    spark, bus, client, whole, both, topic, tmp_path
):
    archive(spark, topic, str(tmp_path), bus=bus.url, once=True)
    client.drop_topic(topic)
    for frame in ways(spark, both):
        assert rows_of(frame) == whole


def test_a_stream_reads_the_history_first(spark, client, whole, both, topic, tmp_path):
    found = []
    given = {name: str(value) for name, value in both.items()}
    reader = spark.readStream.format("polybus").options(maxRowsPerBatch=35, **given)
    query = (
        reader.load()
        .writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
        .option("checkpointLocation", str(tmp_path.with_name("checkpoint")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(found, key=lambda row: (row.topic, row.shard, row.offset)) == whole


def test_a_file_that_is_gone_is_told(bus, whole, both, topic, tmp_path):
    (first, *_) = versions.newest(Folder(tmp_path), topic).files
    (tmp_path / first.path).unlink()
    access = opened(bus.url, str(tmp_path))
    shard, span = next(iter(first.shards.items()))
    with pytest.raises(Damaged, match="is missing from"):
        list(access.read(topic, shard, *span))


def test_the_count_is_right_while_archive_and_retain_run(spark, bus, client, topic, tmp_path):
    client.create_topic(topic, shards=2)
    folder = tmp_path / "archive"
    fill(client, topic, range(50))
    archive(spark, topic, str(folder), bus=bus.url, once=True)
    over, faults = Event(), []

    def busy():
        try:
            while not over.is_set():
                archive(spark, topic, str(folder), bus=bus.url, once=True, rows_per_batch=20)
                retain(spark, str(folder), topic, bus=bus.url, once=True)
        except Exception as error:
            faults.append(error)

    beside = Thread(target=busy)
    beside.start()
    try:
        sent, looks = 50, 0
        while looks < 6 and not faults:
            fill(client, topic, range(sent, sent + 50))
            sent, looks = sent + 50, looks + 1
            options = {"bus": bus.url, "topic": topic, "archive": str(folder)}
            for frame in ways(spark, options):
                offsets = frame.select("body").collect()
                assert sorted(int(row.body) for row in offsets) == list(range(sent))
        begun = versions.newest(Folder(folder), topic).rows
        until(lambda: faults or begun > 50 or not beside.is_alive(), "the archive to grow")
    finally:
        over.set()
        beside.join()
    assert faults == []
    assert opened(bus.url).shards(topic)[0].start > 0
