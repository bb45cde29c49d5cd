"""Conversion of Spark rows to batches of the native port, by column and never row by row.

    body        binary or string        required, never null
    shard_key   string                  messages of one key keep their order
    topic       string                  target topic; option `topic` if null or absent
    headers     map<string, binary>

The source's columns about a message's position (`offset`, `timestamp`, …) are ignored, so that
rows of one topic can be written to another. Any other column is an error: a misspelt `shard_key`
would otherwise be dropped silently.
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
# Every bus accepts this size with any configuration; also FDQ's limit.
MAX_MESSAGE_BYTES = 64 << 20
# Larger batches are split between messages, so that blocks are neither tiny nor huge.
MAX_PIECE_BYTES = 4 << 20


# --- schema checks


def check_schema(schema: StructType, topic: str | None) -> None:
    """Raise `UsageError` that names the invalid column and how to fix it."""
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
    """Check that each row has a target topic.

    The source's own column `topic` is never null. A nullable one was computed by the query.
    """
    if "topic" not in schema.names:
        if topic is None:
            raise UsageError("no target topic: give .option('topic', NAME), or a column topic")
        return
    is_from_source = not schema["topic"].nullable and set(IGNORED_COLUMNS) <= set(schema.names)
    if topic is not None and is_from_source:
        raise UsageError(
            f"drop the source's column topic: it takes precedence over option topic ({topic}) and "
            "would send every row to its own topic again; use .drop('topic')"
        )


# --- batches of a task


def build_batches(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield topics and batches in the order of the rows. Each batch fits into one put."""
    if rows.num_rows == 0:
        return
    columns = {name: rows.column(name) for name in rows.schema.names if name in ALLOWED}
    targets = columns.pop("topic", None)
    batch = _batch(columns)
    if targets is None:
        assert topic is not None  # check_schema requires it
        parts: Iterator[tuple[str, pa.RecordBatch]] = iter([(topic, batch)])
    else:
        parts = _by_topic(batch, _filled(targets, topic))
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
    arrays = {
        "shard_key": pa.nulls(len(body), pa.utf8()) if keys is None else _cast(keys, pa.utf8()),
        "body": _cast(body, pa.binary()),
    }
    if "headers" in columns:
        arrays["headers"] = _headers(columns["headers"])
    return pa.record_batch(list(arrays.values()), names=list(arrays))


def _check_size(body: pa.Array) -> None:
    if body.nbytes <= MAX_MESSAGE_BYTES:
        return  # no single body can exceed the limit
    largest = pc.max(pc.binary_length(body)).as_py()
    if largest > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"a body must have at most {MAX_MESSAGE_BYTES} bytes, got {largest}: split it, or "
            "write a reference to it"
        )


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert a column without a copy if its buffers already fit, as those of strings do."""
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
    """Return the target topics with nulls replaced by option `topic`."""
    targets = _cast(targets, pa.utf8())
    if not targets.null_count:
        return targets
    if topic is None:
        raise UsageError(
            "a topic is null: fill it in, or give .option('topic', NAME) for such rows"
        )
    return pc.fill_null(targets, topic)


def _by_topic(batch: pa.RecordBatch, targets: pa.Array) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield one batch per topic. The sort is stable, so rows of a topic keep their order."""
    # Sorting dictionary indices is cheaper than comparing names row by row.
    encoded = targets.dictionary_encode()
    names: list[str] = encoded.dictionary.to_pylist()
    if len(names) == 1:
        yield names[0], batch
        return
    sorted_rows = batch.take(pc.array_sort_indices(encoded.indices))
    counts: dict[int, int] = {
        one["values"]: one["counts"] for one in pc.value_counts(encoded.indices).to_pylist()
    }
    start = 0
    for index, name in enumerate(names):
        yield name, sorted_rows.slice(start, counts[index])
        start += counts[index]


def split_batch(rows: pa.RecordBatch, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, halved until each piece fits into `max_bytes` or is one message."""
    count: Any = rows.num_rows
    if count <= 1 or rows.nbytes <= max_bytes:
        yield rows
        return
    yield from split_batch(rows.slice(0, count // 2), max_bytes)
    yield from split_batch(rows.slice(count // 2), max_bytes)
