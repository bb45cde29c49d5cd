"""Topics as Spark tables: rows, columns and errors, in Spark."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polybus.model.arrow import PRODUCE_SCHEMA
from polybus.spark.source.topic_schema import LAST_MS
from tests.rig.native_bus import NativeBus


@pytest.fixture
def load(spark: SparkSession, bus: NativeBus, topic: str) -> Any:
    def load(**options: Any) -> DataFrame:
        reader = spark.read.format("polybus")
        return reader.options(**{"bus": bus.url, "topic": topic, **options}).load()

    return load


def test_columns_have_the_stored_values(load, bus, client, topic):
    client.create_topic(topic, 1)
    headers = [[("trace", b"\x01\xff"), ("empty", b"")], None, []]
    columns = [
        pa.array(["käse", None, ""], pa.utf8()),
        pa.array([b"one", b"\x00\xff", b""], pa.binary()),
        pa.array([1_700_000_000_123, 0, 2**62], pa.int64()),
        pa.array(headers, PRODUCE_SCHEMA.field("headers").type),
    ]
    with client.producer() as producer:
        rows = pa.record_batch(columns, schema=PRODUCE_SCHEMA)
        done = producer.produce_rows(topic, rows).result()
    frame = load().orderBy("offset")
    assert [name for name, _ in frame.dtypes] == [
        "topic", "shard", "offset", "id", "timestamp", "timestamp_ns", "insertion_time",
        "shard_key", "body", "headers",
    ]  # fmt: skip
    found = frame.withColumns(
        {
            "exact": f.expr("unix_micros(timestamp) = timestamp_ns div 1000"),
            "inserted_ms": f.unix_millis("insertion_time"),
        }
    ).collect()
    assert [(row.topic, row.shard, row.offset) for row in found] == [
        (topic, 0, n) for n in range(3)
    ]
    assert [row.id for row in found] == list(range(done.first_id, done.first_id + 3))
    assert [row.shard_key for row in found] == ["käse", None, ""]
    assert [row.body for row in found] == [b"one", b"\x00\xff", b""]
    assert [row.headers for row in found] == [{"trace": b"\x01\xff", "empty": b""}, None, {}]
    assert [row.exact for row in found] == [True] * 3
    assert [row.inserted_ms for row in found] == [1_700_000_000_123, 0, LAST_MS]
    assert isinstance(found[0].timestamp, datetime)
    assert load(bus=f"lmdb:{bus.folder / 'data'}").orderBy("offset").collect() == frame.collect()


def test_table_keeps_its_rows(load, client, topic):
    client.create_topic(topic, 2)
    assert load().count() == 0
    with client.producer() as producer:
        producer.produce(topic, [b"1"] * 10, [str(n) for n in range(10)]).result()
        before = load(rowsPerPartition="2")
        assert before.rdd.getNumPartitions() >= 5
        producer.produce(topic, [b"2"] * 10).result()
    assert before.groupBy("body").count().collect() == [(b"1", 10)]
    after = load()
    assert after.filter("shard_key = '3'").count() == 1
    assert after.filter("shard_key is null").count() == 10, (
        "a filter of one query must not apply to the next"
    )


def test_schema_selects_columns(spark, bus, client, topic):
    with client.producer() as producer:
        producer.produce(topic, [b"12345"] * 3).result()
    reader = spark.read.format("polybus").options(bus=bus.url, topic=topic)
    frame = reader.schema("body binary, topic string").load()
    assert [tuple(row) for row in frame.collect()] == [(b"12345", topic)] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "nowhere"}, "there is no durable topic 'nowhere'"),
        ({"startingOfset": "latest"}, "unknown option 'startingofset': use one of bus, topic,"),
    ],
)
def test_error_message_is_in_the_first_line(load, options, message):
    with pytest.raises(PySparkException) as error:
        load(**options).collect()
    assert message in str(error.value).splitlines()[0]
    assert "Traceback" not in str(error.value)


def test_range_trimmed_before_its_task_runs(load, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, [b"%d" % n for n in range(10)]).result()
    planned = load()
    assert planned.rdd.getNumPartitions() == 1
    client.trim(topic, {0: 4})
    with pytest.raises(PySparkException) as error:
        planned.collect()
    assert f"topic '{topic}', shard 0: offsets 0 to 3 were trimmed away" in str(error.value)
