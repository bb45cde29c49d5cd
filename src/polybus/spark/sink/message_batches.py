"""Rows of Spark, as batches of the native port: by columns, never row by row.

    body        binary or string        required, never null
    shard_key   string                  messages of one key keep their order
    topic       string                  where the row goes; null or absent: option `topic`
    headers     map<string, binary>

The columns of our own source that say where a message stood (`offset`, `timestamp`, …) are
passed over, so that what was read from a topic can be written to another. Any other column
is refused: a misspelt `shard_key` would else be lost, and nobody told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import TooLarge, UsageError
from polybus.model.arrow import HEADERS_TYPE

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ALLOWED = {
    "body": ("binary", "string"),
    "shard_key": ("string",),
    "topic": ("string",),
    "headers": ("map<string,binary>",),
}
IGNORED_COLUMNS = ("shard", "offset", "id", "timestamp", "timestamp_ns", "insertion_time")
# What every bus takes, however it is set up; FDQ's limit, too.
MAX_MESSAGE_BYTES = 64 << 20
# One message travels in one batch; more are cut, so that blocks are neither tiny nor huge.
MAX_PIECE_BYTES = 4 << 20


# --- before anything is written


def check_schema(schema: StructType, topic: str | None) -> None:
    """`UsageError` says which column is wrong, and what to do about it."""
    for field in schema.fields:
        if field.name in IGNORED_COLUMNS:
            continue
        if field.name not in ALLOWED:
            raise UsageError(
                f"column {field.name!r} cannot be written: "
                f"select only {', '.join(ALLOWED)} (drop it, or rename it to one of these)"
            )
        _check_type(field.name, field.dataType.simpleString())
    if "body" not in schema.names:
        raise UsageError(
            "there is no column body: rename one, for example .select('value as body')"
        )
    _check_target(schema, topic)


def _check_type(name: str, given: str) -> None:
    allowed = ALLOWED[name]
    plain = given.split("(")[0].replace("varchar", "string").replace("char", "string")
    if plain.split(" collate ")[0] not in allowed:
        raise UsageError(
            f"column {name} is {given}: cast it to {' or '.join(allowed)}, "
            f"for example .withColumn('{name}', col('{name}').cast('{allowed[0]}'))"
        )


def _check_target(schema: StructType, topic: str | None) -> None:
    """The source's own column is never null: one that may be was computed, and is meant."""
    if "topic" not in schema.names:
        if topic is None:
            raise UsageError("say where to write: .option('topic', NAME), or a column topic")
        return
    is_the_sources = not schema["topic"].nullable and set(IGNORED_COLUMNS) <= set(schema.names)
    if topic is not None and is_the_sources:
        raise UsageError(
            f"drop the source's column topic, which would win over option topic ({topic}) and "
            "send every row back to where it came from: .drop('topic')"
        )


# --- what a task writes


def build_batches(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Topics and their messages, in the order of the rows; each fits into one put."""
    if rows.num_rows == 0:
        return
    columns = {name: rows.column(name) for name in rows.schema.names if name in ALLOWED}
    targets = columns.pop("topic", None)
    whole = _batch(columns)
    if targets is None:
        assert topic is not None  # checked with the schema
        parts: Iterator[tuple[str, pa.RecordBatch]] = iter([(topic, whole)])
    else:
        parts = _by_topic(whole, _filled(targets, topic))
    for name, part in parts:
        yield from ((name, piece) for piece in split_batch(part))


def _batch(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    body = columns["body"]
    if body.null_count:
        raise UsageError(
            "a body is null: write only rows that have one, .filter('body is not null')"
        )
    _check_size(body)
    keys = columns.get("shard_key")
    found = {
        "shard_key": pa.nulls(len(body), pa.utf8()) if keys is None else _cast(keys, pa.utf8()),
        "body": _cast(body, pa.binary()),
    }
    if "headers" in columns:
        found["headers"] = _headers(columns["headers"])
    return pa.record_batch(list(found.values()), names=list(found))


def _check_size(body: pa.Array) -> None:
    if body.nbytes <= MAX_MESSAGE_BYTES:
        return  # together
    largest = pc.max(pc.binary_length(body)).as_py()
    if largest > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"a body has {largest} bytes, and at most {MAX_MESSAGE_BYTES} can be written: cut it, "
            "or write where it can be found"
        )


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Strings are bytes already: no copy."""
    return column if column.type == wanted else column.cast(wanted)


def _headers(column: pa.Array) -> pa.Array:
    if column.items.null_count:
        raise UsageError(
            "a header's value is null: leave it out, for example "
            ".withColumn('headers', map_filter('headers', lambda _, v: v.isNotNull()))"
        )
    kinds = column.type.key_type, column.type.item_type
    return column if kinds == (pa.utf8(), pa.binary()) else column.cast(HEADERS_TYPE)


def _filled(targets: pa.Array, topic: str | None) -> pa.Array:
    targets = _cast(targets, pa.utf8())
    if not targets.null_count:
        return targets
    if topic is None:
        raise UsageError(
            "a topic is null: fill it in, or give .option('topic', NAME) for such rows"
        )
    return pc.fill_null(targets, topic)


def _by_topic(whole: pa.RecordBatch, targets: pa.Array) -> Iterator[tuple[str, pa.RecordBatch]]:
    """One batch a topic; rows of one topic keep their order, since the sort is stable."""
    encoded = targets.dictionary_encode()
    names: list[str] = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], whole
        return
    sorted_rows = whole.take(pc.array_sort_indices(encoded.indices))
    counts: dict[int, int] = {
        one["values"]: one["counts"] for one in pc.value_counts(encoded.indices).to_pylist()
    }
    start = 0
    for index, name in enumerate(names):
        yield name, sorted_rows.slice(start, counts[index])
        start += counts[index]


def split_batch(rows: pa.RecordBatch, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[pa.RecordBatch]:
    """The rows in order, in halves of halves until each is small enough or one message."""
    count: Any = rows.num_rows
    if count <= 1 or rows.nbytes <= max_bytes:
        yield rows
        return
    yield from split_batch(rows.slice(0, count // 2), max_bytes)
    yield from split_batch(rows.slice(count // 2), max_bytes)
