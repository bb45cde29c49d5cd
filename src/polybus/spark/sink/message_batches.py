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
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from polybus.errors import TooLarge, UsageError
from polybus.model.arrow import HEADERS_TYPE

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


def check_schema(schema: StructType, topic: str | None) -> None:
    """Raise `UsageError` that names the invalid column and how to fix it."""
    for field in schema.fields:
        name, given = field.name, field.dataType.simpleString()
        if name in IGNORED_COLUMNS:
            continue
        if name not in ALLOWED:
            raise UsageError(
                f"column {name!r} cannot be written: "
                f"select only {', '.join(ALLOWED)} (drop it, or rename it to one of these)"
            )
        # varchar(10), char(10) and collated strings arrive as strings.
        plain = given.split("(")[0].replace("varchar", "string").replace("char", "string")
        if plain.split(" collate ")[0] not in ALLOWED[name]:
            raise UsageError(
                f"column {name} is {given}: cast it to {' or '.join(ALLOWED[name])}, "
                f"for example .withColumn('{name}', col('{name}').cast('{ALLOWED[name][0]}'))"
            )
    if "body" not in schema.names:
        raise UsageError(
            "there is no column body: rename one, for example .select('value as body')"
        )
    if "topic" not in schema.names:
        if topic is None:
            raise UsageError("no target topic: give .option('topic', NAME), or a column topic")
        return
    # The source's own column `topic` is never null. A nullable one was computed by the query.
    is_from_source = not schema["topic"].nullable and set(IGNORED_COLUMNS) <= set(schema.names)
    if topic is not None and is_from_source:
        raise UsageError(
            f"drop the source's column topic: it takes precedence over option topic ({topic}) and "
            "would send every row to its own topic again; use .drop('topic')"
        )


def build_batches(rows: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield topics and batches in the order of the rows. Each batch fits into one put."""
    if rows.num_rows == 0:
        return
    columns = {name: rows.column(name) for name in rows.schema.names if name in ALLOWED}
    targets = columns.pop("topic", None)
    batch = _message_batch(columns)
    if targets is None:
        assert topic is not None  # check_schema requires it
        yield from ((topic, piece) for piece in split_batch(batch))
        return
    targets = _cast(targets, pa.utf8())
    if targets.null_count:
        if topic is None:
            raise UsageError(
                "a topic is null: fill it in, or give .option('topic', NAME) for such rows"
            )
        targets = pc.fill_null(targets, topic)
    # Sorting dictionary indices is cheaper than comparing names row by row. The sort is stable, so
    # rows of a topic keep their order.
    encoded = targets.dictionary_encode()
    names: list[str] = encoded.dictionary.to_pylist()
    counts = [batch.num_rows]
    if len(names) > 1:
        batch = batch.take(pc.array_sort_indices(encoded.indices))
        value_counts = pc.value_counts(encoded.indices).to_pylist()
        by_index = {entry["values"]: entry["counts"] for entry in value_counts}
        counts = [by_index[index] for index in range(len(names))]
    start = 0
    for name, count in zip(names, counts, strict=True):
        yield from ((name, piece) for piece in split_batch(batch.slice(start, count)))
        start += count


def _message_batch(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    """Return a batch of the native port; raises if a row is not a valid message."""
    body, keys, headers = columns["body"], columns.get("shard_key"), columns.get("headers")
    if body.null_count:
        raise UsageError(
            "a body is null: write only rows that have one, .filter('body is not null')"
        )
    # Bodies that are small together need not be measured one by one.
    if body.nbytes > MAX_MESSAGE_BYTES:
        largest = pc.max(pc.binary_length(body)).as_py()
        if largest > MAX_MESSAGE_BYTES:
            raise TooLarge(
                f"a body must have at most {MAX_MESSAGE_BYTES} bytes, got {largest}: split it, or "
                "write a reference to it"
            )
    arrays = {
        "shard_key": pa.nulls(len(body), pa.utf8()) if keys is None else _cast(keys, pa.utf8()),
        "body": _cast(body, pa.binary()),
    }
    if headers is not None:
        if headers.items.null_count:
            raise UsageError(
                "a header's value is null: leave it out, for example "
                ".withColumn('headers', map_filter('headers', lambda _, v: v.isNotNull()))"
            )
        # Field names of a map's entries may differ; only the types matter.
        kinds = headers.type.key_type, headers.type.item_type
        is_plain = kinds == (pa.utf8(), pa.binary())
        arrays["headers"] = headers if is_plain else headers.cast(HEADERS_TYPE)
    return pa.record_batch(list(arrays.values()), names=list(arrays))


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert a column without a copy if its buffers already fit, as those of strings do."""
    return column if column.type == wanted else column.cast(wanted)


def split_batch(rows: pa.RecordBatch, max_bytes: int = MAX_PIECE_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, halved until each piece fits into `max_bytes` or is one message."""
    count: Any = rows.num_rows
    if count <= 1 or rows.nbytes <= max_bytes:
        yield rows
        return
    yield from split_batch(rows.slice(0, count // 2), max_bytes)
    yield from split_batch(rows.slice(count // 2), max_bytes)
