"""The send queue of a producer: pending messages, merged into batches of one topic each.

The messages of one call are never split because a call is atomic. Pending calls for the same
topic are merged within the limits of the options. While a batch is in flight, fewer than
`SMALL_BYTES` wait until it is answered, because a batch costs the bus far more than a
message. Calls with Arrow rows are batches already and do not wait.

Messages that were passed as lists stay lists until they are sent: building one Arrow batch
for a thousand calls costs little more than one for a single call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import NamedTuple

import pyarrow as pa

from polybus.errors import ConnectionLost, MalformedRequest, PolybusError, TooLarge
from polybus.kernel.task_future import TaskFuture, finish_all
from polybus.model.arrow import PRODUCE_SCHEMA, check_schema
from polybus.model.delivery_time import DeliveryTime
from polybus.model.message_ttl import TTL_HEADER, encode_ttl
from polybus.native.client.native_options import ClientOptions

# Fewer pending bytes wait for more while a batch is in flight.
SMALL_BYTES = 64 * 1024
ROW_BYTES = 16  # per message besides its body: an offset and a time
MAX_BYTES = 2**31 - 1  # the largest 32-bit offset of Arrow
SIMPLE_SCHEMA = pa.schema(list(PRODUCE_SCHEMA)[:3])  # without headers


class MessageList(NamedTuple):
    """Checked messages as lists."""

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
    """Checked messages as an Arrow batch."""

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
    """Check messages at once, so that an error reaches this caller and not a merged batch."""
    if isinstance(bodies, bytes | bytearray | memoryview | str):
        raise MalformedRequest("bodies must be a list of bytes, got a single value")
    if not all(type(body) is bytes for body in bodies):
        bodies = [_as_bytes(body) for body in bodies]
    if not bodies:
        raise MalformedRequest("body: the batch must have at least one row")
    size = sum(map(len, bodies)) + ROW_BYTES * len(bodies)
    if keys is not None:
        if len(keys) != len(bodies):
            raise MalformedRequest(f"{len(keys)} keys for {len(bodies)} bodies")
        size += sum(len(_as_key(key)) for key in keys)
    if size > MAX_BYTES:
        raise TooLarge("batch exceeds 2 GiB; produce it in several calls")
    return MessageList(bodies, keys, insertion_ms, size)


def check_rows(batch: pa.RecordBatch) -> MessageRows:
    schema = batch.schema
    if not (schema.equals(SIMPLE_SCHEMA) or schema.equals(PRODUCE_SCHEMA)):
        check_schema(schema)
    if batch.num_rows == 0:
        raise MalformedRequest("body: the batch must have at least one row")
    if batch.column("body").null_count:
        raise MalformedRequest("body: must not be null")
    return MessageRows(batch, int(batch.nbytes))


def merge_messages(parts: Sequence[MessageList | MessageRows]) -> pa.RecordBatch:
    """Return one Arrow batch. The parts must have one type and one schema."""
    batches = [part.batch for part in parts if isinstance(part, MessageRows)]
    if len(batches) == 1:
        return batches[0]
    if batches:
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    bodies: list[bytes] = []
    times: list[int] = []
    keys: list[str | None] = []
    for part in parts:
        assert isinstance(part, MessageList)
        bodies += part.bodies
        times += [part.insertion_ms] * len(part.bodies)
        keys += part.keys or [None] * len(part.bodies)
    return build_batch(keys, bodies, times, None)


def build_batch(
    keys: Sequence[str | None],
    bodies: Sequence[bytes],
    insertion_ms: Sequence[int] | int,
    headers: Iterable[Sequence[tuple[str, bytes]] | None] | None,
) -> pa.RecordBatch:
    """Build a batch of checked columns. A single `insertion_ms` applies to every row."""
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


def add_ttl(rows: pa.RecordBatch, ttl_s: float) -> pa.RecordBatch:
    """Return the batch with the time to live in the headers of every message."""
    header = TTL_HEADER, encode_ttl(ttl_s)
    named = {field.name: column for field, column in zip(rows.schema, rows.columns, strict=True)}
    old = named["headers"].to_pylist() if "headers" in named else [None] * rows.num_rows
    headers = [[*(pair for pair in (each or ()) if pair[0] != TTL_HEADER), header] for each in old]
    named["headers"] = pa.array(headers, PRODUCE_SCHEMA.field("headers").type)
    names = [name for name in PRODUCE_SCHEMA.names if name in named]
    fields = [PRODUCE_SCHEMA.field(name) for name in names]
    return pa.record_batch([named[name] for name in names], schema=pa.schema(fields))


def _as_bytes(body: object) -> bytes:
    if not isinstance(body, bytes | bytearray | memoryview):
        raise MalformedRequest(f"body must be bytes, got {type(body).__name__}")
    return bytes(body)


def _as_key(key: object) -> bytes:
    if key is None:
        return b""
    if not isinstance(key, str):
        raise MalformedRequest(f"key must be str or None, got {type(key).__name__}")
    try:
        return key.encode()
    except UnicodeEncodeError:
        raise MalformedRequest("key must be encodable as UTF-8") from None


class Produced(NamedTuple):
    """The ids of a batch. `duplicate` means that an earlier attempt was stored.

    A delayed batch has no ids yet: both are 0, and `deliver_at_ns` is when it is due, by the
    clock of the bus. Otherwise `deliver_at_ns` is 0.

    A batch with keys may have travelled with others, and a topic's shards number their
    messages one shard after the other: then these are the ids of all that travelled.
    """

    first_id: int
    last_id: int
    duplicate: bool
    deliver_at_ns: int = 0


class ProduceFuture(TaskFuture, Future[Produced]):
    """The future of a call or of a message: one is made for each, so it must be cheap."""


@dataclass(slots=True)
class PendingMessages:
    """The messages of one call, with its future."""

    topic: str
    messages: MessageList | MessageRows
    future: ProduceFuture = field(default_factory=ProduceFuture)
    delivery: DeliveryTime | None = None

    @property
    def schema(self) -> pa.Schema:
        return self.messages.schema


@dataclass(slots=True)
class ProduceBatch:
    """Calls that are sent together. The counter is assigned when it is first sent."""

    topic: str
    parts: list[PendingMessages]
    counter: int = 0
    is_suspect: bool = False  # a part of a refused batch

    @property
    def schema(self) -> pa.Schema:
        return self.parts[0].schema

    @property
    def delivery(self) -> DeliveryTime | None:
        return self.parts[0].delivery

    def rows(self) -> pa.RecordBatch:
        return merge_messages([part.messages for part in self.parts])

    def split(self) -> list[ProduceBatch]:
        middle = len(self.parts) // 2
        cut = (self.parts[:middle], self.parts[middle:])
        return [ProduceBatch(self.topic, parts, is_suspect=True) for parts in cut]

    def complete(self, whole: Produced) -> None:
        """Give each call its own ids if they follow each other, else those of the batch."""
        if whole.deliver_at_ns:
            finish_all([part.future for part in self.parts], whole, None)
            return
        at, last_id, duplicate, _ = whole
        messages = [part.messages for part in self.parts]
        count = sum(each.num_rows for each in messages)
        in_order = last_id - at + 1 == count and not any(each.has_keys for each in messages)
        for part in self.parts:
            end = at + part.messages.num_rows
            part.future.set_result(Produced(at, end - 1, duplicate) if in_order else whole)
            at = end

    def fail(self, error: PolybusError) -> None:
        finish_all([part.future for part in self.parts], None, error)


class ProduceQueue:
    """A bounded queue: `put` blocks until there is space.

    It shares the lock of the sender, which must hold it for `peek`, `take` and `drain` and is
    notified by its condition. Callers that wait for space have a condition of their own, so
    that a wake-up reaches only threads that can act on it.
    """

    def __init__(self, options: ClientOptions, changed: Condition, lock: Lock) -> None:
        self._options = options
        self._changed = changed
        self._room = Condition(lock)
        self._settled = Condition(lock)
        self._waiting: deque[PendingMessages] = deque()
        self._bytes = 0
        self._waiting_bytes = 0  # of those, not yet taken
        self._batches = 0  # of those, calls with Arrow rows
        self._taken = 0  # taken and without an outcome
        self._closed_by: PolybusError | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_by is not None

    @property
    def is_small(self) -> bool:
        """Return whether the queue should wait while a batch is in flight."""
        return self._waiting_bytes < SMALL_BYTES and not self._batches

    def put(self, call: PendingMessages, *, wake: bool = True) -> None:
        """Add a call; block while the queue is full. Without `wake` the caller sends it itself."""
        size = call.messages.size_bytes
        limit = self._options.max_waiting_bytes
        with self._room:
            # An empty queue takes a call of any size.
            while self._closed_by is None and self._bytes and self._bytes + size > limit:
                self._room.wait()
            if self._closed_by is not None:
                raise self._closed_by
            self._waiting.append(call)
            self._bytes += size
            self._waiting_bytes += size
            self._batches += isinstance(call.messages, MessageRows)
            # A small queue is looked at when the batches in flight are settled.
            if wake and (not self._taken or not self.is_small):
                self._changed.notify()

    def peek(self) -> PendingMessages | None:
        """Return the next call. Cancelled calls are dropped."""
        while self._waiting and self._waiting[0].future.cancelled():
            self._drop(self._waiting.popleft())
        return self._waiting[0] if self._waiting else None

    def take(self) -> ProduceBatch | None:
        """Take the next batch, which can no longer be cancelled. None if all was cancelled."""
        options, first = self._options, self._waiting[0]
        parts: list[PendingMessages] = []
        rows = size = 0
        while self._waiting:
            part = self._waiting[0]
            messages = part.messages
            # The ids of a batch with keys do not follow each other: see `complete`.
            if part is not first and (
                part.topic != first.topic
                or part.delivery != first.delivery
                or type(messages) is not type(first.messages)
                or messages.has_keys != first.messages.has_keys
                or rows + messages.num_rows > options.max_batch_rows
                or size + messages.size_bytes > options.max_batch_bytes
                or not (part.schema is first.schema or part.schema.equals(first.schema))
            ):
                break
            self._waiting.popleft()
            if not part.future.set_running_or_notify_cancel():
                self._drop(part)
                continue
            parts.append(part)
            self._batches -= isinstance(messages, MessageRows)
            self._waiting_bytes -= messages.size_bytes
            rows += messages.num_rows
            size += messages.size_bytes
        self._taken += len(parts)
        return ProduceBatch(first.topic, parts) if parts else None

    def settle(self, batch: ProduceBatch) -> None:
        """Release the space of a batch whose futures are done."""
        with self._settled:
            self._taken -= len(batch.parts)
            self._bytes -= sum(part.messages.size_bytes for part in batch.parts)
            if self._waiting:
                self._changed.notify()
            self._notify_waiters()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all calls have an outcome. Returns False after the timeout."""
        with self._settled:
            return self._settled.wait_for(lambda: not self._waiting and not self._taken, timeout_s)

    def close(self, error: PolybusError | None = None) -> None:
        """Refuse further calls with `error`, also those that wait for space."""
        with self._changed:
            self._closed_by = self._closed_by or error or ConnectionLost("the producer is closed")
            self._changed.notify()
            self._room.notify_all()

    def drain(self) -> list[PendingMessages]:
        """Remove and return the calls that were neither sent nor cancelled."""
        left = [call for call in self._waiting if call.future.set_running_or_notify_cancel()]
        self._waiting.clear()
        self._waiting_bytes = self._batches = 0
        self._notify_waiters()
        return left

    def _drop(self, cancelled: PendingMessages) -> None:
        self._bytes -= cancelled.messages.size_bytes
        self._batches -= isinstance(cancelled.messages, MessageRows)
        self._waiting_bytes -= cancelled.messages.size_bytes
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        """Wake callers that wait for space or for an empty queue."""
        self._room.notify_all()
        if not self._waiting and not self._taken:
            self._settled.notify_all()
