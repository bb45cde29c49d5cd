"""A topic followed: `spark.readStream.format("polybus")`.

Lives in a Python process beside the driver, one for each run of a query. Its own state is
small: where "latest" was, where an AvailableNow query ends, what the bus was told last.
All else is in the positions that Spark keeps.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from polybus.errors import UsageError
from polybus.spark import python_worker
from polybus.spark.source import topic_columns
from polybus.spark.source.available_offsets import AvailableOffsets
from polybus.spark.source.partition_reader import PartitionReader
from polybus.spark.source.partitions import OffsetRange, Partition, plan_partitions, ranges_between
from polybus.spark.source.progress_reporter import ProgressReporter
from polybus.spark.source.query_position import QueryPosition
from polybus.spark.source.read_bounds import EARLIEST, ReadBound, TopicSelection
from polybus.spark.worker_errors import hide_traceback

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from polybus.spark.spark_options import SparkOptions

BATCH_ONLY = ("endingOffsets", "endingTimestamp")


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SparkOptions, schema: StructType) -> None:
        topic_columns.check_schema(schema)
        for name in BATCH_ONLY:
            if options.text(name) is not None:
                raise UsageError(f"leave option {name} out: it is for spark.read, streams go on")
        wanted = TopicSelection(options.required("topic", "orders"))
        strict = options.flag("failOnDataLoss", default=True)
        self._start = ReadBound.parse(options, "starting", EARLIEST)
        self._max_rows = options.count("maxRowsPerBatch")
        self._max_bytes = options.count("maxBytesPerBatch")
        self._rows_per_partition = options.count("rowsPerPartition")
        self._task = PartitionReader(options.bus, schema, strict, options.archive)
        self._ahead = AvailableOffsets(options.bus, wanted, strict=strict, archive=options.archive)
        self._progress = ProgressReporter()
        self._initial: QueryPosition | None = None
        self._is_introduced = False

    # --- what Spark asks beside the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Spark may ask again: it is the same place then."""
        with hide_traceback():
            if self._initial is None:
                first = self._ahead.initial_offsets(self._start)
                self._initial = QueryPosition(first, uuid.uuid4().hex, is_initial=True)
            return self._initial.as_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        with hide_traceback():
            self._ahead.fix_end()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Spark knows one limit at a time; if both were given, both hold all the same."""
        if self._max_rows is not None:
            return ReadMaxRows(self._max_rows)
        if self._max_bytes is not None:
            return ReadMaxBytes(self._max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """`start` itself if there is nothing: Spark then makes no batch.

        A query's first batch is made in any case: so the checkpoint holds where it began.
        """
        with hide_traceback():
            position = QueryPosition.parse(start)
            starts, ends = self._ahead.find_available(position)
            bounds = (self._max_rows, self._max_bytes)
            if isinstance(limit, ReadAllAvailable):
                bounds = (None, None)
            reached = {topic: dict(shards) for topic, shards in starts.items()}
            for one in self._ahead.admit(starts, ends, *bounds):
                reached[one.topic][one.shard] = one.end
            is_idle = reached == position.offsets and not position.is_initial
            self._report_progress(position, now=is_idle)
            return start if is_idle else position.advanced(reached, starts).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        return (
            None
            if self._ahead.last_ends is None
            else QueryPosition(self._ahead.last_ends).as_json()
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Partition]:
        with hide_traceback():
            first, last = QueryPosition.parse(start), QueryPosition.parse(end)
            self._ahead.check(last)
            ranges = self._readable_ranges(ranges_between(first.starts(last), last.offsets))
            if not ranges:
                return []
            partitions = self._cut(ranges)
            if not self._is_introduced:
                partitions[0].query, partitions[0].announced_topics = (
                    last.query,
                    tuple(last.offsets),
                )
                self._is_introduced = True
            return partitions

    def commit(self, end: dict[str, Any]) -> None:
        self._report_progress(QueryPosition.parse(end))

    def stop(self) -> None:
        """If Spark has hung up, nobody hears what this process would say, but the terminal."""
        self._progress.report(self._ahead.access, now=True)
        if isinstance(sys.exception(), EOFError) and python_worker.is_worker():
            os._exit(0)

    # --- and in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)

    # --- what another reader may do in its own way

    def _readable_ranges(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        return self._ahead.drop_lost(ranges)

    def _cut(self, ranges: list[OffsetRange]) -> list[Partition]:
        return plan_partitions(ranges, self._rows_per_partition)

    def _report_progress(self, done: QueryPosition, *, now: bool = False) -> None:
        """Spark commits a batch when it has made the next, but asks what comes after it sooner.

        Nor may there be time at the end: a query that is stopped is not waited for.
        """
        if not done.is_initial:
            self._progress.note(done)
        self._progress.report(self._ahead.access, now=now)
