"""Blocks and rows as Arrow record batches: the only module of `model` that needs pyarrow.

Both directions work per column: `batch_of` wraps the columns of a read without copying;
`block_of` passes the buffers of a batch to the kernel, which checks every offset, null and
string. Batches come from untrusted clients, so Arrow's structural check comes first: its
accessors trust the buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.errors import MalformedRequest, TooLarge, UsageError
from polybus.model.block import Block, Headers, Keys
from polybus.model.rows import EMPTY, Column, Rows

HEADERS_TYPE = pa.map_(pa.utf8(), pa.binary())

PRODUCE_SCHEMA = pa.schema(
    [
        pa.field("shard_key", pa.utf8()),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("insertion_ms", pa.int64()),
        pa.field("headers", HEADERS_TYPE),
    ]
)
REQUIRED = ("shard_key", "body")

READ_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp_ns", pa.int64(), nullable=False),
        pa.field("insertion_ms", pa.int64(), nullable=False),
        pa.field("shard_key", pa.utf8()),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("headers", HEADERS_TYPE),
    ]
)

# A column of nulls takes no memory in batches of up to this size, that of a usual read.
MAX_SHARED_NULLS = 65_536
_NO_ENTRIES = pa.array([], pa.struct([HEADERS_TYPE.key_field, HEADERS_TYPE.item_field]))
_ZEROES = pa.py_buffer(bytes((MAX_SHARED_NULLS + 1) * 4))


# --- reading ------------------------------------------------------------------


def read_schema(columns: Collection[str] | None) -> pa.Schema:
    """Return the schema of a read of these columns (None: all), in their usual order.

    Raises MalformedRequest if a column is unknown.
    """
    if columns is None:
        return READ_SCHEMA
    unknown = sorted(set(columns) - set(READ_SCHEMA.names))
    if unknown or not columns:
        got = repr(unknown[0][:64]) if unknown else "none"
        raise MalformedRequest(
            f"read: columns must be among {', '.join(READ_SCHEMA.names)}, got {got}"
        )
    return pa.schema([field for field in READ_SCHEMA if field.name in columns])


def batch_of(rows: Rows) -> pa.RecordBatch:
    """Return the rows as a batch of READ_SCHEMA, without copying."""
    count = rows.count
    columns = [
        _plain(pa.int64(), count, rows.ids),
        _plain(pa.int32(), count, rows.shards),
        _plain(pa.int64(), count, rows.offsets),
        _plain(pa.int64(), count, rows.timestamps_ns),
        _plain(pa.int64(), count, rows.insertion_ms),
        _strings(pa.utf8(), count, rows.key_validity, rows.key_offsets, rows.keys),
        _strings(pa.binary(), count, None, rows.body_offsets, rows.bodies),
        _maps(rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)


def take_rows(rows: Rows, indexes: Sequence[int]) -> Rows:
    """Return some of the rows, copied."""
    if not indexes:
        return EMPTY
    batch = batch_of(rows).take(pa.array(indexes, pa.int64()))
    ids, shards, offsets, times, insertions, keys, bodies, headers = batch.columns
    fixed = [
        _bytes(column.buffers()[1])[: column.type.bit_width // 8 * len(indexes)]
        for column in (ids, shards, offsets, times, insertions)
    ]
    _, body_offsets, body_data = _string_buffers(bodies)
    optional: list[Column | None] = [None] * 3
    if keys.null_count < len(keys):
        optional = list(_string_buffers(keys))
    if headers.null_count < len(headers):
        _, *names = _string_buffers(headers.keys)
        _, *values = _string_buffers(headers.items)
        optional += [_validity(headers), _offsets(headers), *names, *values]
    return Rows(len(indexes), *fixed, body_offsets, body_data, *optional)  # type: ignore[call-arg]


def _plain(kind: pa.DataType, count: int, values: Column) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])


def _strings(
    kind: pa.DataType, count: int, validity: Column | None, offsets: Column | None, data: Any
) -> pa.Array:
    if offsets is None:
        return pa.Array.from_buffers(kind, count, [*_nothing(count), pa.py_buffer(b"")])
    buffers = [_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, count, buffers)


def _maps(rows: Rows) -> pa.Array:
    if rows.header_offsets is None:
        buffers = _nothing(rows.count)
        return pa.Array.from_buffers(HEADERS_TYPE, rows.count, buffers, children=[_NO_ENTRIES])
    assert rows.header_name_offsets is not None
    entries = len(rows.header_name_offsets) // 4 - 1
    names = _strings(pa.utf8(), entries, None, rows.header_name_offsets, rows.header_names)
    values = _strings(pa.binary(), entries, None, rows.header_value_offsets, rows.header_values)
    pairs = pa.StructArray.from_arrays(
        [names, values], fields=[HEADERS_TYPE.key_field, HEADERS_TYPE.item_field]
    )
    buffers = [_buffer(rows.header_validity), pa.py_buffer(rows.header_offsets)]
    return pa.Array.from_buffers(HEADERS_TYPE, rows.count, buffers, children=[pairs])


def _nothing(count: int) -> list[pa.Buffer]:
    """Return validity and offsets of a column of nulls: zeroes that all batches share."""
    zeroes = _ZEROES if count <= MAX_SHARED_NULLS else pa.py_buffer(bytes((count + 1) * 4))
    return [zeroes, zeroes]


def _buffer(column: Column | None) -> pa.Buffer | None:
    return None if column is None else pa.py_buffer(column)


# --- producing ----------------------------------------------------------------


def block_of(batch: pa.RecordBatch, now_ms: int) -> Block:
    """Return the block of a batch of PRODUCE_SCHEMA; columns after `body` may be missing.

    A missing insertion time is `now_ms`. Raises MalformedRequest with the name of the
    invalid column, TooLarge if the batch does not fit one block.
    """
    check_schema(batch.schema)
    if batch.num_rows == 0:
        raise MalformedRequest("body: the batch has no rows")
    with BatchErrorTranslator():
        batch.validate()
        return _block({name: batch.column(name) for name in batch.schema.names}, now_ms)


class BatchErrorTranslator:
    """Context manager that turns errors about columns into MalformedRequest."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, pa.ArrowInvalid):
            raise MalformedRequest(f"the batch is malformed: {error}") from None
        if isinstance(error, UsageError) and not isinstance(error, TooLarge):
            raise MalformedRequest(str(error)) from None


def check_schema(schema: pa.Schema) -> None:
    """Check that batches of this schema can become blocks. Raises MalformedRequest."""
    known = ", ".join(PRODUCE_SCHEMA.names)
    for name in schema.names:
        if name not in PRODUCE_SCHEMA.names:
            raise MalformedRequest(f"{name}: no such column; there are {known}")
        if schema.names.count(name) > 1:
            raise MalformedRequest(f"{name}: there are several columns of this name")
        expected, given = PRODUCE_SCHEMA.field(name).type, schema.field(name).type
        if not _is_type(given, expected):
            raise MalformedRequest(f"{name}: the type is {given}, and must be {expected}")
    for name in REQUIRED:
        if name not in schema.names:
            raise MalformedRequest(f"{name}: the column is missing")


def _is_type(given: pa.DataType, expected: pa.DataType) -> bool:
    """Return whether the types match; the names of a map's entries do not matter."""
    if not pa.types.is_map(expected) or not pa.types.is_map(given):
        return bool(given == expected)
    kinds = given.key_type, given.item_type
    return bool(kinds == (expected.key_type, expected.item_type))


def _block(columns: dict[str, pa.Array], now_ms: int) -> Block:
    bodies = columns["body"]
    if bodies.null_count:
        raise MalformedRequest("body: a body must not be null")
    headers = columns.get("headers")
    _, offsets, data = _string_buffers(bodies)
    return Block.from_columns(
        data,
        offsets,
        insertion_ms=_times(columns.get("insertion_ms"), now_ms),
        keys=_keys(columns["shard_key"]),
        headers=None if headers is None else _headers(headers),
    )


def _times(column: pa.Array | None, now_ms: int) -> int | memoryview:
    if column is None or column.null_count == len(column):
        return now_ms
    filled = pc.fill_null(column, now_ms) if column.null_count else column
    start = filled.offset * 8
    return _bytes(filled.buffers()[1])[start : start + len(filled) * 8]


def _keys(column: pa.Array) -> Keys | None:
    if column.null_count == len(column):
        return None
    column = _without_hidden_content(column)
    validity, offsets, data = _string_buffers(column)
    return Keys(data, offsets, validity, column.offset)


def _headers(column: pa.Array) -> Headers | None:
    if column.null_count == len(column):
        return None
    column = _without_hidden_content(column)
    names, values = column.keys, column.items
    if values.null_count:
        raise MalformedRequest("headers: a value must not be null")
    if names.null_count:
        raise MalformedRequest("headers: a name must not be null")
    _, name_offsets, name_data = _string_buffers(names)
    _, value_offsets, value_data = _string_buffers(values)
    return Headers(
        _offsets(column),
        name_data,
        name_offsets,
        value_data,
        value_offsets,
        _validity(column),
        column.offset,
    )


def _without_hidden_content(column: pa.Array) -> pa.Array:
    """Return the column, copied if a null has bytes: Arrow allows that, blocks do not."""
    if column.null_count and pc.any(pc.and_(column.is_null(), _has_content(column))).as_py():
        column.validate(full=True)
        return column.take(pa.array(range(len(column)), pa.int64()))
    return column


def _has_content(column: pa.Array) -> pa.Array:
    cuts = pa.Array.from_buffers(
        pa.int32(), len(column) + 1, [None, pa.py_buffer(_offsets(column))]
    )
    return pc.not_equal(cuts[1:], cuts[:-1])


def _string_buffers(column: pa.Array) -> tuple[memoryview | None, memoryview, memoryview]:
    """Return validity (from bit `column.offset`), offsets and data of a column."""
    return _validity(column), _offsets(column), _bytes(column.buffers()[2])


def _validity(column: pa.Array) -> memoryview | None:
    return _bytes(column.buffers()[0]) if column.null_count else None


def _offsets(column: pa.Array) -> memoryview:
    if len(column) == 0:  # then there need not be any
        return memoryview(bytes(4))
    start = column.offset * 4
    return _bytes(column.buffers()[1])[start : start + (len(column) + 1) * 4]


def _bytes(buffer: pa.Buffer | None) -> memoryview:
    return memoryview(b"") if buffer is None else memoryview(buffer).cast("B")
