"""`dead-letters`: counts dead letters by reason, and queues them again, each exactly once.

    polybus pipeline dead-letters orders
    polybus pipeline dead-letters orders --requeue --reason 'ValueError: *'

`requeue.py` explains how a letter is re-queued once without a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from polybus.errors import Conflict, DoesNotExist, UsageError
from polybus.spark.pipelines import message_sql, pipeline_arguments, preflight
from polybus.spark.pipelines.query_run import (
    OnProgress,
    Progress,
    Summary,
    SummaryTable,
    activate_session,
    ignore_progress,
    stop_on_signals,
)
from polybus.spark.pipelines.requeue import SUFFIX, DeadLetterTopic, LetterSelection, as_letters
from polybus.spark.pipelines.spark_errors import raise_own_errors
from polybus.spark.sink import message_batches
from polybus.spark.source.log_access import open_log_access

EVERY_S = 10.0
GROUPINGS = ("reason", "kind", "group", "from_topic")
MOST_ROWS = 50  # of the printed table
TRIES = 10  # to re-queue letters before other runs do
TIME = "yyyy-MM-dd HH:mm:ss"
CHOICES = "--reason, --group, --id, --where, or --all"

Patterns = list[str] | None
Topic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC", help="The topic of the letters: orders, orders.dlq, or patterns with *."
    ),
]
Requeue = Annotated[bool, typer.Option("--requeue", help=f"Queue letters again. Needs {CHOICES}.")]
Reasons = Annotated[
    Patterns, typer.Option("--reason", metavar="PATTERN", help="Only letters with this reason.")
]
Groups = Annotated[
    Patterns, typer.Option("--group", metavar="GROUP", help="Only letters of this consumer group.")
]
Ids = Annotated[
    list[int] | None, typer.Option("--id", metavar="ID", help="Only the letter with this id.")
]
All = Annotated[bool, typer.Option("--all", help="All letters.")]
Into = Annotated[
    str | None,
    typer.Option(
        "--into",
        metavar="TOPIC",
        help="Target topic. [default: the topic that each letter came from]",
    ),
]
By = Annotated[
    str, typer.Option("--by", metavar="|".join(GROUPINGS), help="Column to group the counts by.")
]
Unused = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="Ignored: the bus stores which letters were re-queued.",
    ),
]


def dead_letters(
    spark: SparkSession,
    topic: Topic = "*",
    *,
    requeue: Requeue = False,
    reason: Reasons = None,
    group: Groups = None,
    letter: Ids = None,
    where: pipeline_arguments.Where = None,
    every_letter: All = False,
    select: pipeline_arguments.Select = None,
    into: Into = None,
    by: By = "reason",
    checkpoint: Unused = None,
    bus: pipeline_arguments.Bus = None,
    every: pipeline_arguments.Every = EVERY_S,
    once: pipeline_arguments.Once = False,
    tell: OnProgress = ignore_progress,
) -> Summary:
    """Count dead letters by reason, and queue selected ones again, exactly once."""
    began_s = time.monotonic()
    activate_session(spark)
    conditions = [*_like_conditions("reason", reason), *_like_conditions("group", group)]
    if letter:
        conditions.append(f"id IN ({', '.join(map(str, letter))})")
    if where is not None:
        conditions.append(where)
    if requeue and not conditions and not every_letter:
        raise UsageError(f"--requeue needs a choice: {CHOICES}")
    if by not in GROUPINGS:
        raise UsageError(f"--by must be one of {', '.join(GROUPINGS)}, got {by!r}")
    if not requeue and (select is not None or into is not None):
        raise UsageError("--select and --into need --requeue: nothing is written without it")
    condition = " AND ".join(f"({condition}\n)" for condition in conditions)
    choice = LetterSelection(condition or None, select, into)
    _check_sql(spark, where, choice)
    url = preflight.check_target_bus(None, preflight.check_bus(bus))
    names = (name.strip() for name in topic.split(","))
    wanted = ",".join(name if name.endswith(SUFFIX) else name + SUFFIX for name in names)
    run = DeadLetterRun(spark, url, wanted, choice, by, tell)
    with stop_on_signals() as stop, raise_own_errors():
        run.scan_topics(requeue=requeue)
        while requeue and not once and not stop.wait(every):
            run.scan_topics(requeue=True)
    facts: dict[str, object] = {"re-queued": run.letters} if requeue else {}
    return Summary(run.letters, time.monotonic() - began_s, facts, stop.by, run.table())


def _like_conditions(column: str, patterns: Sequence[str] | None) -> list[str]:
    """Return a condition that one of the patterns matches; * matches any characters."""
    if not patterns:
        return []
    literals = (message_sql.literal(message_sql.like_pattern(pattern)) for pattern in patterns)
    return [" OR ".join(f"`{column}` LIKE {literal}" for literal in literals)]


def _check_sql(spark: SparkSession, where: str | None, choice: LetterSelection) -> None:
    """Try the SQL on an empty topic, so that its errors are reported before anything is read."""
    nothing = as_letters(message_sql.empty_topic(spark), SUFFIX)
    message_sql.apply_where(nothing, where)
    messages = choice.messages(nothing)
    message_sql.check_deterministic(messages)
    names = [name for name in messages.columns if not name.startswith("polybus_")]
    message_batches.check_schema(messages.select(*names).schema, choice.into or SUFFIX)


class LetterCount(NamedTuple):
    """Number of letters of a group, with the first and the last time."""

    name: str
    letters: int
    first: str
    last: str


class DeadLetterRun:
    """Counts letters of topics, and re-queues the selected ones."""

    def __init__(
        self,
        spark: SparkSession,
        bus: str,
        topics: str,
        choice: LetterSelection,
        by: str,
        tell: OnProgress,
    ) -> None:
        self._spark, self._bus, self._topics = spark, bus, topics
        self._choice, self._by, self._tell = choice, by, tell
        self._groups: dict[tuple[str, str], LetterCount] = {}
        self._began_s = time.monotonic()
        self.letters = 0  # selected, and re-queued with --requeue

    def scan_topics(self, *, requeue: bool) -> None:
        for topic in preflight.find_topics(self._bus, self._topics):
            for group in self._scan_topic(topic, requeue=requeue):
                before = self._groups.get((topic, group.name), group._replace(letters=0))
                letters = before.letters + group.letters
                self._groups[topic, group.name] = before._replace(letters=letters, last=group.last)
                self.letters += group.letters
            elapsed_s = max(time.monotonic() - self._began_s, 1e-3)
            self._tell(Progress(self.letters, self.letters / elapsed_s, None))

    def table(self) -> SummaryTable:
        groups = sorted(self._groups.items(), key=lambda item: (-item[1].letters, item[0]))
        rows: list[list[object]] = [[topic, *group] for (topic, _), group in groups[:MOST_ROWS]]
        if len(groups) > MOST_ROWS:
            rows.append(["…", f"and {len(groups) - MOST_ROWS} more", "", "", ""])
        return SummaryTable(("dead letters", self._by, "letters", "first", "last"), rows)

    def _scan_topic(self, topic: str, *, requeue: bool) -> list[LetterCount]:
        """Count the selected letters of a topic, and re-queue them if `requeue` is set."""
        for _ in range(TRIES):
            letters = DeadLetterTopic(self._spark, self._bus, topic)
            selected = self._choice.of(letters.waiting)
            times = (f"date_format({name}(timestamp), '{TIME}')" for name in ("min", "max"))
            grouped = selected.groupBy(expr(f"coalesce(`{self._by}`, '(none)') AS name"))
            counts = grouped.agg(expr("count(*)"), *map(expr, times)).collect()
            groups = [LetterCount(*row) for row in counts]
            if not requeue or not groups:
                return groups
            if self._choice.into is None and self._choice.select is None:
                self._check_targets(selected)
            if letters.requeue(self._choice):
                return groups
        raise Conflict(f"other runs re-queue dead letters of {topic} at the same time; retry later")

    def _check_targets(self, letters: DataFrame) -> None:
        """Raise `DoesNotExist` if a target topic was dropped: letters must not create it again."""
        for name, count in letters.groupBy("from_topic").count().collect():
            try:
                open_log_access(self._bus).shards(name)
            except DoesNotExist:
                raise DoesNotExist(
                    f"topic {name!r} of {count} letters does not exist: give --into TOPIC, or "
                    "create it"
                ) from None
