"""The stream reader: `spark.readStream.format("polybus")`.

Runs in a Python process next to the driver, one per run of a query. Its own state is small: the
offsets that "latest" was resolved to, the end of an AvailableNow run, and the position that was
reported to the bus last. The rest is in the positions that Spark keeps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
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

from polybus.errors import PolybusError, UsageError
from polybus.spark import python_worker
from polybus.spark.python_worker import hide_traceback
from polybus.spark.source import topic_schema
from polybus.spark.source.available_offsets import AvailableOffsets
from polybus.spark.source.partition_reader import PartitionReader
from polybus.spark.source.partitions import OffsetRange, Partition, plan_partitions, ranges_between
from polybus.spark.source.query_position import QueryPosition
from polybus.spark.source.read_bounds import EARLIEST, ReadBound, TopicSelection

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from polybus.spark.source.log_access import LogAccess
    from polybus.spark.spark_options import SparkOptions

log = logging.getLogger("polybus.spark")

# A report costs the bus a commit, and a query may run a hundred batches a second.
REPORT_EVERY_S = 1.0
BATCH_ONLY = ("endingOffsets", "endingTimestamp")


class ProgressReporter:
    """Reports the position of a query to the bus, at most once per REPORT_EVERY_S."""

    def __init__(self) -> None:
        self._noted: QueryPosition | None = None
        self._unreported: QueryPosition | None = None
        self._reported_s = float("-inf")

    def note(self, position: QueryPosition) -> None:
        """Remember a position for the next report."""
        if position != self._noted:
            self._noted = self._unreported = position

    def report(self, access: LogAccess, *, now: bool = False) -> None:
        """Report the newest position if the last report is REPORT_EVERY_S ago, or `now` is set."""
        position = self._unreported
        if position is None or not (now or time.monotonic() - self._reported_s >= REPORT_EVERY_S):
            return
        self._unreported, self._reported_s = None, time.monotonic()
        for topic, offsets in position.offsets.items():
            try:
                access.report_progress(position.query, "", topic, offsets)
            except PolybusError as error:
                # The lag is outdated until the next report; reading continues.
                log.warning("cannot report progress on topic %s: %s", topic, error)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans the batches of a query, and reads their partitions in tasks."""

    def __init__(self, options: SparkOptions, schema: StructType) -> None:
        topic_schema.check_schema(schema)
        for name in BATCH_ONLY:
            if options.text(name) is not None:
                raise UsageError(
                    f"option {name} is not allowed for streams: leave it out, or use spark.read"
                )
        wanted = TopicSelection(options.required("topic", "orders"))
        strict = options.flag("failOnDataLoss", default=True)
        self._start = ReadBound.parse(options, "starting", EARLIEST)
        self._max_rows = options.count("maxRowsPerBatch")
        self._max_bytes = options.count("maxBytesPerBatch")
        self._rows_per_partition = options.count("rowsPerPartition")
        self._task = PartitionReader(options.bus, schema, strict, options.archive)
        self._available = AvailableOffsets(
            options.bus, wanted, strict=strict, archive=options.archive
        )
        self._progress = ProgressReporter()
        self._initial: QueryPosition | None = None
        self._is_announced = False

    # --- called by Spark next to the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return the first position. Spark may call this again, and must get the same position."""
        with hide_traceback():
            if self._initial is None:
                first = self._available.initial_offsets(self._start)
                self._initial = QueryPosition(first, uuid.uuid4().hex, is_initial=True)
            return self._initial.as_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        with hide_traceback():
            self._available.fix_end()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return one limit, as Spark's API allows. `latestOffset` applies both if both are set."""
        if self._max_rows is not None:
            return ReadMaxRows(self._max_rows)
        if self._max_bytes is not None:
            return ReadMaxBytes(self._max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch; `start` itself if there is none.

        The first batch of a query is never skipped, because it stores the initial position in the
        checkpoint.
        """
        with hide_traceback():
            position = QueryPosition.parse(start)
            starts, ends = self._available.find_available(position)
            bounds = (self._max_rows, self._max_bytes)
            if isinstance(limit, ReadAllAvailable):
                bounds = (None, None)
            # Shards that this batch does not advance stay at their start.
            reached = {topic: dict(shards) for topic, shards in starts.items()}
            for one in self._available.admit(starts, ends, *bounds):
                reached[one.topic][one.shard] = one.end
            is_idle = reached == position.offsets and not position.is_initial
            self._report_progress(position, now=is_idle)
            return start if is_idle else position.advanced(reached, starts).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        return (
            None
            if self._available.last_ends is None
            else QueryPosition(self._available.last_ends).as_json()
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Partition]:
        with hide_traceback():
            first, last = QueryPosition.parse(start), QueryPosition.parse(end)
            self._available.check(last)
            ranges = self._readable_ranges(ranges_between(first.starts(last), last.offsets))
            if not ranges:
                return []
            partitions = self._cut(ranges)
            # One task per run reports the query's name to the bus.
            if not self._is_announced:
                partitions[0].query = last.query
                partitions[0].announced_topics = tuple(last.offsets)
                self._is_announced = True
            return partitions

    def commit(self, end: dict[str, Any]) -> None:
        self._report_progress(QueryPosition.parse(end))

    def stop(self) -> None:
        """Report the last position. Exits at once if Spark closed the connection: only the terminal
        would show the error.
        """
        self._progress.report(self._available.access, now=True)
        if isinstance(sys.exception(), EOFError) and python_worker.is_worker():
            os._exit(0)

    # --- called in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)

    # --- overridden by ArchiveStreamReader

    def _readable_ranges(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        return self._available.drop_lost(ranges)

    def _cut(self, ranges: list[OffsetRange]) -> list[Partition]:
        return plan_partitions(ranges, self._rows_per_partition)

    def _report_progress(self, done: QueryPosition, *, now: bool = False) -> None:
        """Report a finished batch.

        Called also when Spark asks for the next batch, which it does before it commits the last
        one. A query that is stopped may not get a later chance.
        """
        if not done.is_initial:
            self._progress.note(done)
        self._progress.report(self._available.access, now=now)
