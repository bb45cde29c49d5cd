"""The queue of one executor: the next run, and the runs that wait for their key.

    queued ──▶ take ──▶ current ──▶ finish: done
      ▲          │         │
      │          │         └──────▶ fail: the key is blocked, the acker reports the failure
    parked       └─▶ behind a blocked key            │
    (full shard)                                     ▼
                        ready ◀── retry, after its backoff

`LastRuns` stay current from message to message: `finish` and `fail` end one of them, and
`begin` continues with the next.

The later messages of a failed key wait in its `BlockedKey` and follow one by one, in order.
All other keys continue, and a failed message without a key blocks none. Ready runs start
before new ones.

The queue has no threads and no clock. Threads that share a queue must hold its lock around
each call. A shard is closed before its current run is examined, so that no run starts after
the release of its shard.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from polybus.dialects.fdq.client.assigned_shards import COLLECT_EVERY, AssignedShard
from polybus.dialects.fdq.client.handler_run import HandlerRun, LastRuns, QueuedRows


class BlockedKey:
    """A key with a failed message, and the later messages that wait for it."""

    __slots__ = ("executor_index", "key", "waiting")

    def __init__(self, key: Any, executor_index: int) -> None:
        self.key = key
        self.executor_index = executor_index
        self.waiting: deque[HandlerRun] = deque()


class KeyOrderedQueue:
    """Runs of open shards in key order. Runs of a shard that was closed never start."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.current: HandlerRun | None = None
        self.freed_rows = 0  # rows that have left the queue since the caller last reset this
        self._queued: deque[QueuedRows] = deque()
        self._ready: deque[HandlerRun] = deque()
        # Rows of full shards, with the shard's version when they were parked.
        self._full_shards: dict[AssignedShard, tuple[int, deque[QueuedRows]]] = {}
        self._blocked: dict[tuple[AssignedShard, Any], BlockedKey] = {}

    # --- input

    def push(self, queued: Iterable[QueuedRows]) -> None:
        self._queued.extend(queued)

    def retry(self, run: HandlerRun) -> None:
        """Make a failed run ready after its backoff."""
        if run.shard.is_open:
            self._ready.append(run)

    # --- runs

    def begin(self, now_s: float) -> HandlerRun | None:
        """Start the next run, which becomes `current`. Returns None if none can start."""
        run = self._continue_last_runs() if self.current is not None else None
        # Fast path: nothing is blocked, parked or ready.
        if run is None and self._queued and not (self._ready or self._full_shards or self._blocked):
            rows = self._queued[0]
            if rows.shard.is_open and not rows.shard.is_full:
                run = rows.take()
        if run is None:
            run = self._next()
            if run is None:
                return None
        # A suspect run starts only after the bus knows of it; see PoisonGuard.
        run.started_s = now_s if run.offset >= run.shard.suspect_to else math.inf
        self.current = run
        return run

    def finish(self, run: HandlerRun) -> bool:
        """Record a success. Returns False if the run was given up, so it does not count."""
        if self.current is not run:
            return False
        if isinstance(run, LastRuns):
            self._end_message(run, None)
            return True
        self.current = None
        shard = run.shard
        run.finish()
        if run.blocked_key is not None:
            self._unblock_next(run)
        if shard.is_full or len(shard.finished) >= COLLECT_EVERY:
            shard.collect_finished()
        return True

    def fail(self, run: HandlerRun, reason: str, *, is_given_up: bool = False) -> bool:
        """Record a failure or timeout; the key stays blocked until the bus has answered."""
        if self.current is not run:
            return False
        if isinstance(run, LastRuns):
            self._end_message(run, reason, is_given_up=is_given_up)
            return True
        self.current = None
        if run.is_committed:  # its transaction stands, so a later exception cannot undo the ack
            run.finish()
            if run.blocked_key is not None:
                self._unblock_next(run)
            return True
        self._block_key(run)
        run.fail(reason)
        return True

    def cancel(self, run: HandlerRun) -> bool:
        """Drop a run that never started, because its shard is no longer held."""
        is_current = self.current is run
        if is_current:
            self.current = None
        return is_current

    def schedule_followers(self, run: HandlerRun, runs: list[HandlerRun]) -> HandlerRun | None:
        """Queue the runs that follow a failed one, as the bus has decided.

        Returns the first of them, which the caller must pass to `retry` after its backoff, or
        None if the message is a dead letter.
        """
        blocked = run.blocked_key
        assert blocked is not None
        if not runs:
            self._unblock_next(run)
            return None
        for follower in runs:
            follower.blocked_key = blocked
        for follower in reversed(runs[1:]):
            blocked.waiting.appendleft(follower)
            follower.shard.add_waiting(1, follower.size_bytes)
        return runs[0]

    def drop_closed(self) -> None:
        """Drop everything of closed shards, to free its memory."""
        for rows in self._queued:
            if not rows.shard.is_open:
                self.freed_rows += rows.rows
        self._queued = deque(rows for rows in self._queued if rows.shard.is_open)
        self._ready = deque(run for run in self._ready if run.shard.is_open)
        for shard in [shard for shard in self._full_shards if not shard.is_open]:
            self.freed_rows += sum(rows.rows for rows in self._full_shards.pop(shard)[1])
        self._blocked = {key: blocked for key, blocked in self._blocked.items() if key[0].is_open}

    def park_pending(self) -> None:
        """Park all queued rows behind a slow run, so that other executors can fetch more."""
        self._queued = deque(map(self._park, self._queued))

    @property
    def wants_room(self) -> bool:
        """Whether a run waits for its full shard to make progress."""
        return bool(self._full_shards or self._ready)

    # --- last runs

    def _continue_last_runs(self) -> HandlerRun | None:
        """Return the current run at its next message, or None if it ends here."""
        run = self.current
        assert isinstance(run, LastRuns)
        if run.shard.is_open:
            run.begin_next()
            return run
        self._end_last_runs(run)
        return None

    def _end_message(self, run: LastRuns, reason: str | None, *, is_given_up: bool = False) -> None:
        """End the run of one message. The thread of one that was given up runs no other."""
        if not run.end_message(reason) or is_given_up:
            self._end_last_runs(run)

    def _end_last_runs(self, run: LastRuns) -> None:
        self.current = None
        if not run.failures:
            if run.blocked_key is not None:
                self._unblock_next(run)
            return
        blocked = self._block_key(run)
        rest = run.split_rest()
        if rest is not None:
            rest.blocked_key = blocked
            blocked.waiting.appendleft(rest)
            rest.shard.add_waiting(1, rest.size_bytes)
        run.fail("")

    # --- selection of the next run

    def _next(self) -> HandlerRun | None:
        for _ in range(len(self._ready)):
            run = self._ready.popleft()
            if not run.shard.is_open:
                continue
            if not run.shard.is_full or run.shard.may_start(run.offset, is_new=False):
                return run
            self._ready.append(run)
        # Rows of full shards continue after progress of the shard, before rows that came later.
        for shard, (version, parked) in list(self._full_shards.items()):
            if shard.version != version:
                del self._full_shards[shard]
                self._queued.extendleft(reversed(parked))
        while self._queued:
            next_run = self._next_from(self._queued[0])
            if next_run is not None:
                return next_run
        return None

    def _next_from(self, rows: QueuedRows) -> HandlerRun | None:
        """Take a run from the first rows. Returns None if the caller must try again."""
        shard = rows.shard
        if not shard.is_open:
            self.freed_rows += self._queued.popleft().rows
            return None
        if shard in self._full_shards:  # later rows must not overtake the parked ones
            self._full_shards[shard][1].append(self._park(self._queued.popleft()))
            return None
        run = rows.take()
        if run is None:
            self.freed_rows += self._queued.popleft().rows
            return None
        blocked = self._blocked.get((shard, run.key)) if run.key is not None else None
        if blocked is not None:
            run.blocked_key = blocked
            run.detach()
            blocked.waiting.append(run)
            shard.add_waiting(1, run.size_bytes)
            return None
        if shard.is_full:
            # Read the version before the decision: a change in between causes another look.
            version = shard.version
            if not shard.may_start(run.offset, is_new=True):
                self._queued.popleft()
                parked = deque((_ReturnedRun(run), self._park(rows)))
                self._full_shards[shard] = (version, parked)
                return None
        return run

    def _park(self, rows: QueuedRows) -> QueuedRows:
        """Count rows with the waiting messages of their shard instead of the fetch buffer."""
        if not rows.rows:  # parked already, or a returned run
            return rows
        self.freed_rows += rows.rows
        return _ParkedRows(rows)

    def _block_key(self, run: HandlerRun) -> BlockedKey:
        """Block the key of a failed run, unless it is blocked already."""
        if run.blocked_key is None:
            run.blocked_key = BlockedKey(run.key, self.index)
            run.detach()
            run.shard.add_blocked_keys(1)
            if run.key is not None:  # a message without a key blocks no other
                self._blocked[run.shard, run.key] = run.blocked_key
        return run.blocked_key

    def _unblock_next(self, run: HandlerRun) -> None:
        """Make the next message of a blocked key ready, or unblock the key."""
        blocked = run.blocked_key
        assert blocked is not None
        run.blocked_key = None
        if blocked.waiting:
            follower = blocked.waiting.popleft()
            follower.shard.add_waiting(-1, -follower.size_bytes)
            self._ready.append(follower)
            return
        run.shard.add_blocked_keys(-1)
        if blocked.key is not None:
            self._blocked.pop((run.shard, blocked.key), None)


class _ReturnedRun:
    """A run that was taken too early and is put back in front of its rows."""

    __slots__ = ("_run", "rows", "shard", "size_bytes")

    def __init__(self, run: HandlerRun) -> None:
        self.shard = run.shard
        self.rows = self.size_bytes = 0  # counted with its rows
        self._run: HandlerRun | None = run

    def take(self) -> HandlerRun | None:
        run, self._run = self._run, None
        return run


class _ParkedRows:
    """Rows that wait long. They count as waiting messages of their shard until all are taken."""

    __slots__ = ("_inner", "_size", "rows", "shard")

    def __init__(self, inner: QueuedRows) -> None:
        self.shard = inner.shard
        self.rows = 0  # reported as freed already
        self._inner = inner
        self._size = inner.rows, inner.size_bytes
        self.shard.add_waiting(*self._size)

    @property
    def size_bytes(self) -> int:
        return self._size[1]

    def take(self) -> HandlerRun | None:
        run = self._inner.take()
        if run is None:
            rows, size_bytes = self._size
            self._size = 0, 0  # `take` may be called again
            self.shard.add_waiting(-rows, -size_bytes)
        return run
