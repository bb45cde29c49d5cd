"""A topic followed: `spark.readStream.format("polybus")`.

Lives in a Python process beside the driver, one for each run of a query. Its own state is
small: where "latest" was, where an AvailableNow query ends, what the bus was told last.
All else is in the positions that Spark keeps.

What the bus is told of a query: how far it has come, and not too often.
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

# Telling the bus costs it a commit: not for each of a hundred batches a second.
TELL_EVERY_S = 1.0
BATCH_ONLY = ("endingOffsets", "endingTimestamp")


class ProgressReporter:
    def __init__(self) -> None:
        self._noted: QueryPosition | None = None
        self._untold: QueryPosition | None = None
        self._told_s = float("-inf")

    def note(self, position: QueryPosition) -> None:
        if position != self._noted:
            self._noted = self._untold = position

    def report(self, access: LogAccess, *, now: bool = False) -> None:
        """Tells the newest, if the last time is long enough ago."""
        position = self._untold
        if position is None or not (now or time.monotonic() - self._told_s >= TELL_EVERY_S):
            return
        self._untold, self._told_s = None, time.monotonic()
        for topic, offsets in position.offsets.items():
            try:
                access.report_progress(position.query, "", topic, offsets)
            except PolybusError as error:  # who looks at the lag sees an old one; reading goes on
                log.warning("the bus was not told how far %s was read: %s", topic, error)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SparkOptions, schema: StructType) -> None:
        topic_schema.check_schema(schema)
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
