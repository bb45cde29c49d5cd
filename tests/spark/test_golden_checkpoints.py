"""Continue the Spark checkpoints and the archive of the golden folders (tests/golden/make.py).

The checkpoints hold offsets and the id of the query, and neither a path nor the address of
a bus: options are given again with each start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import polybus.spark
from polybus import native
from polybus.spark import pipelines
from tests.golden import goldenread
from tests.golden.goldenbus import HERE, VERSIONS, GoldenBus, copied

TIMEOUT_S = 90


@pytest.fixture(scope="module", params=VERSIONS)
def golden(request: pytest.FixtureRequest) -> Path:
    return HERE / str(request.param)


@pytest.fixture(scope="module")
def expected(golden: Path) -> Any:
    return json.loads((golden / "expected.json").read_text())


@pytest.fixture(scope="module")
def golden_bus(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenBus]:
    with GoldenBus(copied(golden / "data", tmp_path_factory.mktemp("golden") / "data")) as bus:
        yield bus


@pytest.fixture(scope="module")
def golden_client(golden_bus: GoldenBus) -> Iterator[native.Client]:
    with golden_bus.client() as client:
        yield client


@pytest.fixture
def readings(spark: SparkSession, golden_bus: GoldenBus) -> DataFrame:
    source = spark.readStream.format("polybus").options(bus=golden_bus.url, topic="readings")
    return source.option("maxRowsPerBatch", 8).load()


def run(writer: Any, checkpoint: Path) -> Any:
    writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    query = writer.start()
    assert query.awaitTermination(TIMEOUT_S)
    return query


def bodies(client: native.Client, topic: str) -> list[str]:
    return sorted(row["body"].decode() for row in goldenread.rows(client, topic))


def test_source_continues_from_its_checkpoint(golden, expected, readings, golden_client, tmp_path):
    checkpoint = copied(golden / "checkpoint-source", tmp_path / "checkpoint")
    seen: list[str] = []
    batches: list[int] = []

    def keep(batch: DataFrame, number: int) -> None:
        batches.append(number)
        seen.extend(row.body.decode() for row in batch.select("body").collect())

    query = run(readings.writeStream.foreachBatch(keep).queryName("golden source"), checkpoint)
    assert sorted(seen) == expected["spark"]["unread"]
    assert str(query.id) == expected["spark"]["source_query"]
    assert batches[0] == expected["spark"]["epochs"]
    # The bus recognizes the query by the id in its checkpoint.
    queries = golden_client.topic_stats("readings")["queries"]
    lags = {one["query"]: one["lag"] for one in queries if one["name"] == "golden source"}
    (known,) = (
        one[0] for one in expected["topics"]["readings"]["queries"] if one[1] == "golden source"
    )
    assert lags.keys() == {known}


def test_sink_continues_and_a_replayed_epoch_publishes_nothing(
    golden, expected, readings, golden_bus, golden_client, tmp_path
):
    """The checkpoint is that of a driver that died between its publish and Spark's commit."""
    checkpoint = copied(golden / "checkpoint-sink", tmp_path / "checkpoint")
    last = expected["spark"]["epochs"] - 1
    (checkpoint / "commits" / str(last)).unlink()
    writer = readings.select("shard_key", "body").writeStream.format("polybus")
    options = {"bus": golden_bus.url, "topic": "readings.copy"}
    query = run(writer.options(**options).queryName("golden sink"), checkpoint)
    assert str(query.id) == expected["spark"]["sink_query"]
    epochs = [progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]]
    assert epochs[:2] == [last, last + 1]
    read, unread = expected["spark"]["read"], expected["spark"]["unread"]
    assert bodies(golden_client, "readings.copy") == sorted(read + unread)


def test_transaction_is_not_repeated(spark, expected, golden_bus, golden_client):
    once = expected["spark"]["transaction"]
    rows = spark.createDataFrame([("written again",)], "body string")
    writer = rows.write.format("polybus").mode("append")
    writer = writer.options(bus=golden_bus.url, topic=once["topic"], transactionId=once["id"])
    writer.save()
    assert bodies(golden_client, once["topic"]) == ["written once"]


def test_archive_is_read_and_extended(spark, golden, expected, golden_bus, tmp_path):
    folder = copied(golden / "archive", tmp_path / "archive")
    everything = sorted(row[:7] for row in expected["topics"]["readings"]["messages"])

    def table() -> list[list[Any]]:
        rows = polybus.spark.table(
            spark, "readings", archive=str(folder), bus=golden_bus.url
        ).collect()
        return sorted(
            [
                row.id,
                row.shard,
                row.offset,
                row.timestamp_ns,
                round(row.insertion_time.timestamp() * 1000),
                row.shard_key,
                goldenread.digest(bytes(row.body)),
            ]
            for row in rows
        )

    assert goldenread.archive_rows(folder) == expected["archive"]
    assert table() == everything
    done = pipelines.archive(spark, "readings", str(folder), bus=golden_bus.url, once=True)
    assert done.rows == len(expected["spark"]["unread"])
    archived = sorted([row[3], row[1], row[2]] for row in goldenread.archive_rows(folder))
    assert archived == [row[:3] for row in everything]
    assert table() == everything
