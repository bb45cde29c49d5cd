"""What --where and --select say, looked at before anything is read or written.

Both are Spark's SQL over the columns of a topic: `where` a condition, `select` a list as it
stands behind SELECT. They are tried on an empty table of the same columns, so that what does
not parse, names no column or has a wrong type is told at once, in one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql.types import StructType

from polybus.errors import UsageError
from polybus.spark.pipelines.spark_errors import mute_query_loggers
from polybus.spark.sink import message_batches
from polybus.spark.source.topic_schema import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from polybus.spark.source.read_bounds import TopicSelection

WRITTEN = "body, shard_key, headers"  # of a message, without its topic
MANY_AT_ONCE = re.compile(r"^[ +:*()\d-]*(Aggregate|Window|Distinct|Sort)\b", re.MULTILINE)
CLASS = re.compile(r"^\[[\w.]+\] ")
TAIL = re.compile(r"\s*SQLSTATE:.*", re.DOTALL)
# As an error of ours says it: what Spark wraps around it is taken off again.
LOOP = (
    "polybus.errors.UsageError: correct --select: a message would go to a topic that is read "
    "here, and so round for ever: "
)
_views = count(1)


def empty_topic(spark: SparkSession) -> DataFrame:
    """The columns of a topic, and no row."""
    columns = [
        f"cast(null as {one.dataType.simpleString()}) as `{one.name}`" for one in SCHEMA.fields
    ]
    return spark.range(0).selectExpr(*columns)


def apply_where(rows: DataFrame, where: str | None) -> DataFrame:
    if where is None:
        return rows
    with _explain_sql_errors("--where", where):
        return rows.where(where)


def apply_select(rows: DataFrame, select: str, *further: str) -> DataFrame:
    """`further` columns are selected as well, by their names."""
    view = f"polybus_messages_{next(_views)}"
    rows.createOrReplaceTempView(view)
    try:
        with _explain_sql_errors("--select", select):
            behind = "".join(f", {name}" for name in further)
            return rows.sparkSession.sql(f"SELECT {select}\n{behind} FROM {view}")
    finally:
        rows.sparkSession.catalog.dropTempView(view)


def apply_sql(
    rows: DataFrame, where: str | None, select: str | None, *further: str, default: str = WRITTEN
) -> DataFrame:
    return apply_select(apply_where(rows, where), select or default, *further)


def check(spark: SparkSession, where: str | None, select: str | None, into: str | None) -> None:
    """`UsageError` says what is wrong with a filter, a projection, or where rows would go."""
    if select is not None and not select.strip():
        raise UsageError("--select is empty: name columns, or leave it out")
    found = apply_sql(empty_topic(spark), where, select)
    names = found.schema.names
    if into is None and "topic" not in names:
        raise UsageError("say where to: --into TOPIC, or a column topic in --select")
    if into is not None and {*message_batches.IGNORED_COLUMNS, "topic"} <= set(names):
        raise UsageError(
            f"name the columns in --select: with * each row keeps its own topic, and none "
            f"would go to {into}"
        )
    _check_one_by_one(found, select)
    message_batches.check_schema(found.schema, into)


def needed_columns(spark: SparkSession, where: str | None, select: str | None) -> StructType:
    """The columns of a topic that they need, and `shard`. Spark asks a source in Python for all
    that its schema has, and makes rows of it, whatever a query looks at."""
    topic = empty_topic(spark)
    names = {one.exprId().id(): one.name() for one in _all(_analyzed(topic).output())}
    plans, ids = [_analyzed(apply_sql(topic, where, select))], set()
    while plans:
        plan = plans.pop()
        ids |= {one.exprId().id() for one in _all(plan.references().toSeq())}
        plans += _all(plan.children())
    found = {"shard", *(names[one] for one in ids & names.keys())}
    return StructType([one for one in SCHEMA.fields if one.name in found])


def _analyzed(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()


def _all(seq: Any) -> list[Any]:
    """Of a Seq of Scala."""
    return [seq.apply(n) for n in range(seq.size())]


def _check_one_by_one(found: DataFrame, select: str | None) -> None:
    plan = _analyzed(found).toString()
    if MANY_AT_ONCE.search(plan):
        raise UsageError(
            f"--select {select!r} is over many messages at once: each is handled by itself; "
            "use polybus.spark for sums and windows"
        )


@contextmanager
def _explain_sql_errors(option: str, given: str) -> Iterator[None]:
    try:
        with mute_query_loggers():
            yield
    except ParseException as error:
        raise UsageError(f"{option} {given!r} does not parse: {error_text(error)}") from None
    except AnalysisException as error:
        raise UsageError(f"{option} {given!r} cannot be: {error_text(error)}") from None


def error_text(error: AnalysisException) -> str:
    """What Spark's error says, without its class and what comes behind."""
    return CLASS.sub("", TAIL.sub("", str(error).strip())).strip().rstrip(".")


def literal(text: str) -> str:
    """A text as SQL writes it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def in_condition(column: str, values: Sequence[str]) -> str:
    return f"{column} IN ({', '.join(map(literal, values))})"


def like_pattern(pattern: str) -> str:
    """A pattern with * for anything, as SQL's LIKE writes it."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")


def check_deterministic(rows: DataFrame) -> None:
    """What is asked twice must be answered in the same way."""
    if not _analyzed(rows).deterministic():
        raise UsageError(
            "--where and --select must say the same each time: leave rand() and uuid() out"
        )


def reject_loops(rows: DataFrame, wanted: TopicSelection) -> DataFrame:
    """Where SQL says where a row goes, that is known when it goes there."""
    if "topic" not in rows.columns:
        return rows
    reads = [f"topic = {literal(name)}" for name in wanted.names]
    reads += [f"topic LIKE {literal(like_pattern(one))}" for one in wanted.patterns]
    checked = f"CASE WHEN {' OR '.join(reads)} THEN raise_error(concat({literal(LOOP)}, topic))"
    return rows.selectExpr(
        *(f"`{name}`" for name in rows.columns if name != "topic"),
        f"{checked} ELSE topic END AS topic",
    )
