"""History once more: from archive and log into a topic, by time, id, key or SQL.

A part of at most half a million rows at a time is read, filtered and published in one
transaction, which has the replay's name and the part's number (`replay_book.py`). Parts go
through all shards side by side, so messages of one key keep their order, and those of
different keys come about as they came.
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

from polybus.errors import UsageError
from polybus.model.moments import EARLIEST, FORMS, LATEST, parse
from polybus.spark.access import Access, opened
from polybus.spark.archives import versions
from polybus.spark.archives.folder import Folder
from polybus.spark.pipelines import arguments, checks, sql
from polybus.spark.pipelines.replay_book import Book, Plan, Position
from polybus.spark.pipelines.replay_bounds import Ends, offsets_at
from polybus.spark.pipelines.running import (
    DEFAULT_EVERY_S,
    Progress,
    Stop,
    Summary,
    Tell,
    activate,
    plainly,
    silent,
    stoppable,
)
from polybus.spark.planning import MOST_ROWS

WHY = "it is where replay keeps how far it has come"
# A part of a slow replay: about what is to go in so long.
PART_S = 1.0
BATCH = "The most that is read at a time."


def replay(
    spark: SparkSession,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic that is read.")],
    *,
    into: arguments.Into = None,
    start: Annotated[
        str, typer.Option("--from", metavar="PLACE", help=f"Where to begin: {FORMS}.")
    ] = EARLIEST,
    end: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="PLACE", help="The first that is left out. [default with --once: now]"
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="KEY", help="Only messages of this key; may be repeated."),
    ] = None,
    where: arguments.Where = None,
    select: arguments.Select = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="N", help="Write at most so many messages a second."),
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option("--archive", metavar="FOLDER", help="Read what is archived from there."),
    ] = None,
    log: Annotated[
        bool, typer.Option("--log/--no-log", help="Go on from the archive into the log.")
    ] = True,
    checkpoint: arguments.Checkpoint = None,
    bus: arguments.Bus = None,
    into_bus: arguments.IntoBus = None,
    every: arguments.Every = DEFAULT_EVERY_S,
    rows_per_batch: Annotated[
        int,
        typer.Option("--rows-per-batch", metavar="N", min=1, max=MOST_ROWS, help=BATCH),
    ] = MOST_ROWS,
    once: arguments.Once = False,
    tell: Tell = silent,
) -> Summary:
    """Bring history back into a topic: from archive and log, filtered, exactly once."""
    began_s = time.monotonic()
    activate(spark)
    _check(topic, rate, archive, log)
    sql.check(spark, where, select, into)
    for place in (start, end):
        if place is not None:
            parse(place)
    source = checks.bus_of(bus)
    target = checks.writable_bus(into_bus, source)
    folder = checks.folder(checkpoint, "--checkpoint", WHY)
    is_open = end is None and not once and log
    if is_open and into == topic and source == target:
        raise UsageError(f"give --once or --to: {topic} into itself would go round for ever")
    asked = {
        "topic": topic,
        "--into": into,
        "--from": start,
        "--to": end,
        "--key": sorted(key or []),
        "--where": where,
        "--select": select,
    }
    reading = Reading(spark, source, topic, archive, log)
    book = Book(folder)
    plan = book.plan(asked) or reading.plan(book, asked, start, None if is_open else end or LATEST)
    writing = Writing(target, into, _where(where, key), select)
    most = min(rows_per_batch, max(1, int(rate * PART_S))) if rate else rows_per_batch
    loop = Loop(reading, writing, book, plan, most, rate, tell)
    with stoppable() as stop, plainly():
        loop.run(stop, every_s=every)
    facts: dict[str, object] = {
        "read": loop.read,
        "parts": loop.parts,
        "replayed in all": loop.position.rows,
    }
    return Summary(loop.rows, time.monotonic() - began_s, facts, stop.by)


def _check(topic: str, rate: float | None, archive: str | None, log: bool) -> None:
    if "*" in topic or "," in topic:
        raise UsageError(f"{topic}: one topic at a time, since ids are of a topic")
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate is messages a second, above 0, not {rate:g}")
    if not log and archive is None:
        raise UsageError("--no-log leaves nothing to read: give --archive FOLDER")


def _where(where: str | None, keys: list[str] | None) -> str | None:
    of_keys = sql.one_of("shard_key", keys) if keys else None
    both = [f"({one}\n)" for one in (of_keys, where) if one is not None]
    return " AND ".join(both) or None


@dataclass(frozen=True)
class Reading:
    """Where a topic is read."""

    spark: SparkSession
    bus: str
    topic: str
    archive: str | None
    log: bool

    @property
    def access(self) -> Access:
        return opened(self.bus, self.archive)

    def ends(self) -> Ends:
        """Where each shard ends now: in the log, or in the archive alone."""
        if self.log or self.archive is None:
            return {n: one.end for n, one in self.access.shards(self.topic).items()}
        archived = versions.newest(Folder(self.archive), self.topic).shards
        return {n: span.end for n, span in archived.items()}

    def plan(self, book: Book, asked: Mapping[str, object], start: str, end: str | None) -> Plan:
        if self.archive is None:
            checks.there(self.bus, self.topic)
        access, there = self.access, self.ends()
        shards = {n: one for n, one in access.shards(self.topic).items() if n in there}
        shards = {n: one._replace(end=there[n]) for n, one in shards.items()}
        starts = offsets_at(access, self.topic, start, shards)
        if end is None:
            return book.begin(asked, starts, None)
        ends = offsets_at(access, self.topic, end, shards)
        ends = {n: max(starts[n], offset) for n, offset in ends.items()}
        return book.begin(asked, starts, ends)

    def rows(self, part: Position) -> DataFrame:
        """The rows of a part, and of no other shard: those that are not named are read whole."""
        others = {n: one.start for n, one in self.access.shards(self.topic).items()}
        first, last = (self._as_json({**others, **some}) for some in (part.at, part.to))
        options = {"bus": self.bus, "topic": self.topic}
        options |= {"startingOffsets": first, "endingOffsets": last}
        if self.archive is not None:
            options["archive"] = self.archive
        rows = self.spark.read.format("polybus").options(**options).load()
        return rows.where(f"shard IN ({', '.join(map(str, part.to))})")

    def _as_json(self, offsets: Ends) -> str:
        return json.dumps({self.topic: {str(shard): at for shard, at in offsets.items()}})


@dataclass(frozen=True)
class Writing:
    bus: str
    into: str | None
    where: str | None
    select: str | None

    def write(self, rows: DataFrame, name: str, number: int) -> int:
        """How many were written; a part that was published before is not published again."""
        seen = Observation()
        shaped = sql.shaped(rows, self.where, self.select)
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


class Loop:
    """Part by part, not faster than it may be, until the end or a signal."""

    def __init__(
        self,
        reading: Reading,
        writing: Writing,
        book: Book,
        plan: Plan,
        part_rows: int,
        rate: float | None,
        tell: Tell,
    ) -> None:
        self._reading, self._writing = reading, writing
        self._book, self._plan = book, plan
        self._rate, self._tell = rate, tell
        self._part_rows = part_rows
        self._began_s = time.monotonic()
        self.position = book.position(plan)
        self.rows = self.read = self.parts = 0

    def run(self, stop: Stop, *, every_s: float) -> None:
        topic = self._reading.topic
        while not stop:
            if not self.position.ranges(topic):
                ends = self._ends()
                self.position = self._book.next(self.position, ends, self._part_rows)
            if self.position.ranges(topic):
                self._one_part(stop)
            elif self._plan.ends is not None or stop.wait(every_s):
                return

    def _ends(self) -> Ends:
        return self._reading.ends() if self._plan.ends is None else self._plan.ends

    def _one_part(self, stop: Stop) -> None:
        began_s = time.monotonic()
        part = self.position
        rows = self._writing.write(self._reading.rows(part), self._plan.name, part.number)
        self.rows += rows
        self.read += sum(one.rows for one in part.ranges(""))
        self.parts += 1
        ends = self._ends()
        self.position = self._book.next(part.done(rows), ends, self._part_rows)
        self._say(ends)
        if self._rate is not None:
            stop.wait(max(0.0, rows / self._rate - (time.monotonic() - began_s)))

    def _say(self, ends: Ends) -> None:
        left = sum(max(0, end - self.position.at.get(n, end)) for n, end in ends.items())
        elapsed_s = max(time.monotonic() - self._began_s, 1e-3)
        self._tell(Progress(self.rows, self.rows / elapsed_s, left))
