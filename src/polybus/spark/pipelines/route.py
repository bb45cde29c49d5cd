"""From topics to topics, by SQL: each message once, whatever is killed meanwhile.

A query of Spark from our source to our sink: a batch is published in one transaction with a
stamp, so one that is done again after a kill changes nothing. Messages of one key keep their
order: a shard's part of a batch is never cut over several tasks.
"""

from __future__ import annotations

from typing import Annotated

import typer
from pyspark.sql import SparkSession

from polybus.errors import UsageError
from polybus.spark.bounds import EARLIEST, LATEST, Wanted
from polybus.spark.pipelines import arguments, checks, sql
from polybus.spark.pipelines.running import DEFAULT_EVERY_S, Summary, Tell, activate, follow, silent

WHY = "it is where route keeps how far it has come"


def route(
    spark: SparkSession,
    topic: arguments.Topics,
    *,
    into: arguments.Into = None,
    where: arguments.Where = None,
    select: arguments.Select = None,
    checkpoint: arguments.Checkpoint = None,
    bus: arguments.Bus = None,
    into_bus: arguments.IntoBus = None,
    start: Annotated[
        str,
        typer.Option("--from", metavar="earliest|latest", help="Where a new route begins."),
    ] = EARLIEST,
    accept_loss: arguments.AcceptLoss = False,
    rows_per_batch: arguments.UncutRows = arguments.MOST_UNCUT,
    every: arguments.Every = DEFAULT_EVERY_S,
    once: arguments.Once = False,
    tell: Tell = silent,
) -> Summary:
    """Copy topics into topics, filtered and reshaped by SQL, exactly once."""
    activate(spark)
    if start not in (EARLIEST, LATEST):
        raise UsageError(f"--from is {EARLIEST} or {LATEST}, not {start!r}: replay begins anywhere")
    sql.check(spark, where, select, into)
    place = checks.checkpoint(checkpoint, WHY)
    source = checks.bus_of(bus)
    target = checks.writable_bus(into_bus, source)
    if "*" not in topic:
        checks.topics_of(source, topic)
    wanted = Wanted(topic)
    if into is not None and wanted.covers(into) and source == target:
        raise UsageError(f"--into {into} is read here, too: it would go round for ever")
    rows = (
        spark.readStream.format("polybus")
        .schema(sql.looked_at(spark, where, select))
        .options(bus=source, topic=topic, startingOffsets=start)
        .options(failOnDataLoss=not accept_loss)
        .options(maxRowsPerBatch=min(rows_per_batch, arguments.MOST_UNCUT))
        .options(rowsPerPartition=arguments.MOST_UNCUT)
        .load()
    )
    routed = sql.shaped(rows, where, select)
    if source == target:
        routed = sql.without_loop(routed, wanted)
    writer = (
        routed.writeStream.format("polybus")
        .queryName(f"route {topic}")
        .options(bus=target, checkpointLocation=place)
    )
    if into is not None:
        writer = writer.option("topic", into)
    return follow(writer, once=once, every_s=every, tell=tell)
