"""What a task does: it reads its ranges, and makes sure that it got all of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.types import StructType

from polybus.errors import DoesNotExist, PolybusError, Trimmed
from polybus.spark import python_worker
from polybus.spark.source.log_access import Access, opened
from polybus.spark.source.read_bounds import trimmed
from polybus.spark.source.topic_columns import Shape
from polybus.spark.worker_errors import told_plainly

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.spark.source.partitions import Partition, Range

QUERY_ID = "sql.streaming.queryId"
DESCRIPTION = "spark.job.description"  # begins with the query's name, if it has one
NAME = re.compile(r"^(?!id = )([^\n<]+?)\s*(?:\n|<br/>)\s*id = ")


@dataclass(frozen=True)
class Task:
    """Pickled, and sent to where it runs."""

    bus: str
    schema: StructType
    strict: bool  # failOnDataLoss
    archive: str | None = None

    @property
    def access(self) -> Access:
        return opened(self.bus, self.archive)

    def read(self, partition: Partition) -> Iterator[pa.RecordBatch]:
        python_worker.asked()
        shape = Shape(self.schema)
        with told_plainly():
            for one, batches in self.ranges(partition, shape.needs):
                for batch in batches:
                    yield shape.batch(one.topic, batch)

    def ranges(
        self, partition: Partition, columns: Collection[str] | None = None
    ) -> Iterator[tuple[Range, Iterator[pa.RecordBatch]]]:
        """Each with its rows, of which none is missing; of their columns at least these."""
        access = self.access
        _introduce(access, partition)
        for one in partition.ranges:
            yield one, self._rows(access, one, columns)

    def _rows(
        self, access: Access, wanted: Range, columns: Collection[str] | None
    ) -> Iterator[pa.RecordBatch]:
        at = wanted.start
        while at < wanted.end:
            try:
                for batch in access.read(
                    wanted.topic, wanted.shard, at, wanted.end, columns=columns
                ):
                    at = self._follows(wanted, at, batch)
                    yield batch
                if at < wanted.end:
                    self._lose(wanted, at, wanted.end)
                    return
            except Trimmed as error:
                start = max(error.start, _start_of(access, wanted))
                self._lose(wanted, at, start)
                at = max(at + 1, start)
            except DoesNotExist:
                self._lose(wanted, at, wanted.end)
                return

    def _follows(self, wanted: Range, at: int, batch: pa.RecordBatch) -> int:
        """Where the batch ends; there must be nothing missing before it, nor in it."""
        offsets = batch.column("offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        if first != at or last - first + 1 != batch.num_rows:
            self._lose(wanted, at, last)
        return int(last) + 1

    def _lose(self, wanted: Range, start: int, end: int) -> None:
        if self.strict:
            raise trimmed(wanted.topic, wanted.shard, start, end)


def _start_of(access: Access, wanted: Range) -> int:
    """Where its shard begins now; behind it, if there is none any more."""
    try:
        return access.shards(wanted.topic)[wanted.shard].start
    except DoesNotExist:
        return wanted.end


def _introduce(access: Access, partition: Partition) -> None:
    """Tells the bus Spark's name for the query: tasks know it, the driver's side does not."""
    context = TaskContext.get()
    if not partition.introduces or context is None:
        return
    name = _query_name(context.getLocalProperty(DESCRIPTION) or "")
    name = name or context.getLocalProperty(QUERY_ID) or ""
    for topic in partition.introduces:
        try:
            access.tell(partition.query, name, topic, {})
        except PolybusError:
            return  # a bus that cannot be told; reading goes on


def _query_name(description: str) -> str:
    found = NAME.match(description)
    return found[1] if found else ""
