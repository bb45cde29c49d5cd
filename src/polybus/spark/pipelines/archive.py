"""`archive`: topics → Parquet, each row once, whatever is killed.

A streaming query whose tasks write files (`archives/source.py`) and whose driver makes them a
part of the archive (`archives/adding.py`). How far a shard is archived stands beside its files
and becomes true in the same step: Spark's checkpoint may be lost, or be old.
"""

from __future__ import annotations

from typing import Annotated

import typer
from pyspark.sql import DataFrame, SparkSession

from polybus.spark.access import opened
from polybus.spark.archives.adding import Adding
from polybus.spark.archives.compaction import compact
from polybus.spark.archives.folder import Folder
from polybus.spark.archives.source import FORMAT, ArchiveSource
from polybus.spark.archives.writing import Written
from polybus.spark.bounds import Wanted
from polybus.spark.options import Options
from polybus.spark.pipelines import arguments
from polybus.spark.pipelines.running import Summary, Tell, follow, silent

ROWS_PER_BATCH = 8_000_000  # so that something is archived now and then
EVERY_S = 10.0  # more often would make many small files

Target = Annotated[
    str, typer.Argument(metavar="FOLDER", help="The archive; an empty folder becomes one.")
]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Pass over what was trimmed before it was archived.")
]
RowsPerBatch = Annotated[
    int, typer.Option("--rows-per-batch", metavar="N", min=1, help="The most of one batch.")
]


def archive(
    spark: SparkSession,
    topic: arguments.Topics,
    folder: Target,
    *,
    bus: arguments.Bus = None,
    once: arguments.Once = False,
    every: arguments.Every = EVERY_S,
    checkpoint: arguments.Checkpoint = None,
    rows_per_batch: RowsPerBatch = ROWS_PER_BATCH,
    accept_loss: AcceptLoss = False,
    tell: Tell = silent,
) -> Summary:
    """Archive topics as Parquet: by topic and date, compacted, each message once."""
    wanted, place = Wanted(topic), Folder(folder)
    url = Options({} if bus is None else {"bus": bus}, ("bus",)).bus
    access = opened(url)
    topics = wanted.find(access)
    if not topics and not wanted.patterns:
        raise wanted.nothing()
    for name in topics:
        access.shards(name)  # one that is not there makes no archive
    place.prepare()
    adding = Adding(place, gaps=accept_loss)
    try:
        for name in topics:
            adding.begin(name, access)
        compacted = 0

        def add(batch: DataFrame, number: int) -> None:
            nonlocal compacted
            grown = adding.add([Written.parse(row.written) for row in batch.collect()])
            compacted += compact(spark, place, grown)

        spark.dataSource.register(ArchiveSource)
        query = (
            spark.readStream.format(FORMAT)
            .options(bus=url, topic=topic, folder=str(place.path))
            .options(maxRowsPerBatch=rows_per_batch, failOnDataLoss=not accept_loss)
            .options(tasks=spark.sparkContext.defaultParallelism)
            .load()
            .writeStream.foreachBatch(add)
            .option("checkpointLocation", checkpoint or str(place.checkpoint(wanted.text)))
            .queryName("polybus archive")
        )
        summary = follow(query, once=once, every_s=every, tell=tell, rows=lambda: adding.rows)
        if once and summary.stopped_by is None:
            compacted += compact(spark, place, wanted.find(access), least=2)
    finally:
        adding.end()
    summary.facts = {"files": adding.files - compacted, "bytes": adding.size_bytes}
    return summary
