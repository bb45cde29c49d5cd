"""The queue of one executor: what it runs next, and what has to wait for whom.

    pieces ──▶ take ──▶ current ──▶ finish: done
      ▲         │          │
      │         │          └─────▶ fail: the key is held, the bus is told
    aside       └─▶ behind a held key          │
    (a full shard)                             ▼
                       ready ◀── retry, when its pause is over

A key that failed is held: its later messages wait in its `Hold` and follow one by one,
in order. All other keys go on; a message without a key holds back nobody. What is ready
comes before what is new.

No threads and no clock are in here. Whoever shares a lane between threads holds its
lock around each call; that a shard is closed before it is looked at whether something of
it runs makes sure that nothing is started behind a release.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from polybus.dialects.fdq.client.assigned_shard import COLLECT_EVERY, AssignedShard
from polybus.dialects.fdq.client.handler_run import HandlerRun, QueuedRows


class BlockedKey:
    """A key whose first message failed, and those that came behind it."""

    __slots__ = ("executor_index", "key", "waiting")

    def __init__(self, key: Any, lane: int) -> None:
        self.key = key
        self.executor_index = lane
        self.waiting: deque[HandlerRun] = deque()


class KeyOrderedQueue:
    """What is in it belongs to shards that were open when it came; of closed ones nothing
    is started any more."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.current: HandlerRun | None = None
        self.freed_rows = 0  # of pieces that are through, since this was last looked at
        self._pieces: deque[QueuedRows] = deque()
        self._ready: deque[HandlerRun] = deque()
        # Pieces of full shards, and how the shard was when they were put there.
        self._full_shards: dict[AssignedShard, tuple[int, deque[QueuedRows]]] = {}
        self._blocked: dict[tuple[AssignedShard, Any], BlockedKey] = {}

    # --- coming

    def push(self, piece: QueuedRows) -> None:
        self._pieces.append(piece)

    def retry(self, run: HandlerRun) -> None:
        """A failed run's pause is over."""
        if run.shard.is_open:
            self._ready.append(run)

    # --- running

    def begin(self, now_s: float) -> HandlerRun | None:
        """The next one to run, which is `current` then; None if there is none now."""
        run = None
        if self._pieces and not (
            self._ready or self._full_shards or self._blocked
        ):  # the usual way
            piece = self._pieces[0]
            if piece.shard.is_open and not piece.shard.is_full:
                run = piece.take()
        if run is None:
            run = self._next()
            if run is None:
                return None
        # What is suspect begins when the bus has been told of it.
        run.started_s = now_s if run.offset >= run.shard.suspect_to else math.inf
        self.current = run
        return run

    def finish(self, run: HandlerRun) -> bool:
        """It ended well. False if it was taken away meanwhile: then it did not count."""
        if self.current is not run:
            return False
        self.current = None
        shard = run.shard
        run.finish()
        if run.blocked_key is not None:
            self._unblock_next(run)
        if shard.is_full or len(shard.finished) >= COLLECT_EVERY:
            shard.collect_finished()
        return True

    def fail(self, run: HandlerRun, reason: str) -> bool:
        """It ended badly, or was too long in running: its key waits for what the bus says."""
        if self.current is not run:
            return False
        self.current = None
        if run.is_committed:  # its transaction stands, whatever came after it
            run.finish()
            if run.blocked_key is not None:
                self._unblock_next(run)
            return True
        if run.blocked_key is None:
            self._block_key(run)
        run.fail(reason)
        return True

    def cancel(self, run: HandlerRun) -> bool:
        """It never began: what it was to be run for is no longer ours."""
        is_mine = self.current is run
        if is_mine:
            self.current = None
        return is_mine

    def schedule_followers(self, run: HandlerRun, runs: list[HandlerRun]) -> HandlerRun | None:
        """The bus has told what comes after a failed run: these, the first after a pause,
        or nothing if it is dead. The first, which is to be put back by `retry`."""
        hold = run.blocked_key
        assert hold is not None
        if not runs:
            self._unblock_next(run)
            return None
        for one in runs:
            one.blocked_key = hold
        for one in reversed(runs[1:]):
            hold.waiting.appendleft(one)
            one.shard.add_waiting(1, one.size_bytes)
        return runs[0]

    def drop_closed(self) -> None:
        """Forgets what will not be run, so that nothing keeps its memory."""
        for piece in self._pieces:
            if not piece.shard.is_open:
                self.freed_rows += piece.rows
        self._pieces = deque(piece for piece in self._pieces if piece.shard.is_open)
        self._ready = deque(run for run in self._ready if run.shard.is_open)
        for shard in [shard for shard in self._full_shards if not shard.is_open]:
            self.freed_rows += sum(piece.rows for piece in self._full_shards.pop(shard)[1])
        self._blocked = {key: hold for key, hold in self._blocked.items() if key[0].is_open}

    def park_pending(self) -> None:
        """Its run takes long: what waits behind it takes no room from other lanes."""
        self._pieces = deque(map(self._park, self._pieces))

    @property
    def wants_room(self) -> bool:
        """Is there something that waits for its shard to have room?"""
        return bool(self._full_shards or self._ready)

    # --- inside

    def _next(self) -> HandlerRun | None:
        for _ in range(len(self._ready)):
            run = self._ready.popleft()
            if not run.shard.is_open:
                continue
            if not run.shard.is_full or run.shard.may_start(run.offset, is_new=False):
                return run
            self._ready.append(run)
        if self._full_shards:
            self._resume()
        while self._pieces:
            found = self._next_from(self._pieces[0])
            if found is not None:
                return found
        return None

    def _resume(self) -> None:
        """Full shards whose books have changed are looked at again."""
        for shard, (version, pieces) in list(self._full_shards.items()):
            if shard.version != version:
                del self._full_shards[shard]
                self._pieces.extendleft(reversed(pieces))

    def _next_from(self, piece: QueuedRows) -> HandlerRun | None:
        """The next of the first piece, or None: then look again at what is first now."""
        shard = piece.shard
        if not shard.is_open:
            self.freed_rows += self._pieces.popleft().rows
            return None
        if shard in self._full_shards:
            self._full_shards[shard][1].append(self._park(self._pieces.popleft()))
            return None
        run = piece.take()
        if run is None:
            self.freed_rows += self._pieces.popleft().rows
            return None
        if self._blocked and self._queue_behind_blocked(run):
            return None
        if shard.is_full:
            version = shard.version  # before it is judged: what changes then is looked at again
            if not shard.may_start(run.offset, is_new=True):
                self._park_full(piece, run, version)
                return None
        return run

    def _queue_behind_blocked(self, run: HandlerRun) -> bool:
        hold = self._blocked.get((run.shard, run.key)) if run.key is not None else None
        if hold is None:
            return False
        run.blocked_key = hold
        run.detach()
        hold.waiting.append(run)
        run.shard.add_waiting(1, run.size_bytes)
        return True

    def _park_full(self, piece: QueuedRows, run: HandlerRun, version: int) -> None:
        self._pieces.popleft()
        self._full_shards[run.shard] = (version, deque((_ReturnedRun(run), self._park(piece))))

    def _park(self, piece: QueuedRows) -> QueuedRows:
        """What waits for one takes no room from the others: it counts with its shard."""
        if not piece.rows:  # it is, or it is a run alone
            return piece
        self.freed_rows += piece.rows
        return _ParkedRows(piece)

    def _block_key(self, run: HandlerRun) -> None:
        run.blocked_key = BlockedKey(run.key, self.index)
        run.detach()
        run.shard.add_blocked_keys(1)
        if run.key is not None:
            self._blocked[run.shard, run.key] = run.blocked_key

    def _unblock_next(self, run: HandlerRun) -> None:
        """A held key's message is done: the next one's turn, or the key is free."""
        hold = run.blocked_key
        assert hold is not None
        run.blocked_key = None
        if hold.waiting:
            following = hold.waiting.popleft()
            following.shard.add_waiting(-1, -following.size_bytes)
            self._ready.append(following)
            return
        run.shard.add_blocked_keys(-1)
        if hold.key is not None:
            self._blocked.pop((run.shard, hold.key), None)


class _ReturnedRun:
    """A run that was taken too early, put back in front of its piece."""

    __slots__ = ("_run", "rows", "shard", "size_bytes")

    def __init__(self, run: HandlerRun) -> None:
        self.shard = run.shard
        self.rows = self.size_bytes = 0  # counted with its piece
        self._run: HandlerRun | None = run

    def take(self) -> HandlerRun | None:
        run, self._run = self._run, None
        return run


class _ParkedRows:
    """A piece that waits for long. It counts with what waits in its shard, until it is through."""

    __slots__ = ("_piece", "_size", "rows", "shard")

    def __init__(self, piece: QueuedRows) -> None:
        self.shard = piece.shard
        self.rows = 0  # told as freed already
        self._piece = piece
        self._size = piece.rows, piece.size_bytes
        self.shard.add_waiting(*self._size)

    @property
    def size_bytes(self) -> int:
        return self._size[1]

    def take(self) -> HandlerRun | None:
        run = self._piece.take()
        if run is None:
            rows, size_bytes = self._size
            self._size = 0, 0  # it may be asked again
            self.shard.add_waiting(-rows, -size_bytes)
        return run
