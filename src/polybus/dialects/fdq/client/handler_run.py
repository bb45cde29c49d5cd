"""Runs of the handler on one message or on a batch, and the fetched rows they come from.

Columns become lists once per fetch. After that a message is an index, and its envelope is
built when its run starts. `QueuedRows` are the rows of one shard that one executor gets.

With `batch=True` a run covers many consecutive messages of one shard, as Arrow delivered
them. A failed batch runs again as a whole, and each failed run counts for each of its
messages. The last run of a message, which would make it a dead letter, is a run of its own,
so that no message dies because of its neighbour (unless the first run is the last). A failed
batch blocks its shard. The last runs of consecutive messages are `LastRuns`: they follow each
other without a report in between, so that thousands of dead letters need few commits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from polybus.dialects.fdq.client.assigned_shards import RunFailure
from polybus.dialects.fdq.client.envelope import Envelope
from polybus.model.offset_ranges import ranges_from_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shards import AssignedShard
    from polybus.dialects.fdq.client.key_queue import BlockedKey
    from polybus.dialects.fdq.client.transaction import Transaction

MAX_ROWS = 4096  # of a batch; a failed one adds an entry to the group's record for each row
MAX_SUSPECT_BATCH_ROWS = 256  # a batch of suspect rows is reported to the bus before it runs
ALL_KEYS = ""  # the key of every batch: batches of a shard run in order
# Of failed last runs in one report. The bus writes 1024 dead letters and 64 MiB per commit.
MAX_LAST_FAILURES = 512
MAX_LAST_BYTES = 4 << 20
LAST_RUNS_S = 0.25  # a failed last run is reported after this time, if its followers are slow


class HandlerRun(Protocol):
    """One delivery of a message or of a batch. It ends once."""

    shard: AssignedShard
    offset: int  # the first
    key: Any  # runs of one key and shard are in order; None: without order
    blocked_key: BlockedKey | None  # set if it failed, or waits for one that did
    started_s: float
    is_committed: bool  # its transaction has acked it

    @property
    def offsets(self) -> Iterable[int]: ...
    @property
    def size_bytes(self) -> int: ...
    def attempts_of(self, offset: int) -> int: ...
    def build_argument(self, topic: str, executor: int) -> Any: ...
    def detach(self) -> None:
        """Copy the data, because the run will wait and must not keep its whole fetch alive."""

    def finish(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def failed_rows(self, reason: str) -> Iterable[tuple[int, str]]:
        """Return the offsets of a failed run, each with its reason."""

    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]: ...


class QueuedRows(Protocol):
    """Fetched rows of one shard for one executor, in order."""

    shard: AssignedShard
    rows: int  # initial number

    @property
    def size_bytes(self) -> int: ...
    def take(self) -> HandlerRun | None: ...


class FetchedRows:
    """The columns of a fetch as lists."""

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
        """Return one row that does not keep the others alive."""
        row = FetchedRows.__new__(FetchedRows)
        for name in FetchedRows.__slots__:
            column = getattr(self, name)
            setattr(row, name, None if column is None else [column[index]])
        return row


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
        """The number of this delivery. A suspect message may have had one that was not reported."""
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

    def failed_rows(self, reason: str) -> tuple[tuple[int, str]]:
        return ((self.offset, reason),)

    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]:
        """Return the run that follows this failed one, or none if the message is dead."""
        if self.offset in dead:
            return []
        failed = max(self.attempts + 1, attempts.get(self.offset, 0))
        # A new object: an abandoned run may still return and must not be taken for its retry.
        return [MessageRun(self.shard, self._rows, self._index, self.offset, failed)]

    def build_argument(self, topic: str, executor: int) -> Envelope:
        """Build the handler's argument."""
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
    """Rows that run one by one."""

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


class _ConsecutiveRun:
    """A batch of consecutive messages, and the state of its run or runs."""

    __slots__ = (
        "_last_attempt",
        "attempts",
        "batch",
        "blocked_key",
        "is_committed",
        "key",
        "offset",
        "shard",
        "started_s",
    )

    def __init__(
        self, shard: AssignedShard, batch: pa.RecordBatch, offset: int, last_attempt: int
    ) -> None:
        self.shard = shard
        self.batch = batch
        self.offset = offset
        self.key: Any = ALL_KEYS
        rows = range(offset, offset + int(batch.num_rows))
        self.attempts: dict[int, int] = _select_attempts(shard.attempts, rows)
        self.blocked_key: BlockedKey | None = None
        self.started_s = 0.0
        self.is_committed = False
        self._last_attempt = last_attempt

    @property
    def size_bytes(self) -> int:
        return int(self.batch.nbytes)

    def attempts_of(self, offset: int) -> int:
        return self.attempts.get(offset, 0)

    def detach(self) -> None:
        """Copy nothing: a failed batch blocks its shard, so its fetch stays in memory anyway."""


class BatchRun(_ConsecutiveRun):
    """A run on consecutive messages."""

    __slots__ = ()

    @property
    def offsets(self) -> range:
        return range(self.offset, self.offset + int(self.batch.num_rows))

    def build_argument(self, topic: str, executor: int) -> pa.RecordBatch:
        return self.batch

    def finish(self) -> None:
        self.shard.finished_ranges.append((self.offsets.start, self.offsets.stop))
        self.shard.add_counts(again=self._count_redelivered())

    def fail(self, reason: str) -> None:
        self.shard.add_counts(failed=len(self.offsets), again=self._count_redelivered())
        self.shard.failures.append(RunFailure(self, reason))

    def failed_rows(self, reason: str) -> Iterator[tuple[int, str]]:
        return ((offset, reason) for offset in self.offsets)

    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]:
        """Return the runs that follow this failed one."""
        counts = {at: max(self.attempts_of(at) + 1, attempts.get(at, 0)) for at in self.offsets}
        left = [at for at in self.offsets if at not in dead]
        self.shard.attempts.update((at, counts[at]) for at in left)
        return _build_runs(self.shard, self.batch, self.offset, left, self._last_attempt)

    def _count_redelivered(self) -> int:
        suspect = max(0, min(self.shard.suspect_to, self.offsets.stop) - self.offset)
        if not self.attempts:
            return suspect
        return suspect + sum(at >= self.offset + suspect for at in self.attempts)


class LastRuns(_ConsecutiveRun):
    """The last runs of consecutive messages: each alone, one after the other, one report.

    A message that fails its last run becomes a dead letter if the bus can write it. So a
    success after a failure is held until the bus has answered. If the bus could not write a
    dead letter, its message and all later ones run again, in order.
    """

    __slots__ = ("_failed_bytes", "_failing_since_s", "_first", "_held", "failures")

    def __init__(
        self, shard: AssignedShard, batch: pa.RecordBatch, offset: int, last_attempt: int
    ) -> None:
        super().__init__(shard, batch, offset, last_attempt)
        self.started_s = math.inf
        self.failures: dict[int, str] = {}  # reasons by offset
        self._first = offset  # `offset` is of the current message
        self._held: list[int] = []  # successes after the first failure
        self._failed_bytes = 0
        self._failing_since_s = math.inf

    @property
    def offsets(self) -> range:
        """The current message alone: it fails if the consumer dies."""
        return range(self.offset, self.offset + 1)

    def build_argument(self, topic: str, executor: int) -> pa.RecordBatch:
        return self.batch.slice(self.offset - self._first, 1)

    def end_message(self, reason: str | None) -> bool:
        """Record the end of the current message's run; `reason` is None for a success.

        Returns whether the next message may run before the failures are reported.
        """
        started_s, self.started_s = self.started_s, math.inf  # the next one has not begun
        self.shard.add_counts(
            failed=int(reason is not None), again=int(self.attempts_of(self.offset) > 0)
        )
        if reason is not None:
            self.failures[self.offset] = reason
            self._failed_bytes += int(self.batch.slice(self.offset - self._first, 1).nbytes)
            self._failing_since_s = min(self._failing_since_s, started_s)
        elif self.failures:
            self._held.append(self.offset)
        else:
            self.shard.finished.append(self.offset)
        return (
            self.offset + 1 < self._first + int(self.batch.num_rows)
            and len(self.failures) < MAX_LAST_FAILURES
            and self._failed_bytes < MAX_LAST_BYTES
            and started_s - self._failing_since_s <= LAST_RUNS_S
            and self.shard.is_open
        )

    def begin_next(self) -> None:
        self.offset += 1

    def split_rest(self) -> LastRuns | None:
        """Remove the messages after the current one. Returns their runs, or None without any."""
        ended = self.offset + 1 - self._first
        rest = self.batch.slice(ended)
        self.batch = self.batch.slice(0, ended)
        if not rest.num_rows:
            return None
        return LastRuns(self.shard, rest, self.offset + 1, self._last_attempt)

    def finish(self) -> None:
        """Do nothing: `end_message` has recorded each success."""

    def fail(self, reason: str) -> None:
        self.shard.failures.append(RunFailure(self, reason))

    def failed_rows(self, reason: str) -> Iterable[tuple[int, str]]:
        return self.failures.items()

    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]:
        """Finish the held successes up to the first message that is not dead.

        Returns the runs of that message and all later ones.
        """
        shard = self.shard
        alive = [offset for offset in self.failures if offset not in dead]
        first = min(alive, default=self.offset + 1)
        done = [offset for offset in self._held if offset < first]
        shard.finished_ranges.extend(ranges_from_offsets(done))
        shard.add_counts(failed=len(self._held) - len(done))  # these will run again
        for offset in alive:
            shard.attempts[offset] = max(self.attempts_of(offset) + 1, attempts.get(offset, 0))
        left = [offset for offset in range(first, self.offset + 1) if offset not in dead]
        return _build_runs(shard, self.batch, self._first, left, self._last_attempt)


class QueuedBatches:
    """Consecutive rows of one shard, from which batches are cut."""

    def __init__(
        self, shard: AssignedShard, batch: pa.RecordBatch, offset: int, last_attempt: int
    ) -> None:
        self.shard = shard
        self.rows = self._left = int(batch.num_rows)
        self._batch = batch
        self._offset = offset
        self._last_attempt = last_attempt

    @property
    def size_bytes(self) -> int:
        return int(self._batch.nbytes)

    def take(self) -> BatchRun | LastRuns | None:
        if not self._left:
            return None
        start = self._offset
        end = start + min(self._left, MAX_ROWS)
        if start < self.shard.suspect_to:
            end = min(end, start + MAX_SUSPECT_BATCH_ROWS, self.shard.suspect_to)
        attempts = _select_attempts(self.shard.attempts, range(start, end))
        is_last = False
        if attempts:  # rows that failed before do not share a batch with others
            _, end, is_last = next(split_runs(range(start, end), attempts, self._last_attempt))
            if is_last and start < self.shard.suspect_to:
                end = start + 1
        rows = end - start
        batch = self._batch.slice(self._batch.num_rows - self._left, rows)
        self._left -= rows
        self._offset = end
        run_type = LastRuns if is_last and rows > 1 else BatchRun
        return run_type(self.shard, batch, start, self._last_attempt)


def split_runs(
    offsets: Iterable[int], attempts: dict[int, int], last_attempt: int
) -> Iterator[tuple[int, int, bool]]:
    """Yield ranges of consecutive offsets of which all have failed before or none has.

    The third value says whether the next failure of each would be its last.
    """
    start = end = -1
    state = (False, False)
    for offset in offsets:
        failures = attempts.get(offset, 0)
        new_state = failures > 0, failures >= last_attempt
        if start >= 0 and (offset != end or new_state != state):
            yield start, end, state[1]
            start = -1
        if start < 0:
            start, state = offset, new_state
        end = offset + 1
    if start >= 0:
        yield start, end, state[1]


def _build_runs(
    shard: AssignedShard,
    batch: pa.RecordBatch,
    first: int,
    offsets: Iterable[int],
    last_attempt: int,
) -> list[HandlerRun]:
    """Return the next runs of failed offsets; `first` is the offset of the batch."""
    runs: list[HandlerRun] = []
    for start, end, is_last in split_runs(offsets, shard.attempts, last_attempt):
        # The consumer reports each suspect message before its run, so it has its own.
        rows = 1 if is_last and start < shard.suspect_to else end - start
        run_type = LastRuns if is_last and rows > 1 else BatchRun
        runs += [
            run_type(shard, batch.slice(at - first, rows), at, last_attempt)
            for at in range(start, end, rows)
        ]
    return runs


def _select_attempts(attempts: dict[int, int], offsets: range) -> dict[int, int]:
    """Return the counts of these offsets, by a loop over the smaller of the two."""
    if not attempts:
        return {}
    if len(attempts) < len(offsets):
        return {offset: count for offset, count in attempts.items() if offset in offsets}
    return {offset: attempts[offset] for offset in offsets if offset in attempts}
