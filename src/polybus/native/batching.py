"""What waits to be sent, merged into batches: one topic each, in the order it came.

Messages are kept as they were given, as lists or Arrow batches, and become one
Arrow batch when it is their turn. What was produced as one batch is never cut: it
is atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from polybus.errors import ConnectionLost
from polybus.model.arrow import PRODUCE_SCHEMA

if TYPE_CHECKING:
    from polybus.native.options import ClientOptions


class Produced(NamedTuple):
    """The ids that a batch has got. `duplicate`: an earlier try had arrived after all."""

    first_id: int
    last_id: int
    duplicate: bool


@dataclass(slots=True)
class Waiting:
    """Messages that were handed over as one."""

    topic: str
    rows: pa.RecordBatch
    future: Future[Produced] = field(default_factory=Future)

    @property
    def size_bytes(self) -> int:
        return int(self.rows.nbytes)


@dataclass(slots=True)
class Batch:
    """What goes out together. Its ids are told to each part by how many it has."""

    topic: str
    parts: list[Waiting]
    counter: int = 0

    def rows(self) -> pa.RecordBatch:
        if len(self.parts) == 1:
            return self.parts[0].rows
        whole = pa.Table.from_batches([part.rows for part in self.parts]).combine_chunks()
        return whole.to_batches()[0]


class Queue:
    """Bounded: whoever hands over too much waits until there is room."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._changed = Condition()
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0
        self._taken = 0  # handed out and not settled
        self._closed = False

    def put(self, one: Waiting) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(one))
            if self._closed:
                raise ConnectionLost("this producer was closed")
            self._waiting.append(one)
            self._bytes += one.size_bytes
            self._changed.notify_all()

    def take(self) -> Batch | None:
        """The next batch, once there is one; None when all is done and the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if not self._waiting:
                return None
            first = self._waiting.popleft()
            parts, rows, size = [first], first.rows.num_rows, first.size_bytes
            while self._waiting and self._joins(self._waiting[0], first, rows, size):
                part = self._waiting.popleft()
                parts.append(part)
                rows += part.rows.num_rows
                size += part.size_bytes
            self._taken += len(parts)
            return Batch(first.topic, parts)

    def settle(self, batch: Batch) -> None:
        """All of the batch's futures have their outcome."""
        with self._changed:
            self._taken -= len(batch.parts)
            self._bytes -= sum(part.size_bytes for part in batch.parts)
            self._changed.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Waits until everything handed over is settled."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._taken, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def empty(self) -> list[Waiting]:
        """What was never sent, to be failed."""
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            return left

    def _has_room(self, one: Waiting) -> bool:
        return not self._bytes or self._bytes + one.size_bytes <= self._options.max_waiting_bytes

    def _joins(self, one: Waiting, first: Waiting, rows: int, size: int) -> bool:
        return (
            one.topic == first.topic
            and one.rows.schema.equals(first.rows.schema)
            and rows + one.rows.num_rows <= self._options.max_batch_rows
            and size + one.size_bytes <= self._options.max_batch_bytes
        )


def rows_of(
    bodies: Sequence[bytes], keys: Sequence[str | None] | None, insertion_ms: int
) -> pa.RecordBatch:
    """A batch in the port's schema, without headers."""
    count = len(bodies)
    columns = [
        pa.nulls(count, pa.utf8()) if keys is None else pa.array(keys, pa.utf8()),
        pa.array(bodies, pa.binary()),
        pa.repeat(pa.scalar(insertion_ms, pa.int64()), count),
    ]
    return pa.record_batch(columns, schema=pa.schema(list(PRODUCE_SCHEMA)[:3]))
