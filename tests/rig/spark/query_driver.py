"""A query from one topic to two others, in a driver process that tests kill.

    python -m tests.rig.spark.query_driver '{"bus": …, "checkpoint": …}'

For each line on stdin it runs the query once over all available rows, several rows per epoch, and
prints one line of JSON. The query copies rows unchanged: topic `in` is the reference, and the
outputs `out.0` and `out.1` must have its rows by even and odd number. Each run may have other
partition sizes, so that a replayed epoch is planned differently.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

import polybus.spark
from tests.rig.closing import Closing
from tests.rig.spark import kill_points

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCE, OUTPUTS = "in", ("out.0", "out.1")
STOP_S = 60.0
MARK = "query: "  # before the line of JSON, because other code may write to stdout
SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "600m",
    # Several batches per task, so that a task can be killed between two.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4",
    # A driver runs for seconds: no optimized compilation.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@dataclass(frozen=True)
class Copy:
    """Options of the query. `retries` is how often Spark tries a task."""

    bus: str
    checkpoint: str
    rows_per_batch: int = 40
    rows_per_partition: int = 20
    retries: int = 4
    producer: str | None = None
    on_new: str | None = None


def start(session: SparkSession, copy: Copy) -> StreamingQuery:
    rows = (
        session.readStream.format("polybus")
        .option("bus", copy.bus)
        .option("topic", SOURCE)
        .option("maxRowsPerBatch", copy.rows_per_batch)
        .option("rowsPerPartition", copy.rows_per_partition)
        .load()
    )
    routed = rows.selectExpr(
        "body",
        "shard_key",
        "headers",
        "concat('out.', cast(cast(body as string) as int) % 2) topic",
    )
    writer = (
        routed.writeStream.format("polybus")
        .option("bus", copy.bus)
        .option("checkpointLocation", copy.checkpoint)
        .trigger(availableNow=True)
    )
    if copy.producer is not None:
        writer = writer.option("producerId", copy.producer)
    if copy.on_new is not None:
        writer = writer.option("onNewCheckpoint", copy.on_new)
    return writer.start()


def main() -> None:
    copy = Copy(**json.loads(sys.argv[1]))
    session = polybus.spark.session(f"local[2,{copy.retries}]", name="copy", settings=SETTINGS)
    java = session.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    for _ in sys.stdin:
        # At each run, because several drivers may be running.
        kill_points.set_driver_processes(java, os.getpid())
        print(MARK + json.dumps(run(session, copy)), flush=True)  # noqa: T201


def run(session: SparkSession, copy: Copy) -> dict[str, Any]:
    query = start(session, copy)
    error = None
    try:
        query.awaitTermination()
    except PySparkException as exception:
        error = str(exception)
    return {"epochs": [progress["batchId"] for progress in query.recentProgress], "error": error}


# --- in the test


class DriverProcess(Closing):
    """A running driver in its own process group, which ends with it. It reads lines from stdin."""

    def __init__(self, environment: Mapping[str, str], module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def send(self, line: str = "") -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def ended(self) -> dict[str, Any] | None:
        """Wait for the next result; None if the driver died."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                result: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return result
        return None

    def close(self) -> int:
        """End the driver if it is running. Returns its exit code."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        try:
            return self._process.wait(STOP_S)
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # Java and workers
            except ProcessLookupError:
                pass
            self._process.wait()


class Driver(DriverProcess):
    """A driver that runs the query once per line."""

    def __init__(self, copy: Copy, environment: Mapping[str, str]) -> None:
        super().__init__(environment, __name__, json.dumps(asdict(copy)))

    def run(self) -> dict[str, Any] | None:
        """Run the query. Returns its result, None if the driver died."""
        self.send()
        return self.ended()


if __name__ == "__main__":
    main()
