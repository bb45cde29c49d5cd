"""`archive`: topics → Parquet, each row once, whatever is killed.

A streaming query whose tasks write files (`archives/source.py`) and whose driver makes them a
part of the archive (`archives/adding.py`). How far a shard is archived stands beside its files
and becomes true in the same step: Spark's checkpoint may be lost, or be old.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Annotated

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
from polybus.spark.source.log_access import open_log_access
from polybus.spark.source.read_bounds import TopicSelection

if TYPE_CHECKING:
    from polybus.spark.source.log_access import LogAccess

ROWS_PER_BATCH = 8_000_000  # so that something is archived now and then
EVERY_S = 10.0  # more often would make many small files

Target = Annotated[
    str, typer.Argument(metavar="FOLDER", help="The archive; an empty folder becomes one.")
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
    work = ArchiveRun(spark, place, gaps=accept_loss)
    spark.dataSource.register(ArchiveSource)
    query = (
        spark.readStream.format(FORMAT)
        .options(bus=source, topic=topic, folder=str(place.path))
        .options(maxRowsPerBatch=rows_per_batch, failOnDataLoss=not accept_loss)
        .options(tasks=spark.sparkContext.defaultParallelism)
        .load()
        .writeStream.foreachBatch(work.add)
        .option("checkpointLocation", kept)
        .queryName(f"archive {wanted.text}")
    )
    with work.hold_topics(wanted.find_topics(open_log_access(source)), open_log_access(source)):
        summary = run_query(query, once=once, every_s=every, tell=tell, rows=lambda: work.rows)
        if once and summary.stopped_by is None:
            work.compact_all()
    summary.facts = {"bytes": work.size_bytes, "files in all": work.files_of(wanted)}
    return summary


class ArchiveRun:
    """What the driver does with each batch, and what has come of it."""

    def __init__(self, spark: SparkSession, folder: ArchiveFolder, *, gaps: bool) -> None:
        self._spark, self._folder = spark, folder
        self._adding = ArchiveCommitter(folder, gaps=gaps)
        self._busy = Lock()

    @contextmanager
    def hold_topics(self, topics: list[str], access: LogAccess) -> Iterator[None]:
        """Meanwhile nobody else adds to these. A batch that is stopped is waited for."""
        try:
            for topic in topics:
                self._adding.begin(topic, access)
            yield
        finally:
            with self._busy:
                self._adding.end()

    def add(self, batch: DataFrame, number: int) -> None:
        """Called by Spark, in a thread of its own."""
        with self._busy:
            written = [WrittenFile.parse(row.written) for row in batch.collect()]
            grown = self._adding.add(written)
            file_compaction.compact(self._spark, self._folder, grown)

    def compact_all(self) -> None:
        """At the end of a run: no more is to come that could be merged with it. Topics that are
        not ours may be somebody else's, who adds to them now."""
        few = file_compaction.FEW, file_compaction.TINY_BYTES
        file_compaction.compact(self._spark, self._folder, self._adding.topics, *few)

    def files_of(self, wanted: TopicSelection) -> int:
        """Of all runs: those of earlier ones are merged with those of this one."""
        topics = (one for one in list_archived_topics(self._folder) if wanted.covers(one))
        return sum(len(read_manifest(self._folder, one).files) for one in topics)

    @property
    def rows(self) -> int:
        return self._adding.rows

    @property
    def size_bytes(self) -> int:
        return self._adding.size_bytes
