"""One stream connection: asyncio's protocol on one side, a session on the other."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from polybus.kernel.receive_buffer import ReceiveBuffer, SharedBuffer
from polybus.kernel.socket_writer import SocketWriter
from polybus.transports.peer_identity import describe_peer, identify_peer, keep_alive, unsent_bytes

if TYPE_CHECKING:
    from polybus.model.identity import Identity
    from polybus.transports.hangup_monitor import HangupMonitor
    from polybus.transports.stream_session import StreamSession

# A closing connection sends its remaining bytes within this time; then it is aborted.
LINGER_S = 5.0


class StreamConnection(asyncio.BufferedProtocol):
    """Connects a session to a socket. The listener counts connections by `admit` and `lost`."""

    peer: str
    identity: Identity
    is_unix: bool
    hangups: HangupMonitor | None = None  # set by the listener
    _session: StreamSession
    _transport: asyncio.Transport

    def __init__(
        self,
        open_session: Callable[[StreamConnection], StreamSession],
        shared: SharedBuffer,
        admit: Callable[[StreamConnection], bool],
        lost: Callable[[StreamConnection], None],
    ) -> None:
        self._open_session = open_session
        self._inbox = ReceiveBuffer(shared)
        # Bound directly to the receive buffer: a client that waits for each answer pays for
        # every call in between.
        self.get_buffer = self._inbox.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = self._inbox.buffer_updated  # type: ignore[method-assign]
        self._admit = admit
        self._on_lost = lost
        self._admitted = False
        self._opened = False  # a session exists
        self._paused = False  # as the session requested
        self._reading = True  # as the transport was set
        self._closing = False
        self._broken = False  # the peer has closed; the socket may hold bytes sent before
        self._holds_slot = False  # the peer is gone, but the session has not finished
        self._watched: int | None = None  # the descriptor in the hang-up monitor
        self._linger: asyncio.TimerHandle | None = None

    # --- called by the session (bus.connection.Pipe)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def write_many(self, chunks: list[bytes]) -> None:
        self._transport.writelines(chunks)

    def backlog_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def unconfirmed_bytes(self) -> int:
        return unsent_bytes(self._transport.get_extra_info("socket"))

    def pause_reading(self) -> None:
        self._paused = True
        if self._reading and not self._closing:
            self._reading = False
            self._transport.pause_reading()

    def watch_hangup(self, hung_up: Callable[[], None]) -> None:
        if self.hangups is not None and self._watched is None and not self._closing:
            self._watched = self._transport.get_extra_info("socket").fileno()
            self.hangups.watch(self._watched, hung_up)

    def resume_reading(self) -> None:
        if not self._paused or self._closing:
            return
        self._stop_watching()
        self._paused = False
        self._offer_again()
        # The session may have paused or closed the connection during the delivery.
        if not self._paused and not self._closing:
            self._reading = True
            self._transport.resume_reading()

    def _stop_watching(self) -> None:
        if self.hangups is not None and self._watched is not None:
            self.hangups.forget(self._watched)
            self._watched = None

    def redeliver(self) -> None:
        if self._opened:
            self._offer_again()
        if self._broken:
            self._broken = False  # read once: the descriptor may be reused soon
            self._read_rest()

    def retain_slot(self) -> None:
        self._holds_slot = True

    def release_slot(self) -> None:
        if self._holds_slot:
            self._holds_slot = False
            self._on_lost(self)

    def has_failed(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._stop_watching()
        self._transport.close()
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def abort(self) -> None:
        self._closing = True
        self._stop_watching()
        self._transport.abort()
        self.release_slot()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._identify_and_admit(transport):
            descriptor = transport.get_extra_info("socket").fileno()
            self.write = SocketWriter(descriptor, self._transport).write  # type: ignore[method-assign]
            self.has_failed = self._transport.is_closing  # type: ignore[method-assign]
            self._open()

    def eof_received(self) -> bool:
        return self._opened and not self._closing and self._session.on_half_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._broken = not self._closing
        self._closing = True
        self._stop_watching()
        if self._linger is not None:
            self._linger.cancel()
        if self._opened:
            self._session.on_ended()
        if self._admitted and not self._holds_slot:
            self._on_lost(self)

    def _identify_and_admit(self, transport: asyncio.BaseTransport) -> bool:
        """Identify the peer. Returns False if the connection limit is reached."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        self.identity = identify_peer(sock)
        self.is_unix = sock.family == socket.AF_UNIX
        self.peer = describe_peer(transport.get_extra_info("peername"), self.identity)
        self._admitted = self._admit(self)
        if self._admitted:
            keep_alive(sock)
        else:
            self.abort()
        return self._admitted

    def _open(self) -> None:
        # High-water mark 0: no second queue below the outbox, so the session notices every stall.
        self._transport.set_write_buffer_limits(high=0)
        try:
            self._session = self._open_session(self)
        except BaseException:
            self.abort()
            raise
        self._opened = True
        self._inbox.receive = self._session.receive
        self.pause_writing = self._session.on_stalled  # type: ignore[method-assign]
        self.resume_writing = self._session.on_writable  # type: ignore[method-assign]

    def _offer_again(self) -> None:
        self._inbox.redeliver()

    def _read_rest(self) -> None:
        """Read the bytes that the peer sent before a write found the connection broken."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        try:
            while count := os.readv(descriptor, [self._inbox.get_buffer()]):
                self._inbox.buffer_updated(count)
        except OSError:
            pass  # everything has been read
