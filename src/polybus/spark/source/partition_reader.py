"""The reading task: reads the ranges of its partition and checks that no message is missing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from polybus.errors import DoesNotExist, PolybusError, Trimmed
from polybus.spark import python_worker
from polybus.spark.python_worker import QUERY_ID, hide_traceback
from polybus.spark.source.log_access import LogAccess, open_log_access
from polybus.spark.source.partitions import OffsetRange, Partition
from polybus.spark.source.read_bounds import trimmed_error
from polybus.spark.source.topic_schema import BatchBuilder

DESCRIPTION = "spark.job.description"  # begins with the query's name, if the query has one
NAME = re.compile(r"^(?!id = )([^\n<]+?)\s*(?:\n|<br/>)\s*id = ")


@dataclass(frozen=True)
class PartitionReader:
    """Reads a partition. Pickled and sent to the executors."""

    bus: str
    schema: StructType
    strict: bool  # failOnDataLoss
    archive: str | None = None

    @property
    def access(self) -> LogAccess:
        return open_log_access(self.bus, self.archive)

    def read(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        """Yield batches with the columns of `schema`."""
        python_worker.note_request()
        builder = BatchBuilder(self.schema)
        with hide_traceback():
            for wanted, batches in self.read_ranges(partition, builder.needed_columns):
                for batch in batches:
                    yield builder.build_batch(wanted.topic, batch)

    def read_ranges(
        self, partition: Partition, columns: Collection[str] | None = None
    ) -> Iterator[tuple[OffsetRange, Iterator[pa.RecordBatch]]]:
        """Yield each range with its rows, without gaps. Batches have at least `columns`."""
        access, context = self.access, TaskContext.get()
        if partition.announced_topics and context is not None:
            # Tasks know the query's name; the driver's Python process does not.
            match = NAME.match(context.getLocalProperty(DESCRIPTION) or "")
            name = match[1] if match else context.getLocalProperty(QUERY_ID) or ""
            try:
                for topic in partition.announced_topics:
                    access.report_progress(partition.query, name, topic, {})
            except PolybusError:
                pass  # lag is only informative; reading continues
        for wanted in partition.ranges:
            yield wanted, self._read_range(access, wanted, columns)

    def _read_range(
        self, access: LogAccess, wanted: OffsetRange, columns: Collection[str] | None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range. Lost rows raise `Trimmed`, or are skipped unless `strict`."""
        topic, shard, at = wanted.topic, wanted.shard, wanted.start
        while at < wanted.end:
            try:
                for batch in access.read(topic, shard, at, wanted.end, columns):
                    offsets = batch.column("offset")
                    first, last = offsets[0].as_py(), offsets[-1].as_py()
                    # Offsets of a shard are dense, so first, last and count show any gap.
                    if first != at or last - first + 1 != batch.num_rows:
                        self._check_loss(wanted, at, last)
                    at = last + 1
                    yield batch
                resumes = wanted.end  # the log ends before the range, so the rest is lost
            except Trimmed as error:
                try:
                    resumes = max(error.start, access.shards(topic)[shard].start)
                except DoesNotExist:
                    resumes = max(error.start, wanted.end)
            except DoesNotExist:
                resumes = wanted.end
            if at < wanted.end:
                self._check_loss(wanted, at, resumes)
                # The position must advance even if the bus reports a start that is not after it.
                at = max(at + 1, resumes)

    def _check_loss(self, wanted: OffsetRange, start: int, end: int) -> None:
        """Raise `Trimmed` for offsets `start` to `end` if `failOnDataLoss` is set."""
        if self.strict:
            raise trimmed_error(wanted.topic, wanted.shard, start, end)
