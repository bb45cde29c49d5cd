"""`replay`: publishes history again, from archive and log, selected by time, id, key or SQL.

Reads, filters and publishes parts of half a million rows. A part is one commit with the replay's
name and the part's number (`replay_checkpoint.py`). Parts advance through all shards in parallel,
so messages of one key keep their order, and other messages keep it approximately.
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

WHY = "replay stores its position there"

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
    _check(topic, start, end, rate, archive, log)
    message_sql.check(spark, where, select, into)
    source = preflight.check_bus(bus)
    target = preflight.check_target_bus(into_bus, source)
    checkpoint_files = ReplayCheckpoint(preflight.check_folder(checkpoint, "--checkpoint", WHY))
    goes_on = end is None and not once and log
    if goes_on and into == topic and source == target:
        raise UsageError(f"give --once or --to: replaying {topic} into itself would loop forever")
    asked: dict[str, object] = {"topic": topic, "--into": into, "--from": start, "--to": end}
    asked |= {"--key": sorted(key or []), "--where": where, "--select": select}
    kept = _where(where, key)
    columns = message_sql.needed_columns(spark, kept, select)
    read_from = ReplaySource(spark, source, topic, archive, log, columns, accept_loss)
    plan = checkpoint_files.plan(asked) or read_from.plan(
        checkpoint_files, asked, start, None if goes_on else end or LATEST
    )
    forbidden = TopicSelection(topic) if goes_on and source == target else None
    write_to = ReplayTarget(target, into, kept, select, forbidden)
    most_rows = min(rows_per_batch, pipeline_arguments.MOST_UNCUT)
    loop = ReplayLoop(read_from, write_to, checkpoint_files, plan, most_rows, rate, tell)
    with stop_on_signals() as stop, raise_own_errors():
        loop.run(stop, every_s=every)
    facts = {"read": loop.read, "parts": loop.parts, "replayed in all": loop.position.rows}
    return Summary(loop.rows, time.monotonic() - began_s, dict(facts), stop.by)


def _check(
    topic: str, start: str, end: str | None, rate: float | None, archive: str | None, log: bool
) -> None:
    if "*" in topic or "," in topic:
        raise UsageError(f"replay takes one topic, got {topic}: ids belong to a topic")
    if rate is not None and not rate > 0:
        raise UsageError(f"--rate must be > 0 messages per second, got {rate:g}")
    if not log and archive is None:
        raise UsageError("--no-log needs --archive FOLDER: without both there is nothing to read")
    for place in (start, end):
        if place is not None:
            parse_start(place)


def _where(where: str | None, keys: list[str] | None) -> str | None:
    of_keys = message_sql.in_condition("shard_key", keys) if keys else None
    both = [f"({one}\n)" for one in (of_keys, where) if one is not None]
    return " AND ".join(both) or None
