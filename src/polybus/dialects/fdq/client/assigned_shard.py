"""The books of one shard that a consumer holds: what is done, told, failed, and full.

A run of the handler ends well (`finished`), inside a transaction that has acked it
(`settled`), or badly (`failures`). Executors only append to these, which needs no lock;
`gather` takes what has come together to the books, from where it is told to the bus.

The bus keeps at most `MAX_RANGES` ranges above the low mark. A shard is full some time
before that: what was started already may still end. Then only what adds no range is
started, which is at least the message at the low mark, unless that one waits itself. It
is full, too, when very many keys have failed: then only those are tried, and again the
message at the low mark, new or not, since all others may have to wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from polybus.dialects.fdq.client.offset_ranges import (
    OffsetRanges,
    Range,
    merge_ranges,
    ranges_from_offsets,
)

if TYPE_CHECKING:
    from polybus.dialects.fdq.client.handler_run import HandlerRun, MessageRun
    from polybus.dialects.fdq.client.transaction import TransactionOutput

MAX_RANGES = 1024
MAX_EXECUTORS = 128  # each may add a range, and another one after the last gathering
COLLECT_EVERY = 64  # runs that ended, at the latest
# Keys (or messages without one) that have failed and are to be tried again. If all fail,
# as when something that the handler needs is away, a shard must not run through its log.
MAX_BLOCKED_KEYS = 512
# Messages that wait behind a failed one of their key, behind a slow one, or because the shard
# is full; then no more are fetched.
MAX_WAITING = 8192
MAX_WAITING_BYTES = 64 << 20


class Committer(Protocol):
    """What a transaction needs beside its message."""

    def commit(self, run: MessageRun, outputs: list[TransactionOutput]) -> dict[str, Any]: ...


class RunFailure:
    """A run that ended badly, as the bus will be told of it."""

    __slots__ = ("reason", "run")

    def __init__(self, run: HandlerRun, reason: str) -> None:
        self.run = run
        self.reason = reason

    def entries(self) -> list[dict[str, Any]]:
        run = self.run
        return [
            {"offset": offset, "reason": self.reason, "attempt": run.attempts_of(offset)}
            for offset in run.offsets
        ]


class AssignedShard:
    """A shard from one assignment to its end; the next one of the same shard is another."""

    def __init__(
        self, given: dict[str, Any], executors: int = 1, max_ranges: int = MAX_RANGES
    ) -> None:
        self.number = int(given["shard"])
        self.epoch = int(given["epoch"])
        self.index = int(given.get("index", self.number))
        self.done = OffsetRanges(int(given["low"]), given.get("ranges") or ())
        self.next = self.done.low  # how far it was fetched
        self.suspect_to = int(given.get("suspect_to") or 0)
        self.attempts = {int(at): int(n) for at, n in (given.get("attempts") or {}).items()}
        self.committer: Committer | None = None
        self.is_open = True  # may more be started?
        self.is_releasing = False
        self.is_held = True  # until it was released or lost
        self.finished: deque[int] = deque()
        self.finished_ranges: deque[Range] = deque()
        self.committed: deque[int] = deque()
        self.failures: deque[RunFailure] = deque()
        self.emitted = 0
        self.redelivered = 0
        self._holds = 0
        self.waiting = 0  # messages that others hold back for long, and their bytes
        self.waiting_bytes = 0
        self.version = 0  # of the books
        self._told = (0, 0)  # emitted and redelivered, as the bus knows them
        self._unsent: list[Range] = []
        self._full_at = max_ranges - COLLECT_EVERY - 2 * executors
        self.is_full = len(self.done) >= self._full_at
        self._lock = Lock()

    # --- what executors ask

    def may_start(self, offset: int, *, is_new: bool) -> bool:
        """Only asked of a full shard."""
        with self._lock:
            if offset == self.done.low:
                return True
            if is_new and self._holds >= MAX_BLOCKED_KEYS:
                return False
            return len(self.done) < self._full_at or self.done.touches(offset)

    def is_done(self, offset: int, end: int | None = None) -> bool:
        """Is it, or any up to `end`?"""
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

    # --- the books

    def collect_finished(self) -> bool:
        """Books what has ended; was there anything?"""
        if not (self.finished or self.finished_ranges or self.committed):
            return False
        with self._lock:
            ended = ranges_from_offsets(_drain(self.finished))
            whole = _drain(self.finished_ranges)
            settled = _drain(self.committed)
            if not (ended or whole or settled):
                return False
            for start, end in (*ended, *whole):
                self.done.add(start, end)
                self.emitted += end - start
            for offset in settled:
                self.done.add(offset, offset + 1)
            self.emitted += len(settled)
            self._unsent = merge_ranges([*self._unsent, *ended, *whole])
            self._changed()
            return True

    def take_unsent_acks(self) -> list[Range]:
        """What the bus is to be told is acked; `put_back` if it could not be told."""
        with self._lock:
            unsent, self._unsent = self._unsent, []
            return unsent

    def restore_unsent_acks(self, ranges: list[Range]) -> None:
        with self._lock:
            self._unsent = merge_ranges([*self._unsent, *ranges])

    def mark_done(self, offsets: Iterable[int], low: int = 0) -> None:
        """Dead letters, and whatever else is done without us."""
        with self._lock:
            for offset in offsets:
                self.done.add(offset, offset + 1)
            self.done.raise_low(low)
            self._changed()

    def add_blocked_keys(self, keys: int) -> None:
        """More keys have failed; or less, if they are done."""
        with self._lock:
            self._holds += keys
            self._changed()

    def add_waiting(self, messages: int, size_bytes: int) -> None:
        """More wait for others of the shard or of their lane; less if it is negative."""
        with self._lock:
            self.waiting += messages
            self.waiting_bytes += size_bytes

    def add_counts(self, *, failed: int = 0, again: int = 0) -> None:
        """Runs that ended badly, and those that were not the first of their message."""
        with self._lock:
            self.emitted += failed
            self.redelivered += again

    def _changed(self) -> None:
        self.is_full = len(self.done) >= self._full_at or self._holds >= MAX_BLOCKED_KEYS
        self.version += 1

    # --- what the bus is told

    @property
    def counts(self) -> tuple[int, int]:
        return self.emitted, self.redelivered

    @property
    def has_unreported(self) -> bool:
        return bool(self._unsent or self.failures) or not self.is_reported(self.counts)

    def is_reported(self, counts: tuple[int, int]) -> bool:
        return counts == self._told

    def mark_reported(self, counts: tuple[int, int]) -> None:
        self._told = counts


def _drain(queue: deque[Any]) -> list[Any]:
    """What is in it now; what is appended meanwhile stays."""
    return [queue.popleft() for _ in range(len(queue))]
