"""History once more: from archive and log into a topic, by time, id, key or SQL.

A part of half a million rows at a time is read, filtered and published in one
transaction, which has the replay's name and the part's number (`replay_book.py`). Parts go
through all shards side by side, so messages of one key keep their order, and those of
different keys come about as they came.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer
from pyspark.sql import SparkSession

from polybus.errors import UsageError
from polybus.model.start_point import EARLIEST, FORMS, LATEST, parse_start
from polybus.spark.pipelines import message_sql, pipeline_arguments, preflight
from polybus.spark.pipelines.query_run import (
    DEFAULT_EVERY_S,
    OnProgress,
    Summary,
    activate_session,
    ignore_progress,
    raise_own_errors,
    stop_on_signals,
)
from polybus.spark.pipelines.replay.replay_checkpoint import ReplayCheckpoint
from polybus.spark.pipelines.replay.replay_loop import ReplayLoop, ReplaySource, ReplayTarget
from polybus.spark.source.partitions import MOST_ROWS
from polybus.spark.source.read_bounds import TopicSelection

WHY = "it is where replay keeps how far it has come"

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic that is read.")]
From = Annotated[str, typer.Option("--from", metavar="PLACE", help=f"Where to begin: {FORMS}.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="PLACE", help="The first that is left out. [default with --once: now]"
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option("--key", metavar="KEY", help="Only messages of this key; may be repeated."),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", metavar="N", help="Write at most so many messages a second."),
]
Archive = Annotated[
    str | None,
    typer.Option("--archive", metavar="FOLDER", help="Read what is archived from there."),
]
Log = Annotated[bool, typer.Option("--log/--no-log", help="Go on from the archive into the log.")]


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
    """Bring history back into a topic: from archive and log, filtered, exactly once."""
    began_s = time.monotonic()
    activate_session(spark)
    _check(topic, start, end, rate, archive, log)
    message_sql.check(spark, where, select, into)
    source = preflight.check_bus(bus)
    target = preflight.check_target_bus(into_bus, source)
    book = ReplayCheckpoint(preflight.check_folder(checkpoint, "--checkpoint", WHY))
    goes_on = end is None and not once and log
    if goes_on and into == topic and source == target:
        raise UsageError(f"give --once or --to: {topic} into itself would go round for ever")
    asked: dict[str, object] = {"topic": topic, "--into": into, "--from": start, "--to": end}
    asked |= {"--key": sorted(key or []), "--where": where, "--select": select}
    kept = _where(where, key)
    columns = message_sql.needed_columns(spark, kept, select)
    reading = ReplaySource(spark, source, topic, archive, log, columns, accept_loss)
    plan = book.plan(asked) or reading.plan(book, asked, start, None if goes_on else end or LATEST)
    forbidden = TopicSelection(topic) if goes_on and source == target else None
    writing = ReplayTarget(target, into, kept, select, forbidden)
    most_rows = min(rows_per_batch, pipeline_arguments.MOST_UNCUT)
    loop = ReplayLoop(reading, writing, book, plan, most_rows, rate, tell)
    with stop_on_signals() as stop, raise_own_errors():
        loop.run(stop, every_s=every)
    facts = {"read": loop.read, "parts": loop.parts, "replayed in all": loop.position.rows}
    return Summary(loop.rows, time.monotonic() - began_s, dict(facts), stop.by)


def _check(
    topic: str, start: str, end: str | None, rate: float | None, archive: str | None, log: bool
) -> None:
    if "*" in topic or "," in topic:
        raise UsageError(f"{topic}: one topic at a time, since ids are of a topic")
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate is messages a second, above 0, not {rate:g}")
    if not log and archive is None:
        raise UsageError("--no-log leaves nothing to read: give --archive FOLDER")
    for place in (start, end):
        if place is not None:
            parse_start(place)


def _where(where: str | None, keys: list[str] | None) -> str | None:
    of_keys = message_sql.in_condition("shard_key", keys) if keys else None
    both = [f"({one}\n)" for one in (of_keys, where) if one is not None]
    return " AND ".join(both) or None
