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

from polybus.dialects.fdq.client.assigned_shard import GATHER_EVERY, Shard
from polybus.dialects.fdq.client.handler_run import Piece, Run


class Hold:
    """A key whose first message failed, and those that came behind it."""

    __slots__ = ("key", "lane", "waiting")

    def __init__(self, key: Any, lane: int) -> None:
        self.key = key
        self.lane = lane
        self.waiting: deque[Run] = deque()


class Lane:
    """What is in it belongs to shards that were open when it came; of closed ones nothing
    is started any more."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.current: Run | None = None
        self.freed_rows = 0  # of pieces that are through, since this was last looked at
        self._pieces: deque[Piece] = deque()
        self._ready: deque[Run] = deque()
        # Pieces of full shards, and how the shard was when they were put there.
        self._aside: dict[Shard, tuple[int, deque[Piece]]] = {}
        self._holds: dict[tuple[Shard, Any], Hold] = {}

    # --- coming

    def push(self, piece: Piece) -> None:
        self._pieces.append(piece)

    def retry(self, run: Run) -> None:
        """A failed run's pause is over."""
        if run.shard.is_open:
            self._ready.append(run)

    # --- running

    def begin(self, now_s: float) -> Run | None:
        """The next one to run, which is `current` then; None if there is none now."""
        run = None
        if self._pieces and not (self._ready or self._aside or self._holds):  # the usual way
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

    def finish(self, run: Run) -> bool:
        """It ended well. False if it was taken away meanwhile: then it did not count."""
        if self.current is not run:
            return False
        self.current = None
        shard = run.shard
        run.finish()
        if run.hold is not None:
            self._follow(run)
        if shard.is_full or len(shard.finished) >= GATHER_EVERY:
            shard.gather()
        return True

    def fail(self, run: Run, reason: str) -> bool:
        """It ended badly, or was too long in running: its key waits for what the bus says."""
        if self.current is not run:
            return False
        self.current = None
        if run.is_settled:  # its transaction stands, whatever came after it
            run.finish()
            if run.hold is not None:
                self._follow(run)
            return True
        if run.hold is None:
            self._hold(run)
        run.fail(reason)
        return True

    def cancel(self, run: Run) -> bool:
        """It never began: what it was to be run for is no longer ours."""
        is_mine = self.current is run
        if is_mine:
            self.current = None
        return is_mine

    def follow(self, run: Run, runs: list[Run]) -> Run | None:
        """The bus has told what comes after a failed run: these, the first after a pause,
        or nothing if it is dead. The first, which is to be put back by `retry`."""
        hold = run.hold
        assert hold is not None
        if not runs:
            self._follow(run)
            return None
        for one in runs:
            one.hold = hold
        for one in reversed(runs[1:]):
            hold.waiting.appendleft(one)
            one.shard.wait(1, one.size_bytes)
        return runs[0]

    def drop_closed(self) -> None:
        """Forgets what will not be run, so that nothing keeps its memory."""
        for piece in self._pieces:
            if not piece.shard.is_open:
                self.freed_rows += piece.rows
        self._pieces = deque(piece for piece in self._pieces if piece.shard.is_open)
        self._ready = deque(run for run in self._ready if run.shard.is_open)
        for shard in [shard for shard in self._aside if not shard.is_open]:
            self.freed_rows += sum(piece.rows for piece in self._aside.pop(shard)[1])
        self._holds = {key: hold for key, hold in self._holds.items() if key[0].is_open}

    def park(self) -> None:
        """Its run takes long: what waits behind it takes no room from other lanes."""
        self._pieces = deque(map(self._parked, self._pieces))

    @property
    def wants_room(self) -> bool:
        """Is there something that waits for its shard to have room?"""
        return bool(self._aside or self._ready)

    # --- inside

    def _next(self) -> Run | None:
        for _ in range(len(self._ready)):
            run = self._ready.popleft()
            if not run.shard.is_open:
                continue
            if not run.shard.is_full or run.shard.may_start(run.offset, is_new=False):
                return run
            self._ready.append(run)
        if self._aside:
            self._resume()
        while self._pieces:
            found = self._from(self._pieces[0])
            if found is not None:
                return found
        return None

    def _resume(self) -> None:
        """Full shards whose books have changed are looked at again."""
        for shard, (version, pieces) in list(self._aside.items()):
            if shard.version != version:
                del self._aside[shard]
                self._pieces.extendleft(reversed(pieces))

    def _from(self, piece: Piece) -> Run | None:
        """The next of the first piece, or None: then look again at what is first now."""
        shard = piece.shard
        if not shard.is_open:
            self.freed_rows += self._pieces.popleft().rows
            return None
        if shard in self._aside:
            self._aside[shard][1].append(self._parked(self._pieces.popleft()))
            return None
        run = piece.take()
        if run is None:
            self.freed_rows += self._pieces.popleft().rows
            return None
        if self._holds and self._waits(run):
            return None
        if shard.is_full:
            version = shard.version  # before it is judged: what changes then is looked at again
            if not shard.may_start(run.offset, is_new=True):
                self._set_aside(piece, run, version)
                return None
        return run

    def _waits(self, run: Run) -> bool:
        hold = self._holds.get((run.shard, run.key)) if run.key is not None else None
        if hold is None:
            return False
        run.hold = hold
        run.detach()
        hold.waiting.append(run)
        run.shard.wait(1, run.size_bytes)
        return True

    def _set_aside(self, piece: Piece, run: Run, version: int) -> None:
        self._pieces.popleft()
        self._aside[run.shard] = (version, deque((_Put(run), self._parked(piece))))

    def _parked(self, piece: Piece) -> Piece:
        """What waits for one takes no room from the others: it counts with its shard."""
        if not piece.rows:  # it is, or it is a run alone
            return piece
        self.freed_rows += piece.rows
        return _Parked(piece)

    def _hold(self, run: Run) -> None:
        run.hold = Hold(run.key, self.index)
        run.detach()
        run.shard.hold(1)
        if run.key is not None:
            self._holds[run.shard, run.key] = run.hold

    def _follow(self, run: Run) -> None:
        """A held key's message is done: the next one's turn, or the key is free."""
        hold = run.hold
        assert hold is not None
        run.hold = None
        if hold.waiting:
            following = hold.waiting.popleft()
            following.shard.wait(-1, -following.size_bytes)
            self._ready.append(following)
            return
        run.shard.hold(-1)
        if hold.key is not None:
            self._holds.pop((run.shard, hold.key), None)


class _Put:
    """A run that was taken too early, put back in front of its piece."""

    __slots__ = ("_run", "rows", "shard", "size_bytes")

    def __init__(self, run: Run) -> None:
        self.shard = run.shard
        self.rows = self.size_bytes = 0  # counted with its piece
        self._run: Run | None = run

    def take(self) -> Run | None:
        run, self._run = self._run, None
        return run


class _Parked:
    """A piece that waits for long. It counts with what waits in its shard, until it is through."""

    __slots__ = ("_piece", "_size", "rows", "shard")

    def __init__(self, piece: Piece) -> None:
        self.shard = piece.shard
        self.rows = 0  # told as freed already
        self._piece = piece
        self._size = piece.rows, piece.size_bytes
        self.shard.wait(*self._size)

    @property
    def size_bytes(self) -> int:
        return self._size[1]

    def take(self) -> Run | None:
        run = self._piece.take()
        if run is None:
            rows, size_bytes = self._size
            self._size = 0, 0  # it may be asked again
            self.shard.wait(-rows, -size_bytes)
        return run
