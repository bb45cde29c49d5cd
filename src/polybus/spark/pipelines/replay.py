"""`replay`: publishes history again, from archive and log, selected by time, id, key or SQL.

Reads, filters and publishes parts of half a million rows. A part is read by its offsets and
published in one commit with the replay's name and the part's number (`replay_checkpoint.py`). Parts
advance through all shards in parallel, so messages of one key keep their order, and other messages
keep it approximately.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.functions import count, lit
from pyspark.sql.types import StructType

from polybus.errors import UsageError
from polybus.model.start_point import EARLIEST, FORMS, LATEST, parse_start
from polybus.spark.archive.archive_folder import ArchiveFolder
from polybus.spark.archive.manifest import read_manifest
from polybus.spark.pipelines import message_sql, pipeline_arguments, preflight
from polybus.spark.pipelines.pipeline_arguments import MOST_UNCUT
from polybus.spark.pipelines.query_run import (
    DEFAULT_EVERY_S,
    OnProgress,
    Progress,
    StopSignal,
    Summary,
    activate_session,
    ignore_progress,
    stop_on_signals,
)
from polybus.spark.pipelines.replay_checkpoint import (
    Ends,
    ReplayCheckpoint,
    ReplayPlan,
    ReplayPosition,
    offsets_at,
)
from polybus.spark.pipelines.spark_errors import raise_own_errors
from polybus.spark.source.log_access import LogAccess, open_log_access
from polybus.spark.source.partitions import MOST_ROWS
from polybus.spark.source.read_bounds import TopicSelection

PART_S = 1.0
MOST_GROWTH = 64  # bounds the burst where a filter begins to match every message

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")]
From = Annotated[
    str, typer.Option("--from", metavar="PLACE", help=f"Start position (inclusive): {FORMS}.")
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="PLACE",
        help="Stop before this position (exclusive). [default with --once: now]",
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="Only messages of this key. Can be repeated."),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", metavar="N", help="Write at most N messages per second."),
]
Archive = Annotated[
    str | None,
    typer.Option("--archive", metavar="FOLDER", help="Read archived messages from this archive."),
]
Log = Annotated[
    bool, typer.Option("--log/--no-log", help="Continue with the log after the archive.")
]


def replay(
    spark: SparkSession,
    topic: Topic,
    *,
    into: pipeline_arguments.Into = None,
    start: From = EARLIEST,
    end: To = None,
    key: Keys = None,
    where: pipeline_arguments.Where = None,
    select: pipeline_arguments.Select = None,
    rate: Rate = None,
    archive: Archive = None,
    log: Log = True,
    accept_loss: pipeline_arguments.AcceptLoss = False,
    checkpoint: pipeline_arguments.Checkpoint = None,
    bus: pipeline_arguments.Bus = None,
    into_bus: pipeline_arguments.IntoBus = None,
    every: pipeline_arguments.Every = DEFAULT_EVERY_S,
    rows_per_batch: pipeline_arguments.UncutRows = MOST_ROWS,
    once: pipeline_arguments.Once = False,
    tell: OnProgress = ignore_progress,
) -> Summary:
    """Publish history again: from archive and log, filtered, exactly once."""
    began_s = time.monotonic()
    activate_session(spark)
    if "*" in topic or "," in topic:
        raise UsageError(f"replay takes one topic, got {topic}: ids belong to a topic")
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate must be > 0 messages per second, got {rate:g}")
    if not log and archive is None:
        raise UsageError("--no-log needs --archive FOLDER: without both there is nothing to read")
    for place in (start, end):
        if place is not None:
            parse_start(place)
    message_sql.check(spark, where, select, into)
    source = preflight.check_bus(bus)
    target = preflight.check_target_bus(into_bus, source)
    kept = preflight.check_folder(checkpoint, "--checkpoint", "replay stores its position there")
    goes_on = end is None and not once and log
    if goes_on and into == topic and source == target:
        raise UsageError(f"give --once or --to: replaying {topic} into itself would loop forever")
    asked: dict[str, object] = {"topic": topic, "--into": into, "--from": start, "--to": end}
    asked |= {"--key": sorted(key or []), "--where": where, "--select": select}
    of_keys = f"shard_key IN ({', '.join(map(message_sql.literal, key))})" if key else None
    both = [f"({condition}\n)" for condition in (of_keys, where) if condition is not None]
    condition = " AND ".join(both) or None
    columns = message_sql.needed_columns(spark, condition, select)
    read_from = ReplaySource(spark, source, topic, archive, log, columns, accept_loss)
    stored = ReplayCheckpoint(kept)
    plan = stored.plan(asked) or read_from.plan(
        stored, asked, start, None if goes_on else end or LATEST
    )
    forbidden = TopicSelection(topic) if goes_on and source == target else None
    write_to = ReplayTarget(target, into, condition, select, forbidden)
    loop = ReplayLoop(
        read_from, write_to, stored, plan, min(rows_per_batch, MOST_UNCUT), rate, tell
    )
    with stop_on_signals() as stop, raise_own_errors():
        loop.run(stop, every_s=every)
    facts = {"read": loop.read, "parts": loop.parts, "replayed in all": loop.position.rows}
    return Summary(loop.rows, time.monotonic() - began_s, dict(facts), stop.by)


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
            return {n: shard.end for n, shard in self.access.shards(self.topic).items()}
        archived = read_manifest(ArchiveFolder(self.archive), self.topic).shards
        return {n: span.end for n, span in archived.items()}

    def plan(
        self, checkpoint: ReplayCheckpoint, asked: Mapping[str, object], start: str, end: str | None
    ) -> ReplayPlan:
        """Resolve --from and --to to offsets and store the plan."""
        if self.archive is None:
            preflight.check_topic(self.bus, self.topic)
        access, current_ends = self.access, self.ends()
        shards = {
            n: shard._replace(end=current_ends[n])
            for n, shard in access.shards(self.topic).items()
            if n in current_ends
        }
        starts = offsets_at(access, self.topic, start, shards)
        if end is None:
            return checkpoint.begin(asked, starts, None)
        ends = offsets_at(access, self.topic, end, shards)
        ends = {n: max(starts[n], offset) for n, offset in ends.items()}
        return checkpoint.begin(asked, starts, ends)

    def rows(self, part: ReplayPosition) -> DataFrame:
        """Return the rows of a part. Shards that the part does not have get an empty range."""
        others = {n: shard.start for n, shard in self.access.shards(self.topic).items()}
        first, last = (json.dumps({self.topic: {**others, **at}}) for at in (part.at, part.to))
        options = {"bus": self.bus, "topic": self.topic, "rowsPerPartition": str(MOST_UNCUT)}
        options |= {"startingOffsets": first, "endingOffsets": last}
        options["failOnDataLoss"] = str(not self.accept_loss).lower()
        if self.archive is not None:
            options["archive"] = self.archive
        rows = self.spark.read.format("polybus").schema(self.columns).options(**options).load()
        return rows.where(f"shard IN ({', '.join(map(str, part.to))})")


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
        counted = Observation()
        shaped = message_sql.apply_sql(rows, self.where, self.select)
        if self.forbidden is not None:
            shaped = message_sql.reject_loops(shaped, self.forbidden)
        writer = (
            shaped.observe(counted, count(lit(1)).alias("rows"))
            .write.format("polybus")
            .mode("append")
            .options(bus=self.bus, transactionId=name, transactionNumber=number)
        )
        if self.into is not None:
            writer = writer.option("topic", self.into)
        writer.save()
        return int(counted.get["rows"])


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
        while not stop:
            if not self.position.ranges():
                self.position = self._checkpoint.next(self.position, self._ends(), self._pace.rows)
            if self.position.ranges():
                self._replay_part(stop)
            elif self._plan.ends is not None or stop.wait(every_s):
                return

    def _replay_part(self, stop: StopSignal) -> None:
        """Publish the part that the checkpoint has stored, and store the next one."""
        began_s = time.monotonic()
        part = self.position
        rows = self._target.write(self._source.rows(part), self._plan.name, part.number)
        self.rows += rows
        self.read += sum(wanted.rows for wanted in part.ranges())
        self.parts += 1
        self._pace.adapt(rows)
        ends = self._ends()
        self.position = self._checkpoint.next(part.done(rows), ends, self._pace.rows)
        left = sum(max(0, end - self.position.at.get(n, end)) for n, end in ends.items())
        elapsed_s = max(time.monotonic() - self._began_s, 1e-3)
        self._tell(Progress(self.rows, self.rows / elapsed_s, left))
        if self._rate is not None:
            stop.wait(max(0.0, rows / self._rate - (time.monotonic() - began_s)))

    def _ends(self) -> Ends:
        return self._source.ends() if self._plan.ends is None else self._plan.ends
