"""One stream connection: a transport (the pump's or asyncio's) and a session.

`State` and `_NEXT_STATE` are the life of a connection:

    ACCEPTED ─▶ (HANDSHAKE) ─▶ READING ──pause──▶ PAUSED
                                  ▲ ▲               │ resume
                                  │ └─ REDELIVERING ◀┘
    this side closes: ─▶ CLOSING ─▶ ENDED      the peer closes: ─▶ BROKEN ─▶ ENDED
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, cast

from polybus.kernel.outbox import SocketOutput
from polybus.kernel.pump import SocketTransport
from polybus.kernel.receive_buffer import ReceiveBuffer, SharedBuffer
from polybus.model.unfinished_frame import UnfinishedFrame
from polybus.transports.peer_identity import describe_peer, identify_peer, keep_alive, unsent_bytes

if TYPE_CHECKING:
    from polybus.kernel.fanout import PlainRoute
    from polybus.model.identity import Identity
    from polybus.transports.hangup_monitor import HangupMonitor
    from polybus.transports.stream_session import StreamSession

# Of an unfinished frame: more than the header of any dialect.
HEAD_BYTES = 64
STOPPED = "the client sends slowly, or has stopped within a frame"
# A closing connection sends its remaining bytes within this time; then it is aborted.
LINGER_S = 5.0


class State(IntEnum):
    ACCEPTED = 0  # no session; with TLS, the peer has not sent a byte
    HANDSHAKE = 1  # TLS only: the peer has sent bytes, there is no session yet
    READING = 2
    PAUSED = 3  # the session has stopped reading
    REDELIVERING = 4  # the session resumed: it gets the held bytes before the socket is read
    CLOSING = 5  # this side has closed the connection; written bytes still go out
    BROKEN = 6  # the peer has closed; the socket may hold bytes that it sent before
    ENDED = 7


class Event(IntEnum):
    BEGIN_HANDSHAKE = 0
    OPEN = 1
    PAUSE = 2
    RESUME = 3
    REDELIVERED = 4
    CLOSE = 5  # also: abort
    LOST = 6  # the event loop reports the end of the connection
    DRAIN = 7  # the last read of the socket, or the end of the time for it


# States in which the session may read and write.
OPEN_STATES = frozenset({State.READING, State.PAUSED, State.REDELIVERING})
_LIVE_STATES = (State.ACCEPTED, State.HANDSHAKE, *OPEN_STATES)

_NEXT_STATE: dict[tuple[State, Event], State] = {
    (State.ACCEPTED, Event.BEGIN_HANDSHAKE): State.HANDSHAKE,
    (State.ACCEPTED, Event.OPEN): State.READING,
    (State.HANDSHAKE, Event.OPEN): State.READING,
    (State.READING, Event.PAUSE): State.PAUSED,
    (State.PAUSED, Event.RESUME): State.REDELIVERING,
    (State.REDELIVERING, Event.PAUSE): State.PAUSED,
    (State.REDELIVERING, Event.REDELIVERED): State.READING,
    **{(state, Event.CLOSE): State.CLOSING for state in _LIVE_STATES},
    **{(state, Event.LOST): State.BROKEN for state in _LIVE_STATES},
    (State.CLOSING, Event.LOST): State.ENDED,
    (State.BROKEN, Event.DRAIN): State.ENDED,
}


class Slot(IntEnum):
    """The connection's place among those that the listener counts."""

    NONE = 0
    COUNTED = 1
    RETAINED = 2  # the connection has ended, but its session has not finished


class StreamConnection(ReceiveBuffer, asyncio.BufferedProtocol):
    """Connects a session to a socket. The listener counts connections by `admit` and `lost`.

    The receive methods of the protocol are those of `ReceiveBuffer`, compiled.
    """

    peer: str
    identity: Identity
    is_unix: bool
    output: SocketOutput | None = None
    write: Callable[[bytes], None]
    has_failed: Callable[[], bool]
    _transport: asyncio.Transport | SocketTransport

    def __init__(
        self,
        open_session: Callable[[StreamConnection], StreamSession],
        shared: SharedBuffer,
        admit: Callable[[StreamConnection], bool],
        lost: Callable[[StreamConnection], None],
        hangups: HangupMonitor | None = None,
    ) -> None:
        super().__init__(shared)
        self._open_session = open_session
        self._admit = admit
        self._on_lost = lost
        self._hangups = hangups
        self._session: StreamSession | None = None
        self._state = State.ACCEPTED
        self._slot = Slot.NONE
        self._watched: int | None = None  # the descriptor in the hang-up monitor
        self._linger: asyncio.TimerHandle | None = None

    def _apply(self, event: Event) -> bool:
        """Change the state. Returns False if the event changes nothing in this state."""
        state = _NEXT_STATE.get((self._state, event))
        if state is None:
            return False
        self._state = state
        return True

    # --- called by the session (bus.connection.ConnectionIO)

    @property
    def certificate_digest(self) -> bytes:
        """The SHA-256 of the certificate of the end that was dialled; empty without TLS."""
        return b""

    def write_many(self, chunks: list[bytes]) -> None:
        self._transport.writelines(chunks)

    def backlog_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def unconfirmed_bytes(self) -> int:
        return unsent_bytes(self._transport.get_extra_info("socket"))

    def pause_reading(self) -> None:
        # In REDELIVERING the transport is still paused.
        must_pause = self._state is State.READING
        self._apply(Event.PAUSE)
        if must_pause:
            self._transport.pause_reading()

    def use_plain_route(self, route: PlainRoute) -> None:
        super().use_plain_route(route)
        if isinstance(self.output, SocketTransport):
            self.output.use_plain_route(route)

    def watch_hangup(self, hung_up: Callable[[], None]) -> None:
        if self._hangups is not None and self._watched is None and self._state in OPEN_STATES:
            self._watched = self._transport.get_extra_info("socket").fileno()
            self._hangups.watch(self._watched, hung_up)

    def resume_reading(self) -> None:
        if not self._apply(Event.RESUME):
            return
        self._stop_watching()
        self.redeliver_held()
        # Not if the session has paused or closed the connection during the delivery.
        if self._apply(Event.REDELIVERED):
            self._transport.resume_reading()

    def _stop_watching(self) -> None:
        if self._hangups is not None and self._watched is not None:
            self._hangups.forget(self._watched)
            self._watched = None

    def redeliver(self) -> None:
        if self._session is not None:
            self.redeliver_held()
        if self._apply(Event.DRAIN):
            self._read_rest()

    def retain_slot(self) -> None:
        # Not after an abort has freed it: the listener would count the connection down twice.
        if self._slot is Slot.COUNTED:
            self._slot = Slot.RETAINED

    def release_slot(self) -> None:
        if self._slot is Slot.RETAINED:
            self._free_slot()

    def close(self) -> None:
        if self._apply(Event.CLOSE):
            self._stop_watching()
            self._transport.close()
            # A peer that does not read would keep the connection open forever.
            self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def abort(self) -> None:
        self._apply(Event.CLOSE)
        self._stop_watching()
        self._transport.abort()
        # A stopping bus aborts sessions that have not finished; nothing else frees their slots.
        self.release_slot()

    # --- called by the monitor of unfinished frames

    @property
    def awaits_more(self) -> bool:
        """True if the session has left bytes unread that must be the start of a frame."""
        return self._state is State.READING and self.held_bytes > 0

    def describe_unfinished(self) -> UnfinishedFrame | None:
        """Describe the frame that has begun. Returns None if the session does not wait for it."""
        describe = getattr(self._session, "describe_unfinished", None)
        if describe is None:  # of a session that stops reading whenever it does not wait
            return UnfinishedFrame(None, STOPPED)
        described: UnfinishedFrame | None = describe(self.held_head(HEAD_BYTES), self.held_bytes)
        return described

    # --- called by the listener

    def identify_and_admit(self, sock: socket.socket) -> bool:
        """Identify the peer of an accepted socket. Returns False if a limit is reached."""
        try:
            peername = sock.getpeername()
        except OSError:  # the peer has hung up
            peername = None
        # Here and not later: the kernel forgets the user of a peer that hangs up.
        self.identity = identify_peer(sock, peername)
        self.is_unix = sock.family == socket.AF_UNIX
        self.peer = describe_peer(peername, self.identity)
        if not self._admit(self):
            return False
        self._slot = Slot.COUNTED
        return True

    def discard(self) -> None:
        """Free the place of an admitted connection that gets no transport."""
        if self._slot is Slot.COUNTED:
            self._free_slot()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._attach(transport)
        self._open()

    def pause_writing(self) -> None:
        if self._session is not None:
            self._session.on_stalled()

    def resume_writing(self) -> None:
        if self._session is not None:
            self._session.on_writable()

    def eof_received(self) -> bool:
        session = self._session
        return session is not None and self._state in OPEN_STATES and session.on_half_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._apply(Event.LOST)
        self._stop_watching()
        if self._linger is not None:
            self._linger.cancel()
        if self._session is not None:
            self._session.on_ended()
        # The session has read the rest within `on_ended`, or never: the descriptor may be
        # that of another connection soon.
        self._apply(Event.DRAIN)
        self.discard()

    def _free_slot(self) -> None:
        self._slot = Slot.NONE
        self._on_lost(self)

    def _attach(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport | SocketTransport", transport)
        sock = transport.get_extra_info("socket")
        self.has_failed = transport.is_closing
        # Bound once, because an answer to one request is one call of it.
        self.write = self._transport.write
        if isinstance(transport, SocketOutput):
            self.output = transport
        keep_alive(sock)

    def _open(self) -> None:
        # High-water mark 0: no second queue below the outbox, so the session notices every stall.
        self._transport.set_write_buffer_limits(high=0)
        # Before the session exists: it may pause or close the connection while it is made.
        self._apply(Event.OPEN)
        try:
            self._session = self._open_session(self)
        except BaseException:
            self.abort()
            raise
        self.receive = self._session.receive

    def _read_rest(self) -> None:
        """Read the bytes that the peer sent before a write found the connection broken."""
        descriptor = self._transport.get_extra_info("socket").fileno()
        try:
            while count := os.readv(descriptor, [self.get_buffer()]):
                self.buffer_updated(count)
        except OSError:
            pass  # everything has been read
