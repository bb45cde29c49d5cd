"""`batch=True`: runs on many messages of one shard at once, as Arrow gave them.

A batch that fails is run again as a whole, and each failed run counts for each of its
messages. But a message's last run, the one that would make it a dead letter, is a run of
its own: nobody dies of a neighbour's fault (unless the first run is the last one). A
failed batch holds back its shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from polybus.dialects.fdq.client.assigned_shard import RunFailure

if TYPE_CHECKING:
    import pyarrow as pa

    from polybus.dialects.fdq.client.assigned_shard import AssignedShard
    from polybus.dialects.fdq.client.handler_run import HandlerRun
    from polybus.dialects.fdq.client.key_queue import BlockedKey
    from polybus.dialects.fdq.client.offset_ranges import Range

MAX_ROWS = 4096  # of a batch: a failed one is an entry in the group's record for each
MAX_SUSPECT_BATCH_ROWS = 256  # where each is told to the bus before it is run
ALL_KEYS = ""  # one key for all that a shard has


class BatchRun:
    """A run on neighbours."""

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
        self.attempts: dict[int, int] = _attempts_within(shard.attempts, self.offsets)
        self.blocked_key: BlockedKey | None = None
        self.started_s = 0.0
        self.is_committed = False
        self._last_attempt = last_attempt

    @property
    def offsets(self) -> range:
        return range(self.offset, self.offset + int(self.batch.num_rows))

    @property
    def size_bytes(self) -> int:
        return int(self.batch.nbytes)

    def attempts_of(self, offset: int) -> int:
        return self.attempts.get(offset, 0)

    def build_argument(self, topic: str, executor: int) -> pa.RecordBatch:
        return self.batch

    def detach(self) -> None:
        """It holds back its shard, so what came with it stays anyhow."""

    def finish(self) -> None:
        self.shard.finished_ranges.append((self.offsets.start, self.offsets.stop))
        self.shard.add_counts(again=self._repeats())

    def fail(self, reason: str) -> None:
        self.shard.add_counts(failed=len(self.offsets), again=self._repeats())
        self.shard.failures.append(RunFailure(self, reason))

    def retry_runs(self, attempts: dict[int, int], dead: set[int]) -> list[HandlerRun]:
        """The runs that follow this failed one."""
        counts = {at: max(self.attempts_of(at) + 1, attempts.get(at, 0)) for at in self.offsets}
        left = [at for at in self.offsets if at not in dead]
        self.shard.attempts.update((at, counts[at]) for at in left)
        return [
            BatchRun(self.shard, self._cut(start, end), start, self._last_attempt)
            for start, end in split_runs(left, counts, self._last_attempt)
        ]

    def _cut(self, start: int, end: int) -> pa.RecordBatch:
        return self.batch.slice(start - self.offset, end - start)

    def _repeats(self) -> int:
        suspect = max(0, min(self.shard.suspect_to, self.offsets.stop) - self.offset)
        if not self.attempts:
            return suspect
        return suspect + sum(at >= self.offset + suspect for at in self.attempts)


class QueuedBatches:
    """Neighbours of one shard, from which batches are cut."""

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

    def take(self) -> BatchRun | None:
        if not self._left:
            return None
        rows = self._next_rows()
        batch = self._batch.slice(self._batch.num_rows - self._left, rows)
        run = BatchRun(self.shard, batch, self._offset, self._last_attempt)
        self._left -= rows
        self._offset += rows
        return run

    def _next_rows(self) -> int:
        start = self._offset
        end = start + min(self._left, MAX_ROWS)
        if start < self.shard.suspect_to:
            end = min(end, start + MAX_SUSPECT_BATCH_ROWS, self.shard.suspect_to)
        known = _attempts_within(self.shard.attempts, range(start, end))
        if not known:
            return end - start
        first = next(iter(split_runs(range(start, end), known, self._last_attempt)))
        return first[1] - first[0]


def split_consecutive(offsets: Iterable[int]) -> Iterator[Range]:
    """Runs of consecutive offsets."""
    return split_runs(offsets, {}, 1)


def split_runs(
    offsets: Iterable[int], attempts: dict[int, int], last_attempt: int
) -> Iterator[Range]:
    """Neighbours, of which all have failed or none has; and those alone whose next failure
    would be the last."""
    start = end = -1
    has_failed = False
    for offset in offsets:
        failures = attempts.get(offset, 0)
        is_alone = failures >= last_attempt
        if start >= 0 and (is_alone or offset != end or has_failed is not (failures > 0)):
            yield start, end
            start = -1
        if is_alone:
            yield offset, offset + 1
            continue
        if start < 0:
            start, has_failed = offset, failures > 0
        end = offset + 1
    if start >= 0:
        yield start, end


def _attempts_within(attempts: dict[int, int], offsets: range) -> dict[int, int]:
    if not attempts:
        return {}
    if len(attempts) < len(offsets):
        return {at: n for at, n in attempts.items() if at in offsets}
    return {at: attempts[at] for at in offsets if at in attempts}
