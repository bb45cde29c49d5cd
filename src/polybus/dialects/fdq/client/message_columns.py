"""Messages as columns, on their way in: checked once, then one Arrow batch for many.

A single message is checked when it is handed over, so that whoever brings a bad one is
told, and not whoever travels with it. A batch is checked column by column.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.dialects.fdq.client.envelope import MessageRequest
from polybus.dialects.fdq.client.request_columns import columns_of
from polybus.dialects.fdq.limits import MAX_HEADER_BYTES, MAX_KEY_BYTES, MAX_MESSAGE_BYTES
from polybus.errors import MalformedRequest, TooLarge
from polybus.model.arrow import PRODUCE_SCHEMA, check_schema

SIMPLE_SCHEMA = pa.schema(list(PRODUCE_SCHEMA)[:3])  # without headers
SIMPLE_COLUMNS = 3
Headers = list[tuple[str, bytes]]
TEXTS = {str, type(None)}


# --- one message


def check_key(key: object) -> None:
    if key is None:
        return
    if not isinstance(key, str):
        raise MalformedRequest(f"a shard key is text or None, not {type(key).__name__}")
    size = len(key) if key.isascii() else len(_encoded(key, "a shard key"))
    if size > MAX_KEY_BYTES:
        raise TooLarge(f"a shard key of {size} bytes: at most {MAX_KEY_BYTES}")


def check_message(message: object) -> bytes:
    if type(message) is not bytes:
        if not isinstance(message, bytes | bytearray | memoryview):
            raise MalformedRequest(f"a message is bytes, not {type(message).__name__}")
        message = bytes(message)
    if len(message) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"a message of {len(message)} bytes: at most {MAX_MESSAGE_BYTES}")
    return message


def check_headers(headers: Mapping[str, bytes] | None) -> Headers | None:
    if headers is None:
        return None
    if not isinstance(headers, Mapping):
        raise MalformedRequest(f"headers are a mapping, not {type(headers).__name__}")
    size, found = 0, []
    for name, value in headers.items():
        if not isinstance(name, str):
            raise MalformedRequest(f"a header's name is text, not {type(name).__name__}")
        if not isinstance(value, bytes | bytearray | memoryview):
            raise MalformedRequest(f"header {name!r} is bytes, not {type(value).__name__}")
        found.append((name, bytes(value)))
        size += len(_encoded(name, "a header's name")) + len(found[-1][1])
    if size > MAX_HEADER_BYTES:
        raise TooLarge(f"headers of {size} bytes: at most {MAX_HEADER_BYTES}")
    return found


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise MalformedRequest(f"{what} is text that UTF-8 can write") from None


# --- many


def build_batch(
    keys: Sequence[str | None],
    bodies: Sequence[bytes],
    insertion_ms: Sequence[int] | int,
    headers: Iterable[Headers | None] | None,
) -> pa.RecordBatch:
    """One batch of columns that were checked. One time is that of all of them."""
    times = (
        pa.repeat(pa.scalar(insertion_ms, pa.int64()), len(bodies))
        if isinstance(insertion_ms, int)
        else pa.array(insertion_ms, pa.int64())
    )
    columns = [pa.array(keys, pa.utf8()), pa.array(bodies, pa.binary()), times]
    if headers is None:
        return pa.record_batch(columns, schema=SIMPLE_SCHEMA)
    columns.append(pa.array(list(headers), PRODUCE_SCHEMA.field("headers").type))
    return pa.record_batch(columns, schema=PRODUCE_SCHEMA)


def build_plain_batch(
    messages: list[tuple[str | None, bytes, Headers | None]], times_ms: array[int]
) -> pa.RecordBatch | None:
    """The same of messages as they wait, by the kernel; None if one of them has headers."""
    found = columns_of(messages, tuple, MAX_KEY_BYTES, MAX_MESSAGE_BYTES)
    if found is None:
        return None
    times = pa.Array.from_buffers(pa.int64(), len(times_ms), [None, pa.py_buffer(times_ms)])
    return _wrap_buffers(len(messages), times, *found)


def build_request_batch(
    requests: Iterable[MessageRequest | tuple[Any, ...]], now_ms: int, *, with_headers: bool
) -> pa.RecordBatch:
    """The same of requests, checked here.

    The kernel does so for those that are plainly right and have no headers, in one step;
    for others types are looked at first, then sizes, column by column.
    """
    if not with_headers and type(requests) is list:
        found = columns_of(requests, MessageRequest, MAX_KEY_BYTES, MAX_MESSAGE_BYTES)
        if found is not None and requests:
            times = pa.repeat(pa.scalar(now_ms, pa.int64()), len(requests))
            return _wrap_buffers(len(requests), times, *found)
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
    keys, bodies, headers = _columns(requests)
    if not set(map(type, keys)) <= TEXTS:
        for key in keys:
            check_key(key)
    if set(map(type, bodies)) != {bytes}:
        bodies = [check_message(body) for body in bodies]
    found = [check_headers(one) for one in headers] if any(headers) else None
    if found is None and with_headers:
        found = [None] * len(bodies)
    try:
        batch = build_batch(keys, bodies, now_ms, found)
    except UnicodeEncodeError:
        raise MalformedRequest("a shard key is text that UTF-8 can write") from None
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        raise TooLarge("over 2 GiB in one batch: produce it in several") from None
    check_sizes(batch)
    return batch


def check_rows(rows: pa.RecordBatch) -> pa.RecordBatch:
    """A batch that was made elsewhere."""
    check_schema(rows.schema)
    if not rows.num_rows:
        raise MalformedRequest("an empty batch: there is nothing to produce")
    check_sizes(rows)
    return rows


def check_sizes(batch: pa.RecordBatch) -> None:
    """The named limits, over whole columns."""
    longest = pc.max(pc.binary_length(batch.column("shard_key"))).as_py() or 0
    if longest > MAX_KEY_BYTES:
        raise TooLarge(f"a shard key of {longest} bytes: at most {MAX_KEY_BYTES}")
    largest = pc.max(pc.binary_length(batch.column("body"))).as_py() or 0
    if largest > MAX_MESSAGE_BYTES:
        raise TooLarge(f"a message of {largest} bytes: at most {MAX_MESSAGE_BYTES}")


def _columns(requests: Iterable[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    given = requests if isinstance(requests, list | tuple) else list(requests)
    if not given:
        raise MalformedRequest("an empty batch: there is nothing to produce")
    if set(map(type, given)) != {MessageRequest}:
        given = [_request(one) for one in given]
    keys, bodies, headers = zip(*given, strict=True)
    return keys, bodies, headers


def _request(given: Any) -> MessageRequest:
    if isinstance(given, MessageRequest):
        return given
    if isinstance(given, tuple) and len(given) in (2, 3):
        return MessageRequest(*given)
    raise MalformedRequest(f"a batch has MessageRequests, not {type(given).__name__}")
