"""`route`: copies messages from topics to topics, filtered and changed by SQL, exactly once.

A Spark query from our source to our sink. A batch is published in one commit with a stamp, so a
batch that runs again after a kill changes nothing. Messages of one key keep their order, because
the part of a shard in a batch is never split over several tasks.
"""

from __future__ import annotations

from typing import Annotated

import typer
from pyspark.sql import SparkSession

from polybus.errors import UsageError
from polybus.spark.pipelines import message_sql, pipeline_arguments, preflight
from polybus.spark.pipelines.query_run import (
    DEFAULT_EVERY_S,
    OnProgress,
    Summary,
    activate_session,
    ignore_progress,
    run_query,
)
from polybus.spark.source.read_bounds import EARLIEST, LATEST, TopicSelection

WHY = "route stores its position there"


def route(
    spark: SparkSession,
    topic: pipeline_arguments.Topics,
    *,
    into: pipeline_arguments.Into = None,
    where: pipeline_arguments.Where = None,
    select: pipeline_arguments.Select = None,
    checkpoint: pipeline_arguments.Checkpoint = None,
    bus: pipeline_arguments.Bus = None,
    into_bus: pipeline_arguments.IntoBus = None,
    start: Annotated[
        str,
        typer.Option("--from", metavar="earliest|latest", help="Where a new route begins."),
    ] = EARLIEST,
    accept_loss: pipeline_arguments.AcceptLoss = False,
    rows_per_batch: pipeline_arguments.UncutRows = pipeline_arguments.MOST_UNCUT,
    every: pipeline_arguments.Every = DEFAULT_EVERY_S,
    once: pipeline_arguments.Once = False,
    tell: OnProgress = ignore_progress,
) -> Summary:
    """Copy topics into topics, filtered and reshaped by SQL, exactly once."""
    activate_session(spark)
    if start not in (EARLIEST, LATEST):
        raise UsageError(
            f"--from must be {EARLIEST} or {LATEST}, got {start!r}; replay can start anywhere"
        )
    message_sql.check(spark, where, select, into)
    place = preflight.check_checkpoint(checkpoint, WHY)
    source = preflight.check_bus(bus)
    target = preflight.check_target_bus(into_bus, source)
    if "*" not in topic:
        preflight.find_topics(source, topic)
    wanted = TopicSelection(topic)
    if into is not None and wanted.covers(into) and source == target:
        raise UsageError(
            f"--into {into} must not be a topic that is read here: messages would loop forever"
        )
    rows = (
        spark.readStream.format("polybus")
        .schema(message_sql.needed_columns(spark, where, select))
        .options(bus=source, topic=topic, startingOffsets=start)
        .options(failOnDataLoss=not accept_loss)
        .options(maxRowsPerBatch=min(rows_per_batch, pipeline_arguments.MOST_UNCUT))
        .options(rowsPerPartition=pipeline_arguments.MOST_UNCUT)
        .load()
    )
    routed = message_sql.apply_sql(rows, where, select)
    if source == target:
        routed = message_sql.reject_loops(routed, wanted)
    writer = (
        routed.writeStream.format("polybus")
        .queryName(f"route {topic}")
        .options(bus=target, checkpointLocation=place)
    )
    if into is not None:
        writer = writer.option("topic", into)
    return run_query(writer, once=once, every_s=every, tell=tell)
