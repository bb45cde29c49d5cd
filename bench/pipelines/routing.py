"""The same query twice: from topic to topic, and from Parquet files to Parquet files."""

import shutil
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from bench.harness.quiet import OWN_PIDS
from bench.harness.results import RATE, Values
from bench.pipelines.cases import SELECT
from bench.spark.engine import own_pids
from polybus.native import Client
from polybus.spark.pipelines import message_sql
from polybus.spark.pipelines.route import route
from polybus.spark.source.topic_schema import SCHEMA

_numbers = count(1)
WARMING = 3  # runs before the first measured one, until Java's compiler has finished


class Query:
    """A query that reads all rows and ends. Each run has a new checkpoint."""

    def __init__(
        self, name: str, rows: int, run: Callable[[Path], object], folder: Path, pid: int | None
    ) -> None:
        self.name, self.pid = name, pid
        self._rows, self._run, self._folder = rows, run, folder

    def calibrate(self, wanted_s: float) -> None:
        for _ in range(WARMING):
            self.measure()

    def measure(self) -> Values:
        OWN_PIDS.update(own_pids())
        folder = self._folder / f"checkpoint-{next(_numbers)}"
        started_s = time.perf_counter()
        try:
            self._run(folder)
            return {RATE.key: self._rows / (time.perf_counter() - started_s)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def topic_to_topic(
    spark: Any, client: Client, url: str, topic: str, where: str | None
) -> Callable[[Path], object]:
    """Return a route to a new topic. It drops the last one: the store must not grow."""
    last: list[str] = []

    def run(checkpoint: Path) -> None:
        if last:
            client.drop_topic(last.pop())
        last.append(f"routed-{next(_numbers)}")
        options: dict[str, Any] = {
            "where": where,
            "select": SELECT,
            "checkpoint": str(checkpoint),
            "once": True,
        }
        route(spark, topic, into=last[0], bus=url, **options)

    return run


def parquet_to_parquet(
    spark: Any, source: Path, where: str | None, folder: Path
) -> Callable[[Path], object]:
    def run(checkpoint: Path) -> None:
        written = folder / "routed"
        shutil.rmtree(written, ignore_errors=True)
        rows = spark.readStream.schema(SCHEMA).parquet(str(source))
        query = (
            message_sql.apply_sql(rows, where, SELECT)
            .writeStream.format("parquet")
            .options(path=str(written), checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    return run
