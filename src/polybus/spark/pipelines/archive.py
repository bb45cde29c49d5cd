"""`archive`: copies topics to Parquet files, each message exactly once.

A streaming query whose tasks write files (`archive_source.py`) and whose driver commits them to
the archive (`archive_committer.py`). The archived offsets are stored with the files and change in
the same step, so Spark's checkpoint may be lost or outdated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Annotated

import typer
from pyspark.sql import DataFrame, SparkSession

from polybus.spark.archive import file_compaction
from polybus.spark.archive.archive_committer import ArchiveCommitter
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.archive_source import FORMAT, ArchiveSource
from polybus.spark.archive.manifest import list_archived_topics, read_manifest
from polybus.spark.archive.parquet_files import WrittenFile
from polybus.spark.pipelines import pipeline_arguments, preflight
from polybus.spark.pipelines.query_run import OnProgress, Summary, ignore_progress, run_query
from polybus.spark.source.log_access import LogAccess, open_log_access
from polybus.spark.source.read_bounds import TopicSelection

ROWS_PER_BATCH = 8_000_000  # limits the time until the first files are committed
EVERY_S = 10.0  # shorter intervals make many small files

Target = Annotated[
    str, typer.Argument(metavar="FOLDER", help="The archive. An empty folder becomes an archive.")
]


def archive(
    spark: SparkSession,
    topic: pipeline_arguments.Topics,
    folder: Target,
    *,
    bus: pipeline_arguments.Bus = None,
    once: pipeline_arguments.Once = False,
    every: pipeline_arguments.Every = EVERY_S,
    checkpoint: pipeline_arguments.Checkpoint = None,
    rows_per_batch: pipeline_arguments.RowsPerBatch = ROWS_PER_BATCH,
    accept_loss: pipeline_arguments.AcceptLoss = False,
    tell: OnProgress = ignore_progress,
) -> Summary:
    """Archive topics as Parquet: by topic and date, compacted, each message once."""
    source, wanted, place = preflight.check_bus(bus), TopicSelection(topic), ArchiveFolder(folder)
    for name in wanted.names:
        preflight.check_topic(source, name)
    place.prepare()
    kept = preflight.check_checkpoint(checkpoint or str(place.checkpoint(wanted.text)))
    run = ArchiveRun(spark, place, gaps=accept_loss)
    spark.dataSource.register(ArchiveSource)
    query = (
        spark.readStream.format(FORMAT)
        .options(bus=source, topic=topic, folder=str(place.path))
        .options(maxRowsPerBatch=rows_per_batch, failOnDataLoss=not accept_loss)
        .options(tasks=spark.sparkContext.defaultParallelism)
        .load()
        .writeStream.foreachBatch(run.add)
        .option("checkpointLocation", kept)
        .queryName(f"archive {wanted.text}")
    )
    access = open_log_access(source)
    with run.hold_topics(wanted.find_topics(access), access):
        summary = run_query(
            query, once=once, every_s=every, tell=tell, rows=lambda: run.committer.rows
        )
        if once and summary.stopped_by is None:
            # No later batch can be merged with the small files of this run. Only topics that this
            # run has locked: another run may add to the others.
            few = file_compaction.FEW, file_compaction.TINY_BYTES
            file_compaction.compact(spark, place, run.committer.locks.held, *few)
    # Files of all runs: compaction merges those of earlier ones.
    archived = [name for name in list_archived_topics(place) if wanted.covers(name)]
    files = sum(len(read_manifest(place, name).files) for name in archived)
    summary.facts = {"bytes": run.committer.size_bytes, "files in all": files}
    return summary


class ArchiveRun:
    """The driver's part of the query: commits and compacts the files of each batch."""

    def __init__(self, spark: SparkSession, folder: ArchiveFolder, *, gaps: bool) -> None:
        self._spark, self._folder = spark, folder
        self._busy = Lock()
        self.committer = ArchiveCommitter(folder, gaps=gaps)

    @contextmanager
    def hold_topics(self, topics: list[str], access: LogAccess) -> Iterator[None]:
        """Hold the locks of topics. Waits for a running batch before it releases them."""
        try:
            for topic in topics:
                self.committer.begin(topic, access)
            yield
        finally:
            with self._busy:
                self.committer.locks.release()

    def add(self, batch: DataFrame, number: int) -> None:
        """Commit a batch. Spark calls this in its own thread."""
        with self._busy:
            written = [WrittenFile.parse(row.written) for row in batch.collect()]
            grown = self.committer.add(written)
            file_compaction.compact(self._spark, self._folder, grown)
