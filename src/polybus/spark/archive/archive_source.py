"""The source of the archiving query: its tasks write rows to files and yield one row per file.

Rows therefore do not travel to Java and back, while Spark still manages positions, batches and
retries of tasks. The manifests decide which rows are still to be archived, not Spark's checkpoint:
a batch that runs again finds its rows in the archive.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StringType, StructField, StructType

from polybus.errors import Conflict
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import read_manifest
from polybus.spark.archive.parquet_files import TopicFileWriter, WrittenFile
from polybus.spark.python_worker import hide_traceback
from polybus.spark.source.partitions import OffsetRange, Partition
from polybus.spark.source.query_position import QueryPosition
from polybus.spark.source.read_bounds import Offsets
from polybus.spark.source.stream_reader import StreamReader
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions

FORMAT = "polybus_archive"
FILES = StructType([StructField("written", StringType(), nullable=False)])
ARROW_FILES = pa.schema([pa.field("written", pa.utf8(), nullable=False)])
OPTIONS = (*SOURCE_OPTIONS, "folder", "tasks")
# The most rows of a task; files are also limited by their size.
MOST_ROWS = 2_000_000
# Fewer rows get no task and file of their own; archiving them takes a third of a second.
FEW_ROWS = 250_000


class ArchiveSource(DataSource):
    """Data source of the archiving query."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return FILES

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        with hide_traceback():
            return ArchiveStreamReader(SparkOptions(self.options, OPTIONS))


class ArchiveStreamReader(StreamReader):
    """Stream reader whose tasks write files."""

    def __init__(self, options: SparkOptions) -> None:
        super().__init__(options, SCHEMA)
        self._folder = ArchiveFolder(options.required("folder", "/archive"))
        self._tasks = options.count("tasks") or 1

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return the position at the end of the archive, whatever the checkpoint says."""
        first = QueryPosition.parse(super().initialOffset())
        ends = {topic: self._archived(topic, shards) for topic, shards in first.offsets.items()}
        self._initial = QueryPosition(ends, first.query, is_initial=True)
        return self._initial.as_json()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Write the files of a partition. Yields one row per file, when the file is on disk."""
        assert isinstance(partition, Partition)
        with hide_traceback():
            for written in self._write(partition):
                yield pa.RecordBatch.from_pydict({"written": [written.as_text()]}, ARROW_FILES)

    def _archived(self, topic: str, shards: dict[int, int]) -> dict[int, int]:
        """Return the archived end of each shard; its start if nothing of it is archived."""
        manifest = read_manifest(self._folder, topic)
        return {shard: manifest.end(shard) or start for shard, start in shards.items()}

    def _readable_ranges(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Return the unarchived parts of the ranges. The log may be trimmed before them."""
        ends: Offsets = {}
        for topic in {wanted.topic for wanted in ranges}:
            in_log = self._shards(topic, known=True)
            ends[topic] = self._archived(topic, {n: shard.start for n, shard in in_log.items()})
        unarchived = []
        for wanted in ranges:
            end = ends[wanted.topic].get(wanted.shard, 0)
            if wanted.start > end and self._strict:
                raise Conflict(
                    f"this checkpoint belongs to another archive: it continues at offset "
                    f"{wanted.start} in shard {wanted.shard} of topic {wanted.topic!r}, which is "
                    f"archived up to {end} here; use another --checkpoint"
                )
            if wanted.end > end:
                unarchived.append(wanted._replace(start=max(wanted.start, end)))
        return super()._readable_ranges(unarchived)

    def _cut(self, ranges: list[OffsetRange]) -> list[Partition]:
        return plan_tasks(ranges, self._tasks)

    def _write(self, partition: Partition) -> Iterator[WrittenFile]:
        """Write the rows of a partition, topic by topic. Yields the files that are on disk."""
        parts = self._task.read_ranges(partition)
        for topic, ranges in groupby(parts, key=lambda part: part[0].topic):
            writer = TopicFileWriter(self._folder, topic)
            try:
                for wanted, batches in ranges:
                    yield from writer.add(wanted, batches)
                yield from writer.finish()
            except BaseException:
                writer.discard()
                raise


def plan_tasks(ranges: list[OffsetRange], tasks: int) -> list[Partition]:
    """Return partitions of equal size, as many as tasks run at a time: few, large files."""
    total = sum(wanted.rows for wanted in ranges)
    parts = max(-(-total // MOST_ROWS), min(tasks, -(-total // FEW_ROWS)), 1)
    partitions: list[list[OffsetRange]] = [[] for _ in range(parts)]
    seen = 0
    for wanted in sorted(ranges):
        start = wanted.start
        while start < wanted.end:
            part = seen * parts // total
            room = -(-total * (part + 1) // parts) - seen
            piece = wanted._replace(start=start, end=min(wanted.end, start + room))
            partitions[part].append(piece)
            seen += piece.rows
            start = piece.end
    return [Partition(tuple(part)) for part in partitions if part]
