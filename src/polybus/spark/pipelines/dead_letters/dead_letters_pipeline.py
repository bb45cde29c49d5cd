"""`dead-letters`: counts dead letters by reason, and queues them again, each exactly once.

    polybus pipeline dead-letters orders
    polybus pipeline dead-letters orders --requeue --reason 'ValueError: *'

`requeue.py` explains how a letter is re-queued once without a checkpoint.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from polybus.errors import DoesNotExist, UsageError
from polybus.spark.pipelines import message_sql, pipeline_arguments, preflight
from polybus.spark.pipelines.dead_letters.requeue import (
    SUFFIX,
    TRIES,
    DeadLetterTopic,
    LetterSelection,
    as_letters,
    conflict_error,
    count_targets,
)
from polybus.spark.pipelines.query_run import (
    OnProgress,
    Progress,
    Summary,
    SummaryTable,
    activate_session,
    ignore_progress,
    raise_own_errors,
    stop_on_signals,
)
from polybus.spark.sink import message_batches
from polybus.spark.source.log_access import open_log_access

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY_S = 10.0
GROUPINGS = ("reason", "kind", "group", "from_topic")
MOST_ROWS = 50  # of the printed table
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
    conditions = [
        *_like_conditions("reason", reason),
        *_like_conditions("group", group),
        *_ids(letter),
    ]
    conditions += [] if where is None else [where]
    if requeue and not conditions and not every_letter:
        raise UsageError(f"--requeue needs a choice: {CHOICES}")
    if by not in GROUPINGS:
        raise UsageError(f"--by must be one of {', '.join(GROUPINGS)}, got {by!r}")
    if not requeue and (select is not None or into is not None):
        raise UsageError("--select and --into need --requeue: nothing is written without it")
    choice = LetterSelection(" AND ".join(f"({one}\n)" for one in conditions) or None, select, into)
    _check(spark, where, choice)
    url = preflight.check_target_bus(None, preflight.check_bus(bus))
    wanted = ",".join(_letters_of(one.strip()) for one in topic.split(","))
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
    return [
        " OR ".join(
            f"`{column}` LIKE {message_sql.literal(message_sql.like_pattern(one))}"
            for one in patterns
        )
    ]


def _ids(letters: Sequence[int] | None) -> list[str]:
    return [f"id IN ({', '.join(map(str, letters))})"] if letters else []


def _letters_of(topic: str) -> str:
    return topic if topic.endswith(SUFFIX) else topic + SUFFIX


def _check(spark: SparkSession, where: str | None, choice: LetterSelection) -> None:
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

    def merge(self, other: LetterCount) -> LetterCount:
        return LetterCount(self.name, self.letters + other.letters, self.first, other.last)


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
            found = self._scan_topic(topic, requeue=requeue)
            for one in found:
                before = self._groups.get((topic, one.name))
                self._groups[topic, one.name] = one if before is None else before.merge(one)
            self.letters += sum(one.letters for one in found)
            elapsed_s = max(time.monotonic() - self._began_s, 1e-3)
            self._tell(Progress(self.letters, self.letters / elapsed_s, None))

    def table(self) -> SummaryTable:
        found = sorted(self._groups.items(), key=lambda one: (-one[1].letters, one[0]))
        rows: list[list[object]] = [[topic, *group] for (topic, _), group in found[:MOST_ROWS]]
        if len(found) > MOST_ROWS:
            rows.append(["…", f"and {len(found) - MOST_ROWS} more", "", "", ""])
        return SummaryTable(("dead letters", self._by, "letters", "first", "last"), rows)

    def _scan_topic(self, topic: str, *, requeue: bool) -> list[LetterCount]:
        for _ in range(TRIES):
            letters = DeadLetterTopic(self._spark, self._bus, topic)
            conditions = self._choice.of(letters.waiting)
            counted = self._counted(conditions)
            if not requeue or not counted:
                return counted
            if self._choice.into is None and self._choice.select is None:
                self._check_targets(conditions)
            if letters.requeue(self._choice):
                return counted
        raise conflict_error(topic)

    def _counted(self, letters: DataFrame) -> list[LetterCount]:
        times = (f"date_format({one}(timestamp), '{TIME}')" for one in ("min", "max"))
        grouped = letters.groupBy(expr(f"coalesce(`{self._by}`, '(none)') AS name"))
        counts = grouped.agg(expr("count(*)"), *(expr(one) for one in times))
        return [LetterCount(*row) for row in counts.collect()]

    def _check_targets(self, conditions: DataFrame) -> None:
        """Raise `DoesNotExist` if a target topic was dropped: letters must not create it again."""
        for name, count in count_targets(conditions).items():
            try:
                open_log_access(self._bus).shards(name)
            except DoesNotExist:
                raise DoesNotExist(
                    f"topic {name!r} of {count} letters does not exist: give --into TOPIC, or "
                    "create it"
                ) from None
