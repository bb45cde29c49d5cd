"""Archive and log as one table: each row once, also while archive and retain run."""

from __future__ import annotations

import json
from threading import Event, Thread

import pytest
from pyspark.sql import functions as f

import polybus.spark
from polybus.errors import Damaged, Trimmed
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import (
    LastRow,
    Manifest,
    OffsetSpan,
    commit_manifest,
    read_manifest,
)
from polybus.spark.pipelines import archive, retain
from polybus.spark.source.log_access import open_log_access
from tests.rig.observer import until

PATIENCE_S = 60.0
ROWS = 90
LOOKS = 4


def fill(client, topic, numbers):
    with client.producer() as producer:
        keys = [f"k{n % 7}" for n in numbers]
        producer.produce(topic, [b"%d" % n for n in numbers], keys).result(PATIENCE_S)


def rows_of(frame):
    return sorted(frame.collect(), key=lambda row: (row.topic, row.shard, row.offset))


class History:
    """A topic with two thirds archived, of which the first half is trimmed from the log."""

    def __init__(self, spark, bus, client, topic, folder):
        self.spark, self.bus, self.client = spark, bus, client
        self.topic, self.folder = topic, folder
        client.create_topic(topic, shards=2)
        fill(client, topic, range(ROWS // 3))
        self.archive()
        early = {n: span.end for n, span in self.manifest.shards.items()}
        fill(client, topic, range(ROWS // 3, 2 * ROWS // 3))
        self.archive()
        fill(client, topic, range(2 * ROWS // 3, ROWS))
        self.rows = rows_of(polybus.spark.table(spark, topic, bus=bus.url))
        client.trim(topic, early)

    def archive(self):
        archive(self.spark, self.topic, str(self.folder), bus=self.bus.url, once=True)

    @property
    def manifest(self):
        return read_manifest(ArchiveFolder(self.folder), self.topic)

    @property
    def options(self):
        return {"bus": self.bus.url, "topic": self.topic, "archive": str(self.folder)}


@pytest.fixture(scope="module")
def history(spark, shared_bus, tmp_path_factory):
    """A topic for tests that only read."""
    with shared_bus.client() as client:
        yield History(spark, shared_bus, client, "t.history", tmp_path_factory.mktemp("union"))


def test_gap_between_archive_and_log_is_reported(bus, client, topic, tmp_path):
    folder = ArchiveFolder(tmp_path)
    folder.prepare()
    commit_manifest(folder, Manifest(topic, 1, (), {0: OffsetSpan(0, 2)}, {0: LastRow(2, 2)}))
    client.create_topic(topic, shards=1)
    fill(client, topic, range(9))
    client.trim(topic, {0: 5})
    with pytest.raises(Trimmed, match="offsets 2 to 4 were trimmed away") as caught:
        list(open_log_access(bus.url, str(folder.path)).read(topic, 0, 2, 9))
    assert caught.value.start == 5


@pytest.fixture
def own(spark, bus, client, topic, tmp_path):
    """A topic for tests that change it."""
    return History(spark, bus, client, topic, tmp_path / "archive")


def ways(spark, options):
    """Read by Spark's Parquet reader, and by the format alone."""
    given = {name: str(value) for name, value in options.items()}
    yield polybus.spark.table(spark, **options)
    yield spark.read.format("polybus").options(**given).load()


def test_all_rows_and_columns_are_read(spark, history):
    for frame in ways(spark, history.options):
        assert rows_of(frame) == history.rows
        assert frame.columns == list(history.rows[0].asDict())


def test_rows_between_two_bounds_are_read(spark, history):
    times = sorted({row.timestamp_ns for row in history.rows})
    ms = [-(-time // 1_000_000) for time in (times[0] + 1, times[-1])]
    starts, ends = (json.dumps({history.topic: shards}) for shards in ({"0": 7}, {"1": 40}))
    cuts = [
        ({"startingTimestamp": ms[0], "endingTimestamp": ms[1]}, _between_ms(*ms)),
        ({"startingTimestamp": ms[1]}, _between_ms(ms[1], 1 << 62)),
        (
            {"startingOffsets": starts, "endingOffsets": ends},
            lambda row: row.offset >= 7 if row.shard == 0 else row.offset < 40,
        ),
        ({"endingOffsets": json.dumps({history.topic: {"0": 2, "1": 3}})}, _before({0: 2, 1: 3})),
        ({"startingOffsets": "latest"}, lambda row: False),
    ]
    for options, holds in cuts:
        for frame in ways(spark, {**history.options, **options}):
            assert rows_of(frame) == [row for row in history.rows if holds(row)], options


def _between_ms(start, end):
    return lambda row: start * 1_000_000 <= row.timestamp_ns < end * 1_000_000


def _before(ends):
    return lambda row: row.offset < ends[row.shard]


def test_ids_and_times_are_found_in_archive_and_log(history):
    access = open_log_access(history.bus.url, str(history.folder))
    for shard in (0, 1):
        rows = [row for row in history.rows if row.shard == shard]
        end = rows[-1].offset + 1
        for wanted in range(ROWS + 2):
            since = next((row.offset for row in rows if row.id >= wanted), end)
            assert access.find_id(history.topic, shard, wanted) == since
        for ns in {row.timestamp_ns for row in history.rows}:
            since = next((row.offset for row in rows if row.timestamp_ns >= ns), end)
            assert access.find_time(history.topic, shard, ns) == since


def test_spark_reads_needed_columns_of_the_files(spark, history, capsys):
    sums = polybus.spark.table(spark, **history.options).agg(f.sum(f.length("body")))
    assert sums.collect()[0][0] == sum(len(row.body) for row in history.rows)
    sums.explain()
    plan = capsys.readouterr().out
    assert "FileScan parquet" in plan
    assert "ReadSchema: struct<body:binary>" in plan


def test_stream_reads_the_archive_first(spark, history, tmp_path):
    rows = []
    reader = spark.readStream.format("polybus").options(maxRowsPerBatch=35, **history.options)
    query = (
        reader.load()
        .writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(rows, key=lambda row: (row.topic, row.shard, row.offset)) == history.rows


def test_table_keeps_its_rows_if_the_log_is_trimmed(spark, own):
    frames = list(ways(spark, own.options))
    assert [frame.count() for frame in frames] == [ROWS, ROWS]
    fill(own.client, own.topic, range(ROWS, ROWS + 20))
    own.archive()
    retain(spark, str(own.folder), own.topic, bus=own.bus.url, once=True)
    assert all(
        one.start == one.end for one in open_log_access(own.bus.url).shards(own.topic).values()
    )
    for frame in frames:
        assert rows_of(frame) == own.rows
    own.client.drop_topic(own.topic)
    for frame in ways(spark, own.options):  # all rows are archived
        assert frame.count() == ROWS + 20
    (first, *_) = own.manifest.files
    access = open_log_access(own.bus.url, str(own.folder))
    shard, span = next(iter(first.shards.items()))
    (own.folder / first.path).write_bytes(b"no Parquet")
    with pytest.raises(Damaged, match="cannot be read"):
        list(access.read(own.topic, shard, *span))
    (own.folder / first.path).unlink()
    with pytest.raises(Damaged, match="is missing from"):
        list(access.read(own.topic, shard, *span))


def test_count_is_right_while_archive_and_retain_run(spark, bus, client, topic, tmp_path):
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
        while looks < LOOKS and not faults:
            fill(client, topic, range(sent, sent + 50))
            sent, looks = sent + 50, looks + 1
            options = {"bus": bus.url, "topic": topic, "archive": str(folder)}
            for frame in ways(spark, options):
                offsets = frame.select("body").collect()
                assert sorted(int(row.body) for row in offsets) == list(range(sent))
        begun = read_manifest(ArchiveFolder(folder), topic).rows
        until(lambda: faults or begun > 50 or not beside.is_alive(), "the archive to grow")
    finally:
        over.set()
        beside.join()
    assert faults == []
    assert open_log_access(bus.url).shards(topic)[0].start > 0
