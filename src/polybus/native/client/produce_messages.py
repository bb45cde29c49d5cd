"""Messages on their way into the bus, as they were handed over, and as one Arrow batch.

What was given as lists stays lists until it is its turn: one Arrow batch for a thousand
calls costs little more than one for a single call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from polybus.errors import MalformedRequest, TooLarge
from polybus.model.arrow import PRODUCE_SCHEMA, check_schema

ROW_BYTES = 16  # what a message costs beside its body: an offset, a time
MAX_BYTES = 2**31 - 1  # where Arrow's offsets end
SIMPLE_SCHEMA = pa.schema(list(PRODUCE_SCHEMA)[:3])  # without headers


class MessageList(NamedTuple):
    """Messages as lists, checked."""

    bodies: Sequence[bytes]
    keys: Sequence[str | None] | None
    insertion_ms: int
    size_bytes: int

    @property
    def schema(self) -> pa.Schema:
        return SIMPLE_SCHEMA

    @property
    def num_rows(self) -> int:
        return len(self.bodies)

    @property
    def has_keys(self) -> bool:
        return self.keys is not None


class MessageRows(NamedTuple):
    """Messages as an Arrow batch, checked."""

    batch: pa.RecordBatch
    size_bytes: int

    @property
    def schema(self) -> pa.Schema:
        return self.batch.schema

    @property
    def num_rows(self) -> int:
        return int(self.batch.num_rows)

    @property
    def has_keys(self) -> bool:
        return bool(self.batch.column("shard_key").null_count < self.batch.num_rows)


def check_bodies(
    bodies: Sequence[bytes], keys: Sequence[str | None] | None, insertion_ms: int
) -> MessageList:
    """Checked at once: whoever hands them over is told, not whoever travels with them."""
    if isinstance(bodies, bytes | bytearray | memoryview | str):
        raise MalformedRequest("bodies are a list of bytes: put a single one into a list")
    if not all(type(body) is bytes for body in bodies):
        bodies = [_as_bytes(body) for body in bodies]
    if not bodies:
        raise MalformedRequest("body: the batch has no rows")
    size = sum(map(len, bodies)) + ROW_BYTES * len(bodies)
    if keys is not None:
        if len(keys) != len(bodies):
            raise MalformedRequest(f"{len(keys)} keys for {len(bodies)} bodies")
        size += sum(len(_as_key(key)) for key in keys)
    if size > MAX_BYTES:
        raise TooLarge("over 2 GiB in one batch: produce it in several")
    return MessageList(bodies, keys, insertion_ms, size)


def check_rows(batch: pa.RecordBatch) -> MessageRows:
    schema = batch.schema
    if not (schema.equals(SIMPLE_SCHEMA) or schema.equals(PRODUCE_SCHEMA)):
        check_schema(schema)
    if batch.num_rows == 0:
        raise MalformedRequest("body: the batch has no rows")
    if batch.column("body").null_count:
        raise MalformedRequest("body: a message has none")
    return MessageRows(batch, int(batch.nbytes))


def merge_messages(parts: Sequence[MessageList | MessageRows]) -> pa.RecordBatch:
    """One batch of all. The parts are of one kind and one schema."""
    batches = [part.batch for part in parts if isinstance(part, MessageRows)]
    if len(batches) == 1:
        return batches[0]
    if batches:
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    return _batch_of([part for part in parts if isinstance(part, MessageList)])


def _batch_of(parts: Sequence[MessageList]) -> pa.RecordBatch:
    bodies: list[bytes] = []
    times: list[int] = []
    keys: list[str | None] = []
    for part in parts:
        bodies += part.bodies
        times += [part.insertion_ms] * len(part.bodies)
        keys += part.keys or [None] * len(part.bodies)
    columns = [
        pa.array(keys, pa.utf8()),
        pa.array(bodies, pa.binary()),
        pa.array(times, pa.int64()),
    ]
    return pa.record_batch(columns, schema=SIMPLE_SCHEMA)


def _as_bytes(body: object) -> bytes:
    if not isinstance(body, bytes | bytearray | memoryview):
        raise MalformedRequest(f"a body is bytes, not {type(body).__name__}")
    return bytes(body)


def _as_key(key: object) -> bytes:
    if key is None:
        return b""
    if not isinstance(key, str):
        raise MalformedRequest(f"a key is text or None, not {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise MalformedRequest("a key is text that UTF-8 can write") from None
