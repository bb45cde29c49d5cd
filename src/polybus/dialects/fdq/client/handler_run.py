"""Fetched messages as lists, and one run of the handler on one of them.

Columns become lists once a fetch: after that a message is an index, and nothing is made
of it before its turn. A piece is what one executor gets of one shard's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from polybus.dialects.fdq.client.assigned_shard import RunFailure
from polybus.dialects.fdq.client.envelope import Envelope

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shard import AssignedShard
    from polybus.dialects.fdq.client.key_queue import BlockedKey
    from polybus.dialects.fdq.client.transaction import Transaction


class HandlerRun(Protocol):
    """One delivery: of a message, or of a batch of neighbours. It ends once."""

    shard: AssignedShard
    offset: int  # the first
    key: Any  # messages of one key and shard run in order; None: after nobody
    blocked_key: BlockedKey | None  # what it holds back, if it failed or waited behind one that did
    started_s: float
    is_committed: bool  # acked already, by its transaction

    @property
    def offsets(self) -> Iterable[int]: ...
    @property
    def size_bytes(self) -> int: ...
    def attempts_of(self, offset: int) -> int: ...
    def build_argument(self, topic: str, executor: int) -> Any: ...
    def detach(self) -> None:
        """It will stay for a while, and must not keep what it came with."""

    def finish(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]: ...


class QueuedRows(Protocol):
    """Messages of one shard for one executor, in order."""

    shard: AssignedShard
    rows: int  # that it had at first

    @property
    def size_bytes(self) -> int: ...
    def take(self) -> HandlerRun | None: ...


class FetchedRows:
    """Columns of one shard's messages."""

    __slots__ = ("bodies", "headers", "ids", "insertions", "keys", "offsets", "times")

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.ids: list[int] = batch.column("id").to_pylist()
        self.offsets: list[int] = batch.column("offset").to_pylist()
        self.times: list[int] = batch.column("timestamp_ns").to_pylist()
        self.insertions: list[int] = batch.column("insertion_ms").to_pylist()
        self.keys: list[str | None] = batch.column("shard_key").to_pylist()
        self.bodies: list[bytes] = batch.column("body").to_pylist()
        headers = batch.column("headers")
        has_any = headers.null_count < len(headers)
        self.headers: list[Any] | None = headers.to_pylist() if has_any else None

    def copy_row(self, index: int) -> FetchedRows:
        """One of them, which does not keep the others."""
        found = FetchedRows.__new__(FetchedRows)
        for name in FetchedRows.__slots__:
            column = getattr(self, name)
            setattr(found, name, None if column is None else [column[index]])
        return found


class MessageRun:
    """A run on one message."""

    __slots__ = (
        "_index",
        "_rows",
        "attempts",
        "blocked_key",
        "is_committed",
        "is_over",
        "key",
        "offset",
        "shard",
        "started_s",
    )

    def __init__(
        self, shard: AssignedShard, rows: FetchedRows, index: int, offset: int, attempts: int = 0
    ) -> None:
        self.shard = shard
        self.offset = offset
        self.key: Any = rows.keys[index]
        self.attempts = attempts  # failed runs before this one
        self.blocked_key: BlockedKey | None = None
        self.started_s = 0.0
        self.is_committed = False
        self.is_over = False
        self._rows = rows
        self._index = index

    @property
    def offsets(self) -> tuple[int]:
        return (self.offset,)

    @property
    def size_bytes(self) -> int:
        return len(self._rows.bodies[self._index])

    @property
    def delivery(self) -> int:
        """A run below the suspect mark follows one that may have been, and was not told of."""
        return 1 + self.attempts + (self.offset < self.shard.suspect_to)

    def attempts_of(self, offset: int) -> int:
        return self.attempts

    def detach(self) -> None:
        self._rows, self._index = self._rows.copy_row(self._index), 0

    def finish(self) -> None:
        self.is_over = True
        shard = self.shard
        if self.is_committed:
            shard.committed.append(self.offset)
        else:
            shard.finished.append(self.offset)
        if self.attempts or self.offset < shard.suspect_to:
            shard.add_counts(again=1)

    def fail(self, reason: str) -> None:
        self.is_over = True
        self.shard.add_counts(failed=1, again=int(self.delivery > 1))
        self.shard.failures.append(RunFailure(self, reason))

    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]:
        """The runs that follow this failed one: none if it is dead."""
        if self.offset in dead:
            return []
        failed = max(self.attempts + 1, attempts.get(self.offset, 0))
        # Another one: a run that was given up may still end, and must not be taken for it.
        return [MessageRun(self.shard, self._rows, self._index, self.offset, failed)]

    def build_argument(self, topic: str, executor: int) -> Envelope:
        """What the handler gets."""
        rows, index, shard, offset = self._rows, self._index, self.shard, self.offset
        return Envelope(
            topic,
            rows.ids[index],
            shard.number,
            offset,
            rows.times[index],
            rows.insertions[index],
            self.key,
            rows.bodies[index],
            {} if rows.headers is None else dict(rows.headers[index] or ()),
            shard.index,
            executor,
            1 + self.attempts + (offset < shard.suspect_to),
            shard.epoch,
            self,
        )

    def transaction(self, envelope: Envelope) -> Transaction:
        from polybus.dialects.fdq.client.transaction import Transaction

        return Transaction(self, envelope)


class QueuedMessages:
    """Messages one by one."""

    __slots__ = ("_all", "_indices", "_rows", "rows", "shard")

    def __init__(self, shard: AssignedShard, rows: FetchedRows, indices: Sequence[int]) -> None:
        self.shard = shard
        self.rows = len(indices)
        self._rows = rows
        self._all = indices
        self._indices: Iterator[int] = iter(indices)

    @property
    def size_bytes(self) -> int:
        bodies = self._rows.bodies
        return sum(len(bodies[index]) for index in self._all)

    def take(self) -> MessageRun | None:
        for index in self._indices:
            shard, rows = self.shard, self._rows
            offset = rows.offsets[index]
            attempts = shard.attempts.get(offset, 0) if shard.attempts else 0
            return MessageRun(shard, rows, index, offset, attempts)
        return None
