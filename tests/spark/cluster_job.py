"""The driver of the cluster test: `cluster_job.py MASTER BUS CHECKPOINT`.

Writes rows whose key is the working folder of their task, reads them back, and copies them to
another topic by a stream.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql.functions import udf
from pyspark.sql.types import StringType

import polybus.spark
from polybus.spark.spark_session import class_archive_flags

SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "600m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    + class_archive_flags(),
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    "spark.sql.shuffle.partitions": "2",
}
ROWS = 20_000


def place(_):  # without hints, which Spark would interpret
    """Return the working folder of the task."""
    return os.getcwd()  # noqa: PTH109


def main(master: str, bus: str, checkpoint: str) -> None:
    spark = polybus.spark.session(master, name="cluster", settings=SETTINGS)
    rows = spark.range(0, ROWS, 1, 8).selectExpr("cast(id as string) as body")
    placed = rows.withColumn("shard_key", udf(place, StringType())("body"))
    placed.write.format("polybus").mode("append").options(bus=bus, topic="written").save()

    options = {"bus": bus, "topic": "written", "rowsPerPartition": "5000"}
    read = spark.read.format("polybus").options(**options).load()
    (total,) = read.selectExpr("sum(cast(cast(body as string) as long))").collect()[0]
    print("read", total)  # noqa: T201

    stream = spark.readStream.format("polybus").options(**options).load()
    query = (
        stream.select("shard_key", "body")
        .writeStream.format("polybus")
        .options(bus=bus, topic="copied", checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
