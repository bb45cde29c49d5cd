"""What one reader is owed: a bounded queue in front of its socket.

An outbox is in one of three states:

    open      the socket takes what comes
    stalled   the socket is full: what comes is held here
    full      what is held is over the high-water mark: its publishers wait

The first write of a loop turn goes straight to the socket, which is what makes
one message at a time fast. Whatever else comes in the same turn is gathered and
leaves at its end in one system call, unless it grows large enough to be worth a
call of its own. With fifty publishers that is one write a turn and not fifty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polybus.bus.connection import Connection, ConnectionIO

# Gathering more than this before writing gains nothing: the system call is paid for.
WORTH_A_WRITE_BYTES = 32 * 1024


class LoopTurn:
    """One turn of the event loop, shared by all outboxes of a bus."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self.number = 1
        self.call_soon = call_soon
        self._open = False
        self._gathered: list[Outbox] = []

    def touch(self) -> None:
        """Makes sure the turn is ended, after everything that is ready now."""
        if not self._open:
            self._open = True
            self.call_soon(self.end)

    def gather(self, outbox: Outbox) -> None:
        self._gathered.append(outbox)

    def end(self) -> None:
        self._open = False
        self.number += 1
        gathered, self._gathered = self._gathered, []
        for outbox in gathered:
            outbox.flush()


class OutboxOwner(Protocol):
    """Who is told when an outbox fills, has room again, or is past all bounds."""

    def on_filled(self, outbox: Outbox) -> None: ...
    def on_room(self, outbox: Outbox) -> None: ...
    def on_overflow(self, outbox: Outbox) -> None: ...


class Outbox:
    connection: Connection  # set by the broker when the party joins

    __slots__ = (
        "_closed",
        "_gathering",
        "_handed",
        "_handed_bytes",
        "_held",
        "_held_bytes",
        "_high_water",
        "_low_water",
        "_max_bytes",
        "_owner",
        "_pipe",
        "_pushed_bytes",
        "_stalled",
        "_turn",
        "_written_in",
        "connection",
        "full",
        "waiters",
        "window_start_s",
        "window_taken",
    )

    def __init__(
        self,
        pipe: ConnectionIO,
        turn: LoopTurn,
        owner: OutboxOwner,
        high_water: int,
        max_bytes: int,
        low_water: int | None = None,
    ) -> None:
        self._pipe = pipe
        self._turn = turn
        self._owner = owner
        self._high_water = high_water
        self._low_water = high_water // 2 if low_water is None else low_water
        self._max_bytes = max_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._handed: list[bytes] = []  # the last write, if the socket did not take all of it
        self._handed_bytes = 0
        self._pushed_bytes = 0
        self._stalled = False
        self._gathering = False
        self._closed = False
        self._written_in = 0
        self.full = False
        self.waiters: dict[Connection, None] = {}  # publishers that wait for room, first come first
        self.window_start_s = 0.0  # of the slow-consumer rule
        self.window_taken = 0

    def push(self, data: bytes) -> None:
        """Takes bytes for the reader; sends them at once if nothing is in the way."""
        if self._closed:
            return
        self._pushed_bytes += len(data)
        if self._stalled:
            self._hold(data)
        elif self._written_in != self._turn.number:
            self._written_in = self._turn.number
            self._turn.touch()
            self._pipe.write(data)
            self._written([data])
        else:
            self._gather(data)

    def flush(self) -> None:
        """Hands everything held to the socket in one write."""
        self._gathering = False
        if self._stalled or not self._held:
            return
        chunks, self._held = self._held, []
        self._held_bytes = 0
        self._written_in = self._turn.number
        self._turn.touch()
        self._pipe.write_many(chunks)
        self._written(chunks)

    def close(self, *, send_held: bool) -> None:
        """Takes nothing more. What is held goes to the socket, or nowhere."""
        if send_held and self._held:
            self._handed = self._handed + self._held
            self._pipe.write_many(self._held)
        elif not send_held:
            self._handed = []
        self._held = []
        self._held_bytes = 0
        self._closed = True
        self.full = False

    def on_stalled(self) -> None:
        """The socket is full."""
        self._stalled = True

    def on_writable(self) -> None:
        """The socket has taken all it was given."""
        self._stalled = False
        self._handed = []
        self._handed_bytes = 0
        self.flush()
        if self.full and not self._closed and self.backlog() <= self._low_water:
            self.full = False
            self._owner.on_room(self)

    def backlog(self) -> int:
        """Bytes the reader has not taken yet."""
        return self._held_bytes + (self._pipe.backlog_bytes() if self._stalled else 0)

    def taken(self) -> int:
        """Bytes that have reached the reader's host in all.

        What lies in our own host's queue is not taken: that queue may hold megabytes, and
        while a slow reader works through it the socket itself seems to stand still.
        """
        return self._pushed_bytes - self.backlog() - self._pipe.unconfirmed_bytes()

    def is_idle(self) -> bool:
        return not self._stalled and not self._held

    def unsent(self) -> list[tuple[bytes, int]]:
        """What would be lost if the connection ended now: chunks, and how much of each has gone."""
        left = self._pipe.backlog_bytes() if self._stalled else 0
        parts: list[tuple[bytes, int]] = []
        for chunk in reversed(self._handed):
            if left <= 0:
                break
            parts.append((chunk, max(0, len(chunk) - left)))
            left -= len(chunk)
        return parts[::-1] + [(chunk, 0) for chunk in self._held]

    def _written(self, chunks: list[bytes]) -> None:
        """Remembers what was written if the socket did not take all of it."""
        if not self._stalled:
            return
        self._handed = chunks
        self._handed_bytes = self._pipe.backlog_bytes()
        self._check_marks()

    def _gather(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= WORTH_A_WRITE_BYTES:
            self.flush()
        elif not self._gathering:
            self._gathering = True
            self._turn.gather(self)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        self._check_marks()

    def _check_marks(self) -> None:
        owed = self._held_bytes + self._handed_bytes
        if owed > self._max_bytes:
            self._owner.on_overflow(self)
        elif owed > self._high_water and not self.full:
            self.full = True
            self._owner.on_filled(self)
