"""The loop of a replay: reads archive and log part by part, and publishes each part.

A part is read by its offsets, filtered, and published in one commit with the replay's name and the
part's number (`replay_checkpoint.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import count, lit
from pyspark.sql.types import StructType

from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import read_manifest
from polybus.spark.pipelines import message_sql, preflight
from polybus.spark.pipelines.pipeline_arguments import MOST_UNCUT
from polybus.spark.pipelines.query_run import OnProgress, Progress, StopSignal
from polybus.spark.pipelines.replay.replay_checkpoint import (
    Ends,
    ReplayCheckpoint,
    ReplayPlan,
    ReplayPosition,
    offsets_at,
)
from polybus.spark.source.log_access import LogAccess, open_log_access
from polybus.spark.source.read_bounds import TopicSelection

PART_S = 1.0
MOST_GROWTH = 64  # bounds the burst where a filter begins to match every message


class ReplayPace:
    """The number of rows of the next part: `rows`.

    Without --rate it is the limit of a part, else about as many as may be written in PART_S. If a
    filter matches few messages, parts grow: otherwise a slow replay of one key would read its topic
    as slowly as it may write.
    """

    def __init__(self, most_rows: int, rate: float | None) -> None:
        self._allowed = most_rows if rate is None else max(1, int(rate * PART_S))
        self._least = self.rows = min(most_rows, self._allowed)
        self._most = min(most_rows, self._least * MOST_GROWTH)

    def adapt(self, written: int) -> None:
        """Adapt to the rows written by the last part. Doubles the size if that fits the rate."""
        if written > self._allowed:
            self.rows = self._least
        elif written * 2 <= self._allowed:
            self.rows = min(self._most, self.rows * 2)


@dataclass(frozen=True)
class ReplaySource:
    """The topic that is read, from the log, the archive, or both."""

    spark: SparkSession
    bus: str
    topic: str
    archive: str | None
    log: bool
    columns: StructType
    accept_loss: bool = False

    @property
    def access(self) -> LogAccess:
        return open_log_access(self.bus, self.archive)

    def ends(self) -> Ends:
        """Return the current end of each shard, in the log or in the archive alone."""
        if self.log or self.archive is None:
            return {n: one.end for n, one in self.access.shards(self.topic).items()}
        archived = read_manifest(ArchiveFolder(self.archive), self.topic).shards
        return {n: span.end for n, span in archived.items()}

    def plan(
        self, checkpoint: ReplayCheckpoint, asked: Mapping[str, object], start: str, end: str | None
    ) -> ReplayPlan:
        """Resolve --from and --to to offsets and store the plan."""
        if self.archive is None:
            preflight.check_topic(self.bus, self.topic)
        access, current_ends = self.access, self.ends()
        shards = {n: one for n, one in access.shards(self.topic).items() if n in current_ends}
        shards = {n: one._replace(end=current_ends[n]) for n, one in shards.items()}
        starts = offsets_at(access, self.topic, start, shards)
        if end is None:
            return checkpoint.begin(asked, starts, None)
        ends = offsets_at(access, self.topic, end, shards)
        ends = {n: max(starts[n], offset) for n, offset in ends.items()}
        return checkpoint.begin(asked, starts, ends)

    def rows(self, part: ReplayPosition) -> DataFrame:
        """Return the rows of a part. Shards that the part does not have get an empty range."""
        others = {n: one.start for n, one in self.access.shards(self.topic).items()}
        first, last = (self._as_json({**others, **some}) for some in (part.at, part.to))
        options = {"bus": self.bus, "topic": self.topic, "rowsPerPartition": str(MOST_UNCUT)}
        options |= {"startingOffsets": first, "endingOffsets": last}
        options["failOnDataLoss"] = str(not self.accept_loss).lower()
        if self.archive is not None:
            options["archive"] = self.archive
        rows = self.spark.read.format("polybus").schema(self.columns).options(**options).load()
        return rows.where(f"shard IN ({', '.join(map(str, part.to))})")

    def _as_json(self, offsets: Ends) -> str:
        return json.dumps({self.topic: {str(shard): at for shard, at in offsets.items()}})


@dataclass(frozen=True)
class ReplayTarget:
    """The topic that is written. Rows must not go to `forbidden` topics, which are followed."""

    bus: str
    into: str | None
    where: str | None
    select: str | None
    forbidden: TopicSelection | None = None

    def write(self, rows: DataFrame, name: str, number: int) -> int:
        """Publish a part unless it was published before. Returns the number of rows."""
        seen = Observation()
        shaped = message_sql.apply_sql(rows, self.where, self.select)
        if self.forbidden is not None:
            shaped = message_sql.reject_loops(shaped, self.forbidden)
        writer = (
            shaped.observe(seen, count(lit(1)).alias("rows"))
            .write.format("polybus")
            .mode("append")
            .options(bus=self.bus, transactionId=name, transactionNumber=number)
        )
        if self.into is not None:
            writer = writer.option("topic", self.into)
        writer.save()
        return int(seen.get["rows"])


class ReplayLoop:
    """Replays parts within the rate until the end or a signal."""

    def __init__(
        self,
        source: ReplaySource,
        target: ReplayTarget,
        checkpoint: ReplayCheckpoint,
        plan: ReplayPlan,
        most_rows: int,
        rate: float | None,
        tell: OnProgress,
    ) -> None:
        self._source, self._target = source, target
        self._checkpoint, self._plan = checkpoint, plan
        self._rate, self._tell = rate, tell
        self._pace = ReplayPace(most_rows, rate)
        self._began_s = time.monotonic()
        self.position = checkpoint.position(plan)
        self.rows = self.read = self.parts = 0

    def run(self, stop: StopSignal, *, every_s: float) -> None:
        topic = self._source.topic
        while not stop:
            if not self.position.ranges(topic):
                ends = self._ends()
                self.position = self._checkpoint.next(self.position, ends, self._pace.rows)
            if self.position.ranges(topic):
                self._replay_part(stop)
            elif self._plan.ends is not None or stop.wait(every_s):
                return

    def _ends(self) -> Ends:
        return self._source.ends() if self._plan.ends is None else self._plan.ends

    def _replay_part(self, stop: StopSignal) -> None:
        began_s = time.monotonic()
        part = self.position
        rows = self._target.write(self._source.rows(part), self._plan.name, part.number)
        self.rows += rows
        self.read += sum(one.rows for one in part.ranges(""))
        self.parts += 1
        self._pace.adapt(rows)
        ends = self._ends()
        self.position = self._checkpoint.next(part.done(rows), ends, self._pace.rows)
        self._report_progress(ends)
        if self._rate is not None:
            stop.wait(max(0.0, rows / self._rate - (time.monotonic() - began_s)))

    def _report_progress(self, ends: Ends) -> None:
        left = sum(max(0, end - self.position.at.get(n, end)) for n, end in ends.items())
        elapsed_s = max(time.monotonic() - self._began_s, 1e-3)
        self._tell(Progress(self.rows, self.rows / elapsed_s, left))
