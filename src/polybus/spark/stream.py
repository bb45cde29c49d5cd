"""A topic followed: `spark.readStream.format("polybus")`.

Lives in a Python process beside the driver, one for each run of a query. Its own state is
small: where "latest" was, where an AvailableNow query ends, what the bus was told last.
All else is in the positions that Spark keeps.
"""

from __future__ import annotations

import logging
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

from polybus.errors import DoesNotExist, PolybusError, TopicDeleted, UsageError
from polybus.spark import columns
from polybus.spark.access import Access, Shard, opened
from polybus.spark.bounds import EARLIEST, Bound, Offsets, Wanted, settle
from polybus.spark.faults import told_plainly
from polybus.spark.planning import (
    Partition,
    Range,
    admit,
    admit_bytes,
    plan,
    ranges_between,
)
from polybus.spark.positions import Position
from polybus.spark.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from polybus.spark.options import Options

log = logging.getLogger("polybus.spark")

BATCH_ONLY = ("endingOffsets", "endingTimestamp")
# Telling the bus costs it a commit: not for each of a hundred batches a second.
TELL_EVERY_S = 1.0
# Messages that are weighed for maxBytesPerBatch, at the start of each range.
SAMPLE_ROWS = 64


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        columns.check(schema)
        for name in BATCH_ONLY:
            if options.text(name) is not None:
                raise UsageError(f"option {name} is for spark.read: a stream has no end")
        self._wanted = Wanted(options.required("topic", "orders"))
        self._start = Bound.parse(options, "starting", EARLIEST)
        self._max_rows = options.count("maxRowsPerBatch")
        self._max_bytes = options.count("maxBytesPerBatch")
        self._rows_per_partition = options.count("rowsPerPartition")
        self._task = Task(options.bus, schema, options.flag("failOnDataLoss", default=True))
        self._initial: Position | None = None
        self._target: Offsets | None = None  # of AvailableNow
        self._seen: Offsets | None = None
        self._progress = Progress()
        self._is_introduced = False

    # --- what Spark asks the driver's side

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Spark may ask again: it is the same place then."""
        with told_plainly():
            if self._initial is None:
                self._initial = Position(self._first(), uuid.uuid4().hex, is_initial=True)
            return self._initial.as_json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        with told_plainly():
            access = self._access
            self._target = {
                topic: _ends(access.shards(topic)) for topic in self._wanted.find(access)
            }

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Spark knows one limit at a time; if both were given, both hold all the same."""
        if self._max_rows is not None:
            return ReadMaxRows(self._max_rows)
        if self._max_bytes is not None:
            return ReadMaxBytes(self._max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with told_plainly():
            position = Position.parse(start)
            shards = self._shards(position)
            starts, ends = self._news(position, shards)
            self._progress.pass_on(self._access)
            ranges = ranges_between(starts, ends)
            if not ranges and not position.is_initial and _same_shards(ends, position.offsets):
                return start
            if not isinstance(limit, ReadAllAvailable):
                ranges = self._admit(ranges, shards)
            reached = {topic: dict(offsets) for topic, offsets in starts.items()}
            for one in ranges:
                reached[one.topic][one.shard] = one.end
            return position.advanced(reached, starts).as_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        return None if self._seen is None else Position(self._seen).as_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[Partition]:
        with told_plainly():
            first, last = Position.parse(start), Position.parse(end)
            self._check(last)
            ranges = ranges_between(first.starts(last), last.offsets)
            if not ranges:
                return []
            ranges = self._still_there(ranges)
            partitions = plan(ranges, self._rows_per_partition)
            if not self._is_introduced:
                partitions[0].query = last.query
                partitions[0].introduces = tuple(last.offsets)
                self._is_introduced = True
            return partitions

    def commit(self, end: dict[str, Any]) -> None:
        self._progress.note(Position.parse(end))
        self._progress.pass_on(self._access)

    def stop(self) -> None:
        self._progress.pass_on(self._access, now=True)

    # --- and what it asks tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)

    # --- how

    @property
    def _access(self) -> Access:
        return opened(self._task.bus)

    def _first(self) -> Offsets:
        access, found = self._access, {}
        topics = self._wanted.find(access)
        self._start.check(topics)
        for topic in topics:
            shards = access.shards(topic)
            wished = self._start.of(access, topic, shards)
            found[topic] = {
                shard: settle(topic, shard, wished[shard], there, strict=self._task.strict)
                for shard, there in shards.items()
            }
        return found

    def _shards(self, position: Position) -> dict[str, dict[int, Shard]]:
        """Every topic of the query as it is now; one that was dropped is not among them."""
        self._check(position)
        access, found = self._access, {}
        for topic in sorted({*self._wanted.find(access), *position.offsets}):
            if not self._wanted.covers(topic):
                continue
            try:
                found[topic] = access.shards(topic)
            except DoesNotExist:
                if topic not in position.offsets or self._task.strict:
                    raise _gone(topic, position) from None
        self._seen = {topic: _ends(shards) for topic, shards in found.items()}
        return found

    def _check(self, position: Position) -> None:
        foreign = [topic for topic in position.offsets if not self._wanted.covers(topic)]
        if foreign and self._task.strict:
            raise UsageError(
                f"this checkpoint is of a query over topic {foreign[0]!r}, and option topic is "
                f"{self._wanted.text!r}: use another checkpointLocation"
            )

    def _news(
        self, position: Position, shards: dict[str, dict[int, Shard]]
    ) -> tuple[Offsets, Offsets]:
        """From where to where there is something to be read, for every shard."""
        starts: Offsets = {}
        ends: Offsets = {}
        for topic in sorted({*shards, *position.offsets}):
            there, known = shards.get(topic, {}), position.offsets.get(topic, {})
            starts[topic] = {**{n: one.start for n, one in there.items()}, **known}
            ends[topic] = {
                n: max(start, self._end(topic, n, there)) for n, start in starts[topic].items()
            }
            for n, start in known.items():
                if self._task.strict and n in there and start > there[n].end:
                    settle(topic, n, start, there[n], strict=True)
        if self._target is not None:  # what came later is for the next run
            asked = {*self._target, *position.offsets}
            starts = {topic: one for topic, one in starts.items() if topic in asked}
            ends = {topic: one for topic, one in ends.items() if topic in asked}
        return starts, ends

    def _end(self, topic: str, shard: int, there: dict[int, Shard]) -> int:
        if self._target is not None:
            return self._target.get(topic, {}).get(shard, 0)
        return there[shard].end if shard in there else 0

    def _admit(self, ranges: list[Range], shards: dict[str, dict[int, Shard]]) -> list[Range]:
        if self._max_bytes is not None:
            ranges = admit_bytes(ranges, self._max_bytes, lambda one: self._row_bytes(one, shards))
        if self._max_rows is not None:
            ranges = admit(ranges, self._max_rows)
        return ranges

    def _row_bytes(self, wanted: Range, shards: dict[str, dict[int, Shard]]) -> float:
        """The average of the shard's messages, or of the next ones if those are larger."""
        average = shards[wanted.topic][wanted.shard].row_bytes
        try:
            end = min(wanted.end, wanted.start + SAMPLE_ROWS)
            sample = list(self._access.read(wanted.topic, wanted.shard, wanted.start, end))
        except DoesNotExist:
            return average
        rows = sum(int(batch.num_rows) for batch in sample)
        size = sum(int(batch.nbytes) for batch in sample)
        return max(average, size / max(1, rows))

    def _still_there(self, ranges: list[Range]) -> list[Range]:
        """If something was trimmed, that is better said before tasks are started."""
        topics = {one.topic for one in ranges}
        there = {}
        for topic in topics:
            try:
                there[topic] = self._access.shards(topic)
            except DoesNotExist:
                if self._task.strict:
                    raise _gone(topic, None) from None
        found = []
        for one in ranges:
            if one.topic in there:
                shard = there[one.topic][one.shard]
                start = settle(one.topic, one.shard, one.start, shard, strict=self._task.strict)
                found.append(one._replace(start=min(start, one.end)))
        return [one for one in found if one.rows]


class Progress:
    """What the bus is told of a query: the newest, and not too often."""

    def __init__(self) -> None:
        self._untold: Position | None = None
        self._told_s = 0.0

    def note(self, position: Position) -> None:
        self._untold = position

    def pass_on(self, access: Access, *, now: bool = False) -> None:
        position = self._untold
        if position is None or not (now or time.monotonic() - self._told_s >= TELL_EVERY_S):
            return
        self._untold, self._told_s = None, time.monotonic()
        for topic, offsets in position.offsets.items():
            try:
                access.tell(position.query, "", topic, offsets)
            except PolybusError as error:  # who looks at lag sees an old one; reading goes on
                log.warning("the bus was not told how far %s was read: %s", topic, error)


def _ends(shards: dict[int, Shard]) -> dict[int, int]:
    return {number: shard.end for number, shard in shards.items()}


def _same_shards(ends: Offsets, known: Offsets) -> bool:
    return {topic: set(one) for topic, one in ends.items()} == {
        topic: set(one) for topic, one in known.items()
    }


def _gone(topic: str, position: Position | None) -> PolybusError:
    if position is not None and topic not in position.offsets:
        return DoesNotExist(
            f"there is no durable topic {topic!r}: create it, or correct option topic"
        )
    return TopicDeleted(
        f"topic {topic!r} was dropped while this query read it: create it again, or start a query "
        "with another checkpointLocation, or set failOnDataLoss=false"
    )
