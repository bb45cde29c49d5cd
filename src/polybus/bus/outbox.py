"""The output of one reader: a bounded queue before its socket.

An outbox is in one of three states:

    open      the socket accepts output
    stalled   the socket is full: output is held here
    full      held output exceeds the high-water mark: publishers wait

The first write of a loop turn goes straight to the socket, which keeps the latency of a
single message low. Later writes of the same turn are gathered and sent at its end in one
system call, unless they grow large enough for a call of their own. With fifty publishers
that is one write per turn instead of fifty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polybus.bus.connection import Connection, ConnectionIO

# Beyond this size, gathering more before the write saves nothing.
WORTH_A_WRITE_BYTES = 32 * 1024


class LoopTurn:
    """One turn of the event loop, shared by all outboxes of a bus."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self.number = 1
        self.call_soon = call_soon
        self._open = False
        self._gathered: list[Outbox] = []

    def touch(self) -> None:
        """Schedule the end of the turn, after all callbacks that are ready."""
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
    """Receiver of the events of an outbox: full, room again, over its bound."""

    def on_filled(self, outbox: Outbox) -> None: ...
    def on_room(self, outbox: Outbox) -> None: ...
    def on_overflow(self, outbox: Outbox) -> None: ...


class Outbox:
    connection: Connection  # set by the broker when the connection joins

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
        self.waiters: dict[Connection, None] = {}  # blocked publishers, in order
        self.window_start_s = 0.0  # of the slow-consumer rule
        self.window_taken = 0

    def push(self, data: bytes) -> None:
        """Queue bytes for the reader; the first of a turn are written at once."""
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
        """Write all held bytes to the socket in one call."""
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
        """Accept no more bytes. Held bytes are sent if `send_held`, else dropped."""
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
        """Handle a full socket."""
        self._stalled = True

    def on_writable(self) -> None:
        """Handle a socket that has accepted all output."""
        self._stalled = False
        self._handed = []
        self._handed_bytes = 0
        self.flush()
        if self.full and not self._closed and self.backlog() <= self._low_water:
            self.full = False
            self._owner.on_room(self)

    def backlog(self) -> int:
        """Return the bytes that the reader has not taken yet."""
        return self._held_bytes + (self._pipe.backlog_bytes() if self._stalled else 0)

    def taken(self) -> int:
        """Return the total of bytes that have reached the reader's host.

        Bytes in the kernel's send queue are not counted: the queue may hold megabytes, and
        while a slow reader drains it the socket accepts no more.
        """
        return self._pushed_bytes - self.backlog() - self._pipe.unconfirmed_bytes()

    def is_idle(self) -> bool:
        return not self._stalled and not self._held

    def unsent(self) -> list[tuple[bytes, int]]:
        """Return the chunks that are not sent yet, each with the number of its sent bytes."""
        left = self._pipe.backlog_bytes() if self._stalled else 0
        parts: list[tuple[bytes, int]] = []
        for chunk in reversed(self._handed):
            if left <= 0:
                break
            parts.append((chunk, max(0, len(chunk) - left)))
            left -= len(chunk)
        return parts[::-1] + [(chunk, 0) for chunk in self._held]

    def _written(self, chunks: list[bytes]) -> None:
        """Keep the written chunks if the socket did not accept all of them."""
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
