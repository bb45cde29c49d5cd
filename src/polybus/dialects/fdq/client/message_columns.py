"""Arrow batches of produced messages. A batch is checked column by column."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.dialects.fdq.client.envelope import (
    Headers,
    MessageRequest,
    check_headers,
    check_key,
    check_message,
)
from polybus.dialects.fdq.client.request_columns import columns_of
from polybus.dialects.fdq.limits import MAX_KEY_BYTES, MAX_MESSAGE_BYTES
from polybus.errors import MalformedRequest, TooLarge
from polybus.model.arrow import check_schema
from polybus.native.client.produce_queue import SIMPLE_SCHEMA, build_batch

KEY_TYPES = {str, type(None)}
EMPTY_BATCH = "batch must have at least one message, got an empty batch"


def build_plain_batch(
    messages: list[tuple[str | None, bytes, Headers | None]], times_ms: array[int]
) -> pa.RecordBatch | None:
    """Build a batch of queued messages in compiled code. Returns None if one has headers."""
    buffers = columns_of(messages, tuple, MAX_KEY_BYTES, MAX_MESSAGE_BYTES)
    if buffers is None:
        return None
    times = pa.Array.from_buffers(pa.int64(), len(times_ms), [None, pa.py_buffer(times_ms)])
    return _wrap_buffers(len(messages), times, *buffers)


def build_request_batch(
    requests: Iterable[MessageRequest | tuple[Any, ...]], now_ms: int, *, with_headers: bool
) -> pa.RecordBatch:
    """Check requests and build a batch of them.

    Compiled code takes lists of valid requests without headers in one step. It refuses
    everything else, which is then checked by types and sizes, column by column.
    """
    if not with_headers and type(requests) is list:
        buffers = columns_of(requests, MessageRequest, MAX_KEY_BYTES, MAX_MESSAGE_BYTES)
        if buffers is not None and requests:
            times = pa.repeat(pa.scalar(now_ms, pa.int64()), len(requests))
            return _wrap_buffers(len(requests), times, *buffers)
    return _build_checked_batch(requests, now_ms, with_headers=with_headers)


def _wrap_buffers(
    count: int,
    times: pa.Array,
    validity: bytes | None,
    key_offsets: bytes,
    keys: bytes,
    body_offsets: bytes,
    bodies: bytes,
) -> pa.RecordBatch:
    valid = None if validity is None else pa.py_buffer(validity)
    key_buffers = [valid, pa.py_buffer(key_offsets), pa.py_buffer(keys)]
    body_buffers = [None, pa.py_buffer(body_offsets), pa.py_buffer(bodies)]
    columns = [
        pa.Array.from_buffers(pa.utf8(), count, key_buffers),
        pa.Array.from_buffers(pa.binary(), count, body_buffers),
        times,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SIMPLE_SCHEMA)


def _build_checked_batch(
    requests: Iterable[MessageRequest | tuple[Any, ...]], now_ms: int, *, with_headers: bool
) -> pa.RecordBatch:
    items = requests if isinstance(requests, list | tuple) else list(requests)
    if not items:
        raise MalformedRequest(EMPTY_BATCH)
    if set(map(type, items)) != {MessageRequest}:
        items = [_to_request(item) for item in items]
    keys, bodies, headers = map(list, zip(*items, strict=True))
    if not set(map(type, keys)) <= KEY_TYPES:
        for key in keys:
            check_key(key)
    if set(map(type, bodies)) != {bytes}:
        bodies = [check_message(body) for body in bodies]
    checked = [check_headers(each) for each in headers] if any(headers) else None
    if checked is None and with_headers:
        checked = [None] * len(bodies)
    try:
        batch = build_batch(keys, bodies, now_ms, checked)
    except UnicodeEncodeError:
        raise MalformedRequest("shard key must be encodable as UTF-8") from None
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        raise TooLarge("batch is over 2 GiB; split it") from None
    check_sizes(batch)
    return batch


def check_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Check a batch that the caller has built."""
    check_schema(rows.schema)
    if not rows.num_rows:
        raise MalformedRequest(EMPTY_BATCH)
    check_sizes(rows)
    return rows


def check_sizes(batch: pa.RecordBatch) -> None:
    """Raise `TooLarge` if a key or a body of the batch is over its limit."""
    longest = pc.max(pc.binary_length(batch.column("shard_key"))).as_py() or 0
    if longest > MAX_KEY_BYTES:
        raise TooLarge(f"shard key must have at most {MAX_KEY_BYTES} bytes, got {longest}")
    largest = pc.max(pc.binary_length(batch.column("body"))).as_py() or 0
    if largest > MAX_MESSAGE_BYTES:
        raise TooLarge(f"message must have at most {MAX_MESSAGE_BYTES} bytes, got {largest}")


def _to_request(item: Any) -> MessageRequest:
    if isinstance(item, MessageRequest):
        return item
    if isinstance(item, tuple) and len(item) in (2, 3):
        return MessageRequest(*item)
    raise MalformedRequest(f"batch items must be MessageRequest, got {type(item).__name__}")
