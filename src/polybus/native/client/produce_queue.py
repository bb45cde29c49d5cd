"""What waits to be sent, merged into batches: one topic each, in the order it came.

What was produced as one batch is never cut, since it is atomic; but several that wait
for the same topic travel as one, as long as they stay within the bounds. While
something is on its way, less than `SMALL_BYTES` wait for company until it was answered:
a journey costs the bus far more than a message does. What comes as rows is a batch
already, and does not wait.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

from polybus.errors import ConnectionLost, PolybusError
from polybus.native.client.produce_messages import MessageList, MessageRows, merge_messages

if TYPE_CHECKING:
    from threading import Lock

    import pyarrow as pa

    from polybus.native.client.native_options import ClientOptions


SMALL_BYTES = 64 * 1024


class Produced(NamedTuple):
    """The ids that a batch has got. `duplicate`: an earlier try had arrived after all.

    A batch with keys may have travelled with others, and a topic's shards number their
    messages one shard after the other: then these are the ids of all that travelled.
    """

    first_id: int
    last_id: int
    duplicate: bool


@dataclass(slots=True)
class PendingMessages:
    """Messages that were handed over as one."""

    topic: str
    messages: MessageList | MessageRows
    future: Future[Produced] = field(default_factory=Future)

    @property
    def schema(self) -> pa.Schema:
        return self.messages.schema


@dataclass(slots=True)
class ProduceBatch:
    """What goes out together. It gets its number when it is sent for the first time."""

    topic: str
    parts: list[PendingMessages]
    counter: int = 0
    is_suspect: bool = False  # a half of one that was refused

    @property
    def schema(self) -> pa.Schema:
        return self.parts[0].schema

    def rows(self) -> pa.RecordBatch:
        return merge_messages([part.messages for part in self.parts])

    def split(self) -> list[ProduceBatch]:
        middle = len(self.parts) // 2
        cut = (self.parts[:middle], self.parts[middle:])
        return [ProduceBatch(self.topic, parts, is_suspect=True) for parts in cut]

    def complete(self, whole: Produced) -> None:
        at, (_, last_id, duplicate) = whole.first_id, whole
        messages = [part.messages for part in self.parts]
        count = sum(one.num_rows for one in messages)
        in_order = last_id - at + 1 == count and not any(one.has_keys for one in messages)
        for part in self.parts:
            end = at + part.messages.num_rows
            part.future.set_result(Produced(at, end - 1, duplicate) if in_order else whole)
            at = end

    def fail(self, error: PolybusError) -> None:
        for part in self.parts:
            part.future.set_exception(error)


class ProduceQueue:
    """Bounded: whoever hands over too much waits until there is room.

    It shares the lock of its user, who holds it for `first`, `take` and `empty`, and is
    told by his condition what he may have to act on. Others who wait have their own: whoever
    is woken for nothing costs those who have something to do.
    """

    def __init__(self, options: ClientOptions, changed: Condition, lock: Lock) -> None:
        self._options = options
        self._changed = changed
        self._room = Condition(lock)
        self._settled = Condition(lock)
        self._waiting: deque[PendingMessages] = deque()
        self._bytes = 0
        self._waiting_bytes = 0  # of those, what was not handed out
        self._batches = 0  # of those, what came as rows
        self._taken = 0  # handed out and not settled
        self._closed_by: PolybusError | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_by is not None

    @property
    def is_small(self) -> bool:
        """Is what waits not worth a journey of its own while others are on theirs?"""
        return self._waiting_bytes < SMALL_BYTES and not self._batches

    def put(self, one: PendingMessages, *, wake: bool = True) -> None:
        """Without `wake` the user is not told: who puts it sees to it himself."""
        with self._room:
            if not self._has_room(one):
                self._room.wait_for(lambda: self._closed_by or self._has_room(one))
            if self._closed_by is not None:
                raise self._closed_by
            self._waiting.append(one)
            self._bytes += one.messages.size_bytes
            self._waiting_bytes += one.messages.size_bytes
            self._batches += isinstance(one.messages, MessageRows)
            if wake and (
                not self._taken or not self.is_small
            ):  # else it is looked at when they are settled
                self._changed.notify()

    def peek(self) -> PendingMessages | None:
        """The next to be sent. Those that were cancelled meanwhile are never sent."""
        while self._waiting and self._waiting[0].future.cancelled():
            self._drop(self._waiting.popleft())
        return self._waiting[0] if self._waiting else None

    def take(self) -> ProduceBatch | None:
        """The next batch; None if all of it was cancelled. It cannot be cancelled any more."""
        first = self._waiting[0]
        parts: list[PendingMessages] = []
        rows = size = 0
        while self._waiting and self._can_merge(self._waiting[0], first, rows, size):
            part = self._waiting.popleft()
            if not part.future.set_running_or_notify_cancel():
                self._drop(part)
                continue
            parts.append(part)
            self._batches -= isinstance(part.messages, MessageRows)
            self._waiting_bytes -= part.messages.size_bytes
            rows += part.messages.num_rows
            size += part.messages.size_bytes
        self._taken += len(parts)
        return ProduceBatch(first.topic, parts) if parts else None

    def settle(self, batch: ProduceBatch) -> None:
        """All of the batch's futures have their outcome."""
        with self._settled:
            self._taken -= len(batch.parts)
            self._bytes -= sum(part.messages.size_bytes for part in batch.parts)
            if self._waiting:
                self._changed.notify()
            self._notify_waiters()

    def flush(self, timeout_s: float | None) -> bool:
        """Waits until everything handed over is settled."""
        with self._settled:
            return self._settled.wait_for(lambda: not self._waiting and not self._taken, timeout_s)

    def close(self, error: PolybusError | None = None) -> None:
        """Nothing more is taken; whoever tries, or waits for room, is told why."""
        with self._changed:
            self._closed_by = self._closed_by or error or ConnectionLost("this producer was closed")
            self._changed.notify()
            self._room.notify_all()

    def drain(self) -> list[PendingMessages]:
        """What was never sent and not cancelled, to be failed."""
        left = [one for one in self._waiting if one.future.set_running_or_notify_cancel()]
        self._waiting.clear()
        self._waiting_bytes = self._batches = 0
        self._notify_waiters()
        return left

    def _drop(self, one: PendingMessages) -> None:
        self._bytes -= one.messages.size_bytes
        self._batches -= isinstance(one.messages, MessageRows)
        self._waiting_bytes -= one.messages.size_bytes
        self._notify_waiters()

    def _notify_waiters(self) -> None:
        """There is room, and perhaps nothing left."""
        self._room.notify_all()
        if not self._waiting and not self._taken:
            self._settled.notify_all()

    def _has_room(self, one: PendingMessages) -> bool:
        return (
            not self._bytes
            or self._bytes + one.messages.size_bytes <= self._options.max_waiting_bytes
        )

    def _can_merge(
        self, one: PendingMessages, first: PendingMessages, rows: int, size: int
    ) -> bool:
        return one is first or (
            one.topic == first.topic
            and type(one.messages) is type(first.messages)
            and one.messages.has_keys == first.messages.has_keys
            and rows + one.messages.num_rows <= self._options.max_batch_rows
            and size + one.messages.size_bytes <= self._options.max_batch_bytes
            and (one.schema is first.schema or one.schema.equals(first.schema))
        )
