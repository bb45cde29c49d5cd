"""The reading task: reads the ranges of its partition and checks that no message is missing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.types import StructType

from polybus.errors import DoesNotExist, PolybusError, Trimmed
from polybus.spark import python_worker
from polybus.spark.python_worker import hide_traceback
from polybus.spark.source.log_access import LogAccess, open_log_access
from polybus.spark.source.read_bounds import trimmed_error
from polybus.spark.source.topic_schema import BatchBuilder

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.spark.source.partitions import OffsetRange, Partition

QUERY_ID = "sql.streaming.queryId"
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
            for one, batches in self.ranges(partition, builder.needed_columns):
                for batch in batches:
                    yield builder.build_batch(one.topic, batch)

    def ranges(
        self, partition: Partition, columns: Collection[str] | None = None
    ) -> Iterator[tuple[OffsetRange, Iterator[pa.RecordBatch]]]:
        """Yield each range with its rows, without gaps. Batches have at least `columns`."""
        access = self.access
        _announce_query(access, partition)
        for one in partition.ranges:
            yield one, self._rows(access, one, columns)

    def _rows(
        self, access: LogAccess, wanted: OffsetRange, columns: Collection[str] | None
    ) -> Iterator[pa.RecordBatch]:
        at = wanted.start
        while at < wanted.end:
            try:
                for batch in access.read(
                    wanted.topic, wanted.shard, at, wanted.end, columns=columns
                ):
                    at = self._check_contiguous(wanted, at, batch)
                    yield batch
                # The log ends before the range, so the rest is lost.
                if at < wanted.end:
                    self._check_loss(wanted, at, wanted.end)
                    return
            except Trimmed as error:
                start = max(error.start, _start_of(access, wanted))
                self._check_loss(wanted, at, start)
                # The position must advance even if the bus reports a start that is not after it.
                at = max(at + 1, start)
            except DoesNotExist:
                self._check_loss(wanted, at, wanted.end)
                return

    def _check_contiguous(self, wanted: OffsetRange, at: int, batch: pa.RecordBatch) -> int:
        """Return the offset after the batch. Messages must not be missing before it or in it."""
        offsets = batch.column("offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        # Offsets of a shard are dense, so first, last and count show any gap.
        if first != at or last - first + 1 != batch.num_rows:
            self._check_loss(wanted, at, last)
        return int(last) + 1

    def _check_loss(self, wanted: OffsetRange, start: int, end: int) -> None:
        """Raise `Trimmed` for offsets `start` to `end` if `failOnDataLoss` is set."""
        if self.strict:
            raise trimmed_error(wanted.topic, wanted.shard, start, end)


def _start_of(access: LogAccess, wanted: OffsetRange) -> int:
    """Return the first offset of the range's shard; the range's end if the topic was dropped."""
    try:
        return access.shards(wanted.topic)[wanted.shard].start
    except DoesNotExist:
        return wanted.end


def _announce_query(access: LogAccess, partition: Partition) -> None:
    """Report the query's name to the bus. Tasks know the name; the driver's Python process does
    not.
    """
    context = TaskContext.get()
    if not partition.announced_topics or context is None:
        return
    name = _query_name(context.getLocalProperty(DESCRIPTION) or "")
    name = name or context.getLocalProperty(QUERY_ID) or ""
    for topic in partition.announced_topics:
        try:
            access.report_progress(partition.query, name, topic, {})
        except PolybusError:
            return  # lag is only informative; reading continues


def _query_name(description: str) -> str:
    found = NAME.match(description)
    return found[1] if found else ""
