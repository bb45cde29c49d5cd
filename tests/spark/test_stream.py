"""Topics as Spark streams, in Spark: triggers, restarts, lag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 90


class StreamQuery:
    """A streaming query that keeps the bodies of its batches."""

    def __init__(self, spark: SparkSession, checkpoint: Path, **options: str) -> None:
        self._frame = spark.readStream.format("polybus").options(**options).load()
        self._checkpoint = checkpoint
        self.batches: list[list[bytes]] = []

    def start(self, **trigger: Any) -> StreamingQuery:
        writer = self._frame.writeStream.foreachBatch(self._keep).queryName("kept")
        return writer.option("checkpointLocation", str(self._checkpoint)).trigger(**trigger).start()

    def run(self) -> list[bytes]:
        """Read all messages that exist now."""
        query = self.start(availableNow=True)
        assert query.awaitTermination(PATIENCE_S)
        return self.bodies

    @property
    def bodies(self) -> list[bytes]:
        return sorted(body for batch in self.batches for body in batch)

    def _keep(self, frame: DataFrame, _number: int) -> None:
        self.batches.append([row.body for row in frame.select("body").collect()])


@pytest.fixture
def reading(spark: SparkSession, bus: NativeBus, topic: str, tmp_path: Path) -> Any:
    def reading(**options: str) -> StreamQuery:
        return StreamQuery(
            spark, tmp_path / "checkpoint", **{"bus": bus.url, "topic": topic, **options}
        )

    return reading


def produce(client: Any, topic: str, *numbers: int) -> None:
    with client.producer() as producer:
        bodies = [b"%02d" % number for number in numbers]
        producer.produce(topic, bodies, [str(number) for number in numbers]).result()


def reported_lags(client: Any, topic: str) -> list[tuple[str, int]]:
    return [(query["name"], query["lag"]) for query in client.topic_stats(topic)["queries"]]


def test_query_reads_limited_batches_and_continues_after_a_restart(reading, client, topic):
    produce(client, topic, *range(10))
    first = reading(maxRowsPerBatch="4")
    assert first.run() == [b"%02d" % n for n in range(10)]
    assert [len(batch) for batch in first.batches] == [4, 4, 2]
    produce(client, topic, 10, 11)
    assert reading().run() == [b"10", b"11"]
    until(
        lambda: reported_lags(client, topic) == [("kept", 0)],
        "the bus to know the query's end",
        PATIENCE_S,
    )


def test_stream_starts_at_latest_and_continues_after_a_stop(reading, client, topic):
    produce(client, topic, 0)
    first = reading(startingOffsets="latest")
    query = first.start(processingTime="0 seconds")
    until(lambda: query.lastProgress, "the first, empty batch", PATIENCE_S)
    produce(client, topic, 1, 2)
    query.processAllAvailable()
    query.stop()
    produce(client, topic, 3)
    assert reading(startingOffsets="latest").run() == [b"03"]
    assert first.bodies == [b"01", b"02"]


def test_query_fails_if_its_topic_is_dropped(reading, client, topic):
    produce(client, topic, 0)
    stream = reading()
    query = stream.start(processingTime="0 seconds")
    until(lambda: stream.batches, "the first batch", PATIENCE_S)
    client.drop_topic(topic)
    with pytest.raises(StreamingQueryException) as error:
        query.awaitTermination(PATIENCE_S)
    assert f"topic '{topic}' was dropped while this query read it" in str(error.value)
    assert "Traceback" not in str(error.value)
