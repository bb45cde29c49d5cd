"""The SQL of --where and --select, checked before anything is read or written.

Both are Spark SQL over the columns of a topic: `where` is a condition, `select` a list of columns
as after SELECT. They are tried on an empty table with the same columns, so that syntax errors,
unknown columns and wrong types are reported at once, in one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from polybus.errors import UsageError
from polybus.spark.pipelines.spark_errors import mute_query_loggers
from polybus.spark.sink import message_batches
from polybus.spark.source.read_bounds import TopicSelection
from polybus.spark.source.topic_schema import SCHEMA

WRITTEN = "body, shard_key, headers"  # the columns of a message, without its topic
MANY_AT_ONCE = re.compile(r"^[ +:*()\d-]*(Aggregate|Window|Distinct|Sort)\b", re.MULTILINE)
CLASS = re.compile(r"^\[[\w.]+\] ")
TAIL = re.compile(r"\s*SQLSTATE:.*", re.DOTALL)
# Written as a polybus error: `spark_errors` removes the text that Spark adds.
LOOP = (
    "polybus.errors.UsageError: correct --select: a message would go to a topic that is read "
    "here and loop forever: "
)
_views = count(1)


def empty_topic(spark: SparkSession) -> DataFrame:
    """Return a table with the columns of a topic and without rows."""
    columns = [
        f"cast(null as {field.dataType.simpleString()}) as `{field.name}`"
        for field in SCHEMA.fields
    ]
    return spark.range(0).selectExpr(*columns)


def apply_where(rows: DataFrame, where: str | None) -> DataFrame:
    if where is None:
        return rows
    with _explain_sql_errors("--where", where):
        return rows.where(where)


def apply_select(rows: DataFrame, select: str, *further: str) -> DataFrame:
    """Return the selected columns, and `further` columns by name."""
    view = f"polybus_messages_{next(_views)}"
    rows.createOrReplaceTempView(view)
    try:
        with _explain_sql_errors("--select", select):
            extra = "".join(f", {name}" for name in further)
            return rows.sparkSession.sql(f"SELECT {select}\n{extra} FROM {view}")
    finally:
        rows.sparkSession.catalog.dropTempView(view)


def apply_sql(
    rows: DataFrame, where: str | None, select: str | None, *further: str, default: str = WRITTEN
) -> DataFrame:
    return apply_select(apply_where(rows, where), select or default, *further)


def check(spark: SparkSession, where: str | None, select: str | None, into: str | None) -> None:
    """Raise `UsageError` if a condition, a selection or the target is invalid."""
    if select is not None and not select.strip():
        raise UsageError("--select is empty: name columns, or leave it out")
    messages = apply_sql(empty_topic(spark), where, select)
    names = messages.schema.names
    if into is None and "topic" not in names:
        raise UsageError("no target topic: give --into TOPIC, or a column topic in --select")
    if into is not None and {*message_batches.IGNORED_COLUMNS, "topic"} <= set(names):
        raise UsageError(
            f"name the columns in --select: with * each row keeps its own topic, and no row "
            f"goes to {into}"
        )
    if MANY_AT_ONCE.search(_analyzed(messages).toString()):
        raise UsageError(
            f"--select {select!r} must not aggregate or sort: each message is handled by itself; "
            "use polybus.spark for sums and windows"
        )
    message_batches.check_schema(messages.schema, into)


def needed_columns(spark: SparkSession, where: str | None, select: str | None) -> StructType:
    """Return the schema of the columns that the SQL needs, and `shard`.

    Spark asks a Python source for all columns of its schema, whatever the query uses.
    """
    topic = empty_topic(spark)
    names = {column.exprId().id(): column.name() for column in _all(_analyzed(topic).output())}
    plans, ids = [_analyzed(apply_sql(topic, where, select))], set()
    while plans:
        plan = plans.pop()
        ids |= {column.exprId().id() for column in _all(plan.references().toSeq())}
        plans += _all(plan.children())
    needed = {"shard", *(names[column_id] for column_id in ids & names.keys())}
    return StructType([field for field in SCHEMA.fields if field.name in needed])


def _analyzed(rows: DataFrame) -> Any:
    return rows._jdf.queryExecution().analyzed()


def _all(seq: Any) -> list[Any]:
    """Return the elements of a Scala Seq."""
    return [seq.apply(n) for n in range(seq.size())]


@contextmanager
def _explain_sql_errors(option: str, given: str) -> Iterator[None]:
    try:
        with mute_query_loggers():
            yield
    except ParseException as error:
        raise UsageError(f"{option} {given!r} does not parse: {error_text(error)}") from None
    except AnalysisException as error:
        raise UsageError(f"{option} {given!r} is not valid: {error_text(error)}") from None


def error_text(error: AnalysisException) -> str:
    """Return the message of Spark's error, without its class and details."""
    return CLASS.sub("", TAIL.sub("", str(error).strip())).strip().rstrip(".")


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def like_pattern(pattern: str) -> str:
    """Return a pattern with * as a pattern of SQL's LIKE."""
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%")


def check_deterministic(rows: DataFrame) -> None:
    """Raise `UsageError` if the SQL can give another result when it is computed again."""
    if not _analyzed(rows).deterministic():
        raise UsageError("--where and --select must be deterministic: leave rand() and uuid() out")


def reject_loops(rows: DataFrame, wanted: TopicSelection) -> DataFrame:
    """Make rows fail that would go to a topic that is read. Only the data says where they go."""
    if "topic" not in rows.columns:
        return rows
    reads = [f"topic = {literal(name)}" for name in wanted.names]
    reads += [f"topic LIKE {literal(like_pattern(pattern))}" for pattern in wanted.patterns]
    checked = f"CASE WHEN {' OR '.join(reads)} THEN raise_error(concat({literal(LOOP)}, topic))"
    return rows.selectExpr(
        *(f"`{name}`" for name in rows.columns if name != "topic"),
        f"{checked} ELSE topic END AS topic",
    )
