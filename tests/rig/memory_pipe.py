"""A connection in memory, for testing sessions and the bus without sockets.

The far end has an *appetite*: the number of bytes it still takes. At 0, written bytes are
the pipe's backlog. The session gets the notifications of a transport: `on_stalled` when a
write leaves a backlog, `on_writable` when the backlog is empty again.

    pipe = MemoryPipe()                  # takes everything
    session = dialect(pipe)
    pipe.attach(session)
    pipe.deliver(subscribe(b"t"))        # the far end sends
    pipe.appetite = 0                    # the far end stops reading
    pipe.eat(100)                        # and takes 100 bytes more
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from polybus.model.identity import ANONYMOUS, Identity

if TYPE_CHECKING:
    from polybus.transports.stream_session import StreamSession


class MemoryPipe:
    is_unix = False
    certificate_digest = b""
    output = None

    def __init__(
        self, peer: str = "memory", appetite: int | None = None, identity: Identity = ANONYMOUS
    ) -> None:
        self.peer = peer
        self.identity = identity
        self.appetite = appetite  # None: takes all that comes
        self.in_host = 0  # taken bytes that the far end's kernel has not confirmed
        self.taken = bytearray()  # by the far end
        self.writes: list[list[bytes]] = []  # each call, as it was made
        self.reading = True
        self.closed = False
        self.aborted = False
        self.broken = False  # the far end is gone, and only a write would find out
        self.keeps_place = False  # the far end is gone, and the session not done
        self._backlog = bytearray()
        self._stalled = False
        self._unread = b""
        self._session: StreamSession | None = None

    def attach(self, session: StreamSession) -> None:
        """Send later notifications of the transport to `session`."""
        self._session = session

    @property
    def session(self) -> StreamSession | None:
        return self._session

    # --- the session's side: bus.connection.ConnectionIO

    def write(self, data: bytes) -> None:
        self.write_many([data])

    def write_many(self, chunks: list[bytes]) -> None:
        if self.closed or self.aborted or self.broken:
            return
        self.writes.append(list(chunks))
        self._backlog += b"".join(chunks)
        self._pass_on()

    def backlog_bytes(self) -> int:
        return len(self._backlog)

    def unconfirmed_bytes(self) -> int:
        return self.in_host

    def use_plain_route(self, route: object) -> None:
        """Do nothing: the session gets all bytes."""

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        if self.closed or self.aborted:
            return
        self.reading = True
        self._offer()

    def watch_hangup(self, hung_up: Callable[[], None]) -> None:
        self.hung_up = hung_up

    def redeliver(self) -> None:
        self._offer()

    def has_failed(self) -> bool:
        return self.broken

    def retain_slot(self) -> None:
        self.keeps_place = True

    def release_slot(self) -> None:
        self.keeps_place = False

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    # --- the far end's side

    def deliver(self, data: bytes) -> None:
        """Send bytes to the session. They stay pending while it is not reading."""
        self._unread += data
        if self.reading and not self.closed and not self.aborted:
            self._offer()

    def eat(self, count: int | None = None) -> None:
        """Take `count` more bytes, or all present and later ones."""
        self.appetite = None if count is None else (self.appetite or 0) + count
        if self.aborted:  # the backlog is lost
            return
        self._pass_on()
        if self._stalled and not self._backlog:
            self._stalled = False
            self._notify("on_writable")

    def shut_down(self) -> None:
        """Close the sending side of the far end."""
        if self._session is not None and not self.closed:
            self._session.on_half_closed()

    def hang_up(self) -> None:
        """End the connection, and discard its backlog."""
        self._notify("on_ended")
        self._backlog.clear()

    @property
    def unread(self) -> int:
        """Bytes sent that the session has not taken."""
        return len(self._unread)

    def _offer(self) -> None:
        if self._session is None:
            return
        data = self._unread
        taken = self._session.receive(data, 0, len(data))
        self._unread = data[taken:]

    def _pass_on(self) -> None:
        count = len(self._backlog) if self.appetite is None else self.appetite
        moved = self._backlog[:count]
        del self._backlog[:count]
        self.taken += moved
        if self.appetite is not None:
            self.appetite -= len(moved)
        if self._backlog and not self._stalled:
            self._stalled = True
            self._notify("on_stalled")

    def _notify(self, event: str) -> None:
        if self._session is not None:
            getattr(self._session, event)()
