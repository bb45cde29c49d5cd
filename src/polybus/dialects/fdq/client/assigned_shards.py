"""The shards that are assigned to a consumer, and its progress in each of them.

A run of the handler succeeds (`finished`), succeeds in a transaction that has acked it
already (`committed`), or fails (`failures`). Executors only append to these queues, which
needs no lock. `collect_finished` moves their content to the acked ranges, from where the
acker reports it to the bus.

The bus keeps at most `MAX_RANGES` ranges above the low-water mark. A shard counts as full
somewhat earlier, because runs that have started may still finish. A full shard starts only
messages that add no range, which includes the message at the low-water mark unless that one
is blocked. A shard is also full while `MAX_BLOCKED_KEYS` keys have failed. Then it starts
only those, and again the message at the low-water mark, because all others may wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polybus.model.offset_ranges import OffsetRanges, Range, merge_ranges, ranges_from_offsets

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.handler_run import HandlerRun, MessageRun
    from polybus.dialects.fdq.client.transaction import TransactionOutput
    from polybus.native.protocol.answers import Committed

MAX_RANGES = 1024
MAX_EXECUTORS = 128  # each may add a range, and another one after the last collection
COLLECT_EVERY = 64  # finished runs
# Keys (or messages without one) that have failed and will be retried. If all runs fail, for
# example because a database is down, the consumer must not read through the whole log.
MAX_BLOCKED_KEYS = 512
# Messages that wait for a failed message of their key, for a slow one, or because the shard is
# full. Above this the consumer fetches no more of the shard.
MAX_WAITING = 8192
MAX_WAITING_BYTES = 64 << 20


class Committer(Protocol):
    """Commits the transaction of a run."""

    def commit(self, run: MessageRun, outputs: list[TransactionOutput]) -> Committed: ...


class RunFailure(NamedTuple):
    """A failed run that the acker has not reported yet."""

    run: HandlerRun
    reason: str


class AssignedShard:
    """One assignment of a shard. Assigning the shard again creates another object."""

    def __init__(
        self, assignment: dict[str, Any], executors: int = 1, max_ranges: int = MAX_RANGES
    ) -> None:
        self.number = int(assignment["shard"])
        self.epoch = int(assignment["epoch"])
        self.index = int(assignment.get("index", self.number))
        self.done = OffsetRanges(int(assignment["low"]), assignment.get("ranges") or ())
        self.next = self.done.low  # the first offset that was not fetched
        self.suspect_to = int(assignment.get("suspect_to") or 0)
        self.attempts = {
            int(offset): int(count) for offset, count in (assignment.get("attempts") or {}).items()
        }
        self.committer: Committer | None = None
        self.is_open = True  # runs may start
        self.is_releasing = False
        self.is_sealed = False  # by a reshard: the group reads new shards after this one
        self.is_held = True  # neither released nor lost
        self.finished: deque[int] = deque()
        self.finished_ranges: deque[Range] = deque()
        self.committed: deque[int] = deque()
        self.failures: deque[RunFailure] = deque()
        self.emitted = 0
        self.redelivered = 0
        self._blocked_keys = 0
        self.waiting = 0  # messages that wait for others, and their bytes
        self.waiting_bytes = 0
        self.version = 0  # changes with `done` and the blocked keys
        self.reported = (0, 0)  # emitted and redelivered, as the bus knows them
        self._unsent: list[Range] = []
        self._full_at = max_ranges - COLLECT_EVERY - 2 * executors
        self.is_full = len(self.done) >= self._full_at
        self._lock = Lock()

    # --- called by executors

    def may_start(self, offset: int, *, is_new: bool) -> bool:
        """Return whether a run may start in a shard that is full."""
        with self._lock:
            if offset == self.done.low:
                return True
            if is_new and self._blocked_keys >= MAX_BLOCKED_KEYS:
                return False
            return len(self.done) < self._full_at or self.done.touches(offset)

    def is_done(self, offset: int, end: int | None = None) -> bool:
        """Return whether the offset, or any offset of [offset, end), is done."""
        with self._lock:
            return self.done.overlaps(offset, offset + 1 if end is None else end)

    @property
    def wants_rows(self) -> bool:
        return (
            self.is_open
            and not self.is_full
            and self.waiting < MAX_WAITING
            and self.waiting_bytes < MAX_WAITING_BYTES
        )

    # --- progress

    def collect_finished(self) -> None:
        """Move finished runs to the acked ranges."""
        if not (self.finished or self.finished_ranges or self.committed):
            return
        with self._lock:
            ranges = ranges_from_offsets(_drain(self.finished))
            ranges += _drain(self.finished_ranges)
            committed = _drain(self.committed)
            for start, end in ranges:
                self.done.add(start, end)
                self.emitted += end - start
            # Their transactions have acked these, so they are not reported again.
            for offset in committed:
                self.done.add(offset, offset + 1)
            self.emitted += len(committed)
            self._unsent = merge_ranges([*self._unsent, *ranges])
            self._update_fullness()

    def has_unreported(self) -> bool:
        """Return whether there is progress that the bus does not know."""
        self.collect_finished()
        has_runs = bool(self._unsent or self.failures)
        return has_runs or (self.emitted, self.redelivered) != self.reported

    def take_unsent_acks(self) -> list[Range]:
        """Take the ranges to report. Call `restore_unsent_acks` if the report fails."""
        with self._lock:
            unsent, self._unsent = self._unsent, []
            return unsent

    def restore_unsent_acks(self, unsent: list[Range]) -> None:
        with self._lock:
            self._unsent = merge_ranges([*self._unsent, *unsent])

    def mark_done(self, offsets: Iterable[int], low: int = 0) -> None:
        """Mark offsets that the bus has acked itself, such as dead letters, and all below `low`."""
        with self._lock:
            for offset in offsets:
                self.done.add(offset, offset + 1)
            self.done.raise_low(low)
            self._update_fullness()

    def add_blocked_keys(self, keys: int) -> None:
        """Count keys that are blocked by a failed message; negative to uncount them."""
        with self._lock:
            self._blocked_keys += keys
            self._update_fullness()

    def add_waiting(self, messages: int, size_bytes: int) -> None:
        """Count messages that wait for others; negative to uncount them."""
        with self._lock:
            self.waiting += messages
            self.waiting_bytes += size_bytes

    def add_counts(self, *, failed: int = 0, again: int = 0) -> None:
        """Count failed runs, and runs that were not the first of their message."""
        with self._lock:
            self.emitted += failed
            self.redelivered += again

    def _update_fullness(self) -> None:
        self.is_full = len(self.done) >= self._full_at or self._blocked_keys >= MAX_BLOCKED_KEYS
        self.version += 1


class AssignedShards:
    """The shards of one subscription, shared by its threads.

    `generation` changes when all shards are lost; responses to earlier requests are void then.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._is_closed = False
        self._shards: dict[int, AssignedShard] = {}
        self._lock = Lock()

    def all(self) -> list[AssignedShard]:
        with self._lock:
            return list(self._shards.values())

    def get(self, number: int, epoch: int) -> AssignedShard | None:
        """Return the shard if it is still held under this epoch."""
        shard = self._shards.get(number)
        return shard if shard is not None and shard.epoch == epoch else None

    def put(self, shard: AssignedShard, generation: int) -> bool:
        """Add a newly assigned shard. Returns False if the generation has passed."""
        with self._lock:
            if generation != self.generation:
                return False
            old = self._shards.get(shard.number)
            if old is not None:
                old.is_open = old.is_held = False
            self._shards[shard.number] = shard
            shard.is_open = not self._is_closed
            return True

    def drop(self, shard: AssignedShard) -> None:
        with self._lock:
            shard.is_open = shard.is_held = False
            if self._shards.get(shard.number) is shard:
                del self._shards[shard.number]

    def drop_all(self) -> None:
        """Drop all shards and begin a new generation."""
        with self._lock:
            self.generation += 1
            for shard in self._shards.values():
                shard.is_open = shard.is_held = False
            self._shards.clear()

    def close(self) -> list[AssignedShard]:
        """Start no more runs. The shards stay assigned until the consumer leaves."""
        with self._lock:
            self._is_closed = True
            for shard in self._shards.values():
                shard.is_open = False
            return list(self._shards.values())

    def start_release(self, number: int) -> bool:
        """Close a shard that the bus wants back. Returns False if it was closed already."""
        with self._lock:
            shard = self._shards.get(number)
            if shard is None or shard.is_releasing:
                return False
            shard.is_open = False
            shard.is_releasing = True
            return True

    def has_unreported(self) -> bool:
        return any(shard.has_unreported() for shard in self.all())

    def describe_held(self) -> list[dict[str, Any]]:
        """Return the `held` field of a fetch."""
        fields = []
        for shard in self.all():
            held = {"shard": shard.number, "epoch": shard.epoch, "next": shard.next}
            if not shard.wants_rows:
                held |= {"paused": True, "releasing": shard.is_releasing}
            fields.append(held)
        return fields


def _drain(queue: deque[Any]) -> list[Any]:
    """Take the current content. Items that are appended meanwhile stay in the queue."""
    return [queue.popleft() for _ in range(len(queue))]
