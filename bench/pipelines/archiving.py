"""Writes the same rows to an archive and to Parquet, and reads both."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.spark.filling import SHARDS, add
from polybus.native import Client
from polybus.spark.pipelines.archive import archive
from polybus.spark.source.topic_schema import SCHEMA

HISTORY = "history"
ARCHIVED = 0.95  # of the rows of a union; the rest is in the log


def to_archive(spark: Any, url: str, topic: str, folder: Path) -> Callable[[Path], object]:
    """Return a run that archives the whole topic to a new folder."""

    def run(checkpoint: Path) -> None:
        place = folder / "archived"
        shutil.rmtree(place, ignore_errors=True)
        archive(spark, topic, str(place), bus=url, once=True, checkpoint=str(checkpoint))

    return run


def stream_to_parquet(spark: Any, source: Path, folder: Path) -> Callable[[Path], object]:
    """Return the same copy as a stream, which also is planned and writes a checkpoint."""

    def run(checkpoint: Path) -> None:
        shutil.rmtree(folder / "streamed", ignore_errors=True)
        query = (
            spark.readStream.schema(SCHEMA)
            .parquet(str(source))
            .writeStream.format("parquet")
            .options(path=str(folder / "streamed"), compression="zstd")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    return run


def batch_to_parquet(spark: Any, source: Path, folder: Path) -> Callable[[Path], object]:
    def run(checkpoint: Path) -> None:
        rows = spark.read.parquet(str(source))
        rows.write.mode("overwrite").option("compression", "zstd").parquet(str(folder / "copied"))

    return run


def keep_history(spark: Any, url: str, messages: int, folder: Path) -> dict[str, str]:
    """Make a topic whose log has only the newest rows. Returns the options that read all of it."""
    place = folder / "union"
    old = int(messages * ARCHIVED)
    with Client(url) as client:
        client.create_topic(HISTORY, SHARDS)
        add(client, HISTORY, old)
        archive(spark, HISTORY, str(place), bus=url, once=True)
        client.trim(
            HISTORY, {shard["shard"]: shard["end"] for shard in client.bounds(HISTORY)["shards"]}
        )
        add(client, HISTORY, messages - old)
    return {"bus": url, "archive": str(place)}
