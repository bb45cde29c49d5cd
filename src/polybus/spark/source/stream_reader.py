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
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from polybus.errors import DoesNotExist, PolybusError, TopicDeleted, UsageError
from polybus.spark import python_worker
from polybus.spark.python_worker import hide_traceback
from polybus.spark.source import topic_schema
from polybus.spark.source.log_access import LogAccess, ShardOffsets
from polybus.spark.source.partition_reader import PartitionReader
from polybus.spark.source.partitions import (
    OffsetRange,
    Partition,
    limit_bytes,
    limit_rows,
    plan_partitions,
    ranges_between,
)
from polybus.spark.source.query_position import QueryPosition
from polybus.spark.source.read_bounds import (
    EARLIEST,
    Offsets,
    ReadBound,
    TopicSelection,
    clamp_offset,
)
from polybus.spark.spark_options import SparkOptions

log = logging.getLogger("polybus.spark")

# A report costs the bus a commit, and a query may run a hundred batches a second.
REPORT_EVERY_S = 1.0
BATCH_ONLY = ("endingOffsets", "endingTimestamp")
SAMPLE_ROWS = 4  # messages per sample of the message size, for maxBytesPerBatch


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
        self._wanted = TopicSelection(options.required("topic", "orders"))
        self._strict = options.flag("failOnDataLoss", default=True)
        self._start = ReadBound.parse(options, "starting", EARLIEST)
        self._max_rows = options.count("maxRowsPerBatch")
        self._max_bytes = options.count("maxBytesPerBatch")
        self._rows_per_partition = options.count("rowsPerPartition")
        # Spark pickles the reader: it holds no connection, the task opens one per process.
        self._task = PartitionReader(options.bus, schema, self._strict, options.archive)
        self._progress = ProgressReporter()
        self._initial: QueryPosition | None = None
        self._target: Offsets | None = None  # the end of an AvailableNow run
        self._last_ends: Offsets | None = None  # the ends that `_find_available` saw last
        self._is_announced = False

    # --- called by Spark next to the driver

    @hide_traceback()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Return the first position. Spark may call this again, and must get the same position."""
        if self._initial is None:
            access = self._task.access
            topics = self._wanted.shards(access)
            self._start.check(topics)
            first: Offsets = {}
            for topic, shards in topics.items():
                start = self._start.resolve_offsets(access, topic, shards)
                first[topic] = {
                    shard: clamp_offset(topic, shard, start[shard], in_log, strict=self._strict)
                    for shard, in_log in shards.items()
                }
            self._initial = QueryPosition(first, uuid.uuid4().hex, is_initial=True)
        return self._initial.as_json()

    @hide_traceback()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Fix the end of this run: later messages belong to the next one."""
        access = self._task.access
        self._target = {}
        for topic in self._wanted.find_topics(access):
            try:
                self._target[topic] = {n: shard.end for n, shard in access.shards(topic).items()}
            except DoesNotExist:
                pass  # `_find_available` raises if that is an error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return one limit, as Spark's API allows. `latestOffset` applies both if both are set."""
        if self._max_rows is not None:
            return ReadMaxRows(self._max_rows)
        if self._max_bytes is not None:
            return ReadMaxBytes(self._max_bytes)
        return ReadAllAvailable()

    @hide_traceback()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch; `start` itself if there is none.

        The first batch of a query is never skipped, because it stores the initial position in the
        checkpoint.
        """
        position = QueryPosition.parse(start)
        starts, ends = self._find_available(position)
        ranges = ranges_between(starts, ends)
        if not isinstance(limit, ReadAllAvailable):
            if self._max_bytes is not None:
                ranges = limit_bytes(ranges, self._max_bytes, self._mean_bytes_at)
            if self._max_rows is not None:
                ranges = limit_rows(ranges, self._max_rows)
        # Shards that this batch does not advance stay at their start.
        reached = {topic: dict(shards) for topic, shards in starts.items()}
        for admitted in ranges:
            reached[admitted.topic][admitted.shard] = admitted.end
        is_idle = reached == position.offsets and not position.is_initial
        # Spark asks for the next batch before it commits the last one, and a query that is stopped
        # may not commit it: report here, too.
        self._report_progress(position, now=is_idle)
        return start if is_idle else position.advanced(reached, starts).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        return None if self._last_ends is None else QueryPosition(self._last_ends).as_json()

    @hide_traceback()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Partition]:
        first, last = QueryPosition.parse(start), QueryPosition.parse(end)
        self._check_topics(last)
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
        self._progress.report(self._task.access, now=True)
        if isinstance(sys.exception(), EOFError) and python_worker.is_worker():
            os._exit(0)

    # --- called in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)

    # --- overridden by ArchiveStreamReader

    def _readable_ranges(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Return the parts of the ranges that can be read.

        Raises before any task starts if messages are lost and `failOnDataLoss` is set.
        """
        topics = {wanted.topic for wanted in ranges}
        in_log = {topic: self._shards(topic, known=True) for topic in topics}
        readable = []
        for wanted in ranges:
            topic, number, start, end = wanted
            shard = in_log[topic].get(number)
            if shard is None:
                continue
            start = clamp_offset(topic, number, start, shard, strict=self._strict)
            clamp_offset(topic, number, end, shard, strict=self._strict)
            if start < end:
                readable.append(wanted._replace(start=start))
        return readable

    def _cut(self, ranges: list[OffsetRange]) -> list[Partition]:
        return plan_partitions(ranges, self._rows_per_partition)

    # --- the offsets that the query can read next

    def _find_available(self, position: QueryPosition) -> tuple[Offsets, Offsets]:
        """Return the start and the end of each shard that can be read.

        A new shard or topic is read from its first offset.
        """
        self._check_topics(position)
        names = {*self._wanted.find_topics(self._task.access), *position.offsets}
        topics = {
            name: self._shards(name, known=name in position.offsets)
            for name in sorted(names)
            if self._wanted.covers(name)
        }
        self._last_ends = {
            topic: {n: shard.end for n, shard in shards.items()}
            for topic, shards in topics.items()
            if shards or topic in position.offsets
        }
        starts: Offsets = {}
        ends: Offsets = {}
        for topic in sorted({*self._last_ends, *position.offsets}):
            known, in_log = position.offsets.get(topic, {}), topics.get(topic, {})
            # A topic created after the start of an AvailableNow run belongs to the next run.
            if not known and self._target is not None and topic not in self._target:
                continue
            # The position takes precedence; only new shards start at the log's first offset.
            starts[topic] = {**{n: shard.start for n, shard in in_log.items()}, **known}
            ends[topic] = {
                n: self._end(topic, n, start, in_log.get(n)) for n, start in starts[topic].items()
            }
        return starts, ends

    def _end(self, topic: str, shard: int, start: int, in_log: ShardOffsets | None) -> int:
        """Return the offset up to which a shard can be read now, at least `start`."""
        if in_log is None:
            return start
        # A log that ends before the position is another log. `_readable_ranges` checks trimmed
        # offsets.
        clamp_offset(topic, shard, start, in_log._replace(start=0), strict=self._strict)
        end = in_log.end
        if self._target is not None:
            end = min(end, self._target.get(topic, {}).get(shard, 0))
        return max(start, end)

    def _shards(self, topic: str, *, known: bool) -> dict[int, ShardOffsets]:
        """Return the shards of a topic; `known` says that the query has read it before.

        A dropped topic has none. Raises if that is data loss.
        """
        try:
            return self._task.access.shards(topic)
        except DoesNotExist:
            if known and self._strict:
                raise TopicDeleted(
                    f"topic {topic!r} was dropped while this query read it: create it again, or "
                    "use another checkpointLocation, or set failOnDataLoss=false"
                ) from None
            if not known and topic in self._wanted.names:
                raise DoesNotExist(
                    f"there is no durable topic {topic!r}: correct option topic"
                ) from None
            return {}

    def _check_topics(self, position: QueryPosition) -> None:
        """Raise `UsageError` if a position belongs to a query over other topics."""
        foreign = [topic for topic in position.offsets if not self._wanted.covers(topic)]
        if foreign and self._strict:
            raise UsageError(
                f"this checkpoint belongs to a query over topic {foreign[0]!r}, but option topic "
                f"is {self._wanted.text!r}: use another checkpointLocation"
            )

    def _mean_bytes_at(self, wanted: OffsetRange, offset: int) -> float:
        """Return the mean size of a message at an offset, in bytes, from a small sample."""
        end = min(wanted.end, offset + SAMPLE_ROWS)
        try:
            sample = list(self._task.access.read(wanted.topic, wanted.shard, offset, end))
        except DoesNotExist:  # the topic was dropped: nothing to read
            return 0.0
        rows = sum(int(batch.num_rows) for batch in sample)
        return sum(int(batch.nbytes) for batch in sample) / max(1, rows)

    def _report_progress(self, done: QueryPosition, *, now: bool = False) -> None:
        """Report a finished batch."""
        if not done.is_initial:
            self._progress.note(done)
        self._progress.report(self._task.access, now=now)
