"""A ROUTER socket as one of the bus's listeners: bound, drained from the loop, closed.

The socket's descriptor becomes readable when its state changes, and only then: so it is
drained until nothing is left, at most so many messages a turn, and looked at again
after anything was sent. Messages come whole; one turn's are handed over one by one, and
then the session is told that the turn is over, so that it can put together what belongs
together.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any, Final, Protocol

import zmq
from zmq.backend.cython import _zmq

from polybus.dialects.pirate.server.router_socket import Router
from polybus.errors import AddressError, AddressInUse
from polybus.model.address import Address
from polybus.model.identity import Identity
from polybus.transports.zmq.memory_watch import CHECK_INTERVAL_S, MemoryBounds, MemoryWatch
from polybus.transports.zmq.router_connections import (
    ConnectionGate,
    RouterConnection,
    RouterConnections,
)
from polybus.transports.zmq.zap import DOMAIN

# DOC What a ROUTER's session and transport know of each other: nothing but these.


class RouterSessionPeer(Protocol):
    """One connection, as its messages tell."""

    @property
    def identity(self) -> Identity: ...

    @property
    def key(self) -> bytes | None:
        """The CURVE key that it has shown, its 32 bytes."""

    def is_full(self) -> bool:
        """Does it leave too much of what it was sent?"""

    def send(self, envelope: list[bytes], frames: list[bytes]) -> None:
        """An answer: the envelope of the request, an empty frame, and these."""


class RouterSession(Protocol):
    """The dialect behind a ROUTER: one for all its peers."""

    def receive(self, peer: RouterSessionPeer, frames: list[bytes]) -> None:
        """One message, its envelope first."""

    def on_turn_end(self) -> None:
        """All that had come by now was received."""

    @property
    def unanswered(self) -> int:
        """Requests that wait for the disk."""


TURN_MESSAGES: Final = 256
# With large ones a turn is over sooner: what it takes is memory, and time that all others wait.
TURN_BYTES: Final = 8 << 20
# One frame over what a body's may have is still read, and answered; a larger one is cut.
MAX_FRAME_BYTES: Final = (64 << 20) + 1
CURVE_OVERHEAD_BYTES: Final = 33  # with CURVE each frame has so many more, and they count
# Whole messages of one connection that wait to be read. One, since libzmq counts no bytes, and
# one may have 64 MiB: with two, three peers that push took half a gigabyte more. Whoever sends
# more is not read from meanwhile; clients that wait for their answers do not notice.
RECEIVE_HWM: Final = 1
# With CURVE libzmq puts the peer's User-Id before its messages, as one that is counted when it
# comes and not when it is taken: with room for one alone, nothing would ever follow it.
COUNTED_USER_ID: Final = 1
# Frames of one message: what a body may have at most, with its head and its envelope, and one
# more, by which the session knows that there were too many.
MAX_FRAMES: Final = 4096 + 6 + 65 + 1
COPIED_BYTES: Final = 64 << 10  # larger answers are not copied on the loop
SETTLE_S: Final = 0.01
EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = Struct("=Hi")


@dataclass(frozen=True, slots=True)
class CurveSettings:
    """The bus's secret key (Z85), whom keys are, and whether they may come in."""

    secret: bytes
    identify: Callable[[bytes], Identity]
    is_allowed: Callable[[bytes], bool]


class RouterListener:
    """`count(family, reason)` books what is dropped; `curve` is how keys are asked for."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: Address,
        session: RouterSession,
        gate: ConnectionGate,
        bounds: MemoryBounds,
        clock: Callable[[], float],
        count: Callable[[str, str], None],
        log: Any,
        curve: CurveSettings | None = None,
    ) -> None:
        self._session = session
        self._count = count
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._socket = socket = context.socket(zmq.ROUTER)
        configure(socket, address)
        self._curve = curve
        if curve is not None:
            configure_curve(socket, curve.secret)
        self.connections = RouterConnections(gate, self._read_monitor, clock, self._attach)
        self._watch = MemoryWatch(
            self.connections.open, bounds, clock, self._has_waiting, self._cut
        )
        self._monitor = socket.get_monitor_socket(EVENTS)
        try:
            self.address = _bind(socket, address)
        except BaseException:
            socket.disable_monitor()
            self._monitor.close(0)  # the context ends when all its sockets have
            socket.close(0)
            raise
        self._router = Router(_zmq.__file__, socket.underlying)
        self._loop.add_reader(socket.FD, self._read)
        self._loop.add_reader(self._monitor.FD, self._on_monitor_event)
        self._reading = True
        self._is_read_scheduled = False  # to be looked at again, by the next turn
        self._schedule_read()
        self._memory_timer = self._loop.call_later(CHECK_INTERVAL_S, self._check_memory)

    # --- receiving

    def _read(self) -> None:
        self._is_read_scheduled = False
        if not self._reading:
            return
        in_doubt = self.connections.ambiguous()
        messages = self._router.receive(
            TURN_MESSAGES, TURN_BYTES, MAX_FRAMES, self._curve is not None
        )
        find, receive = self.connections.find, self._session.receive
        for descriptor, user, size, frames in messages:
            connection = find(frames[0], descriptor)
            connection.received += 1
            connection.received_bytes += size
            if self._curve is not None and not self._authenticate(self._curve, connection, user):
                continue
            try:
                receive(connection, frames)
            except Exception as error:  # one message's trouble is not the others'
                self._loop.call_exception_handler({"message": "pirate", "exception": error})
        if messages:  # there may be more
            self._schedule_read()
        elif in_doubt:
            self.connections.resolve_ambiguous(in_doubt)
        self._session.on_turn_end()

    def _authenticate(
        self, curve: CurveSettings, connection: RouterConnection, shown: str | None
    ) -> bool:
        """Whether the key with which a message came is let in now; libzmq vouches for the key.

        It was when the connection began. One that had sent nothing until then was nobody's.
        """
        key = bytes.fromhex(shown or "")
        if connection.key != key:
            connection.key, connection.identity = key, curve.identify(key)
        if curve.is_allowed(key):
            return True
        self._count("dropped", "key_revoked")
        self._cut_revoked(connection)
        return False

    def enforce(self) -> None:
        """Ends the connections of keys that are no longer let in; others may have a new name."""
        for one in self.connections.open():
            if self._curve is None or one.key is None:
                continue
            if self._curve.is_allowed(one.key):
                one.identity = self._curve.identify(one.key)
            else:
                self._cut_revoked(one)

    def _cut_revoked(self, connection: RouterConnection) -> None:
        if connection.cut():
            self._cut(connection, "key_revoked")

    def _schedule_read(self) -> None:
        if not self._is_read_scheduled and self._reading:
            self._is_read_scheduled = True
            self._loop.call_soon(self._read)

    # --- sending

    def _attach(self, connection: RouterConnection) -> None:
        connection.send = partial(self._send, connection)
        connection.is_full = partial(self._watch.is_full, connection)

    def _send(
        self, connection: RouterConnection, envelope: list[bytes], frames: list[bytes]
    ) -> None:
        if self._socket.closed:
            return
        size = self._router.send(envelope, frames, COPIED_BYTES)
        if not size:
            size = self._send_large([*envelope, b"", *frames])
        if size < 0:
            self._count("dropped", "peer_slow" if size == -zmq.EAGAIN else "peer_gone")
            return
        connection.sent += 1
        connection.sent_bytes += size
        self._watch.add_sent(size)
        if not self._is_read_scheduled:
            self._schedule_read()

    def _send_large(self, frames: list[bytes]) -> int:
        """Without copying what is large; its size, or below 0 why it was refused."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            return -(error.errno or zmq.EAGAIN)
        return sum(map(len, frames))

    # --- connections

    def tick(self) -> None:
        self.connections.tick()
        self._on_monitor_event()

    def _on_monitor_event(self) -> None:
        self.connections.read_events()
        if self.connections.ambiguous():
            self._schedule_read()

    def _check_memory(self) -> None:
        self._memory_timer = self._loop.call_later(self._watch.check(), self._check_memory)

    def _has_waiting(self) -> bool:
        events: Any = self._socket.EVENTS
        if not events & zmq.POLLIN:
            return False
        self._schedule_read()  # whoever asks takes the descriptor's signal: it will not come again
        return True

    def _cut(self, connection: RouterConnection, reason: str) -> None:
        self._count("closed", reason)
        self._log.warning(
            "connection cut", dialect="pirate", peer=connection.peer_text, reason=reason
        )

    def _read_monitor(self) -> list[tuple[int, bool]]:
        told: list[tuple[int, bool]] = []
        while True:
            try:
                event = self._monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return told
            self._monitor.recv(zmq.NOBLOCK)  # the address, which is our own
            kind, fd = _EVENT.unpack(event)
            if kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
                told.append((fd, kind == zmq.EVENT_ACCEPTED))

    # --- the end

    def close(self) -> None:
        """Takes nothing more; what was taken is still answered."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.FD)
            endpoint: Any = self._socket.last_endpoint
            self._socket.unbind(endpoint)

    async def drain(self, timeout_s: float) -> None:
        """Waits until nobody is owed an answer, gives them a moment to leave, and ends all."""
        self.close()
        if self._socket.closed:
            return
        end_s = self._loop.time() + timeout_s
        # A session knows no loop, so it is asked a few times.
        while self._session.unanswered and self._loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_S)
        self._memory_timer.cancel()
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self.connections.close()
        left_ms = max(0.0, min(1.0, end_s - self._loop.time())) * 1000
        self._socket.close(int(left_ms))


def configure(socket: zmq.Socket[bytes], address: Address) -> None:
    socket.ROUTER_MANDATORY = 1  # to know what is dropped
    socket.MAXMSGSIZE = MAX_FRAME_BYTES
    socket.RCVHWM = RECEIVE_HWM
    socket.IPV6 = ":" in address.host
    socket.TCP_KEEPALIVE = 1
    socket.TCP_KEEPALIVE_IDLE = 60
    socket.TCP_KEEPALIVE_INTVL = 10
    socket.BACKLOG = 1024


def configure_curve(socket: zmq.Socket[bytes], secret: bytes) -> None:
    socket.CURVE_SERVER = 1
    socket.CURVE_SECRETKEY = secret
    socket.ZAP_DOMAIN = DOMAIN.encode()
    socket.ZAP_ENFORCE_DOMAIN = 1  # if nobody is there to be asked, nobody comes in
    socket.MAXMSGSIZE = MAX_FRAME_BYTES + CURVE_OVERHEAD_BYTES
    socket.RCVHWM = RECEIVE_HWM + COUNTED_USER_ID


def _bind(socket: zmq.Socket[bytes], address: Address) -> Address:
    try:
        socket.bind(str(address) if address.is_unix else _endpoint(address))
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address}: something else listens there already") from None
        raise AddressError(f"{address}: cannot be listened on: {error.strerror}") from None
    if address.is_unix:
        return address
    bound: Any = socket.last_endpoint
    return address.with_port(int(bound.decode().rpartition(":")[2]))


def _endpoint(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"tcp://{host}:{address.port or '*'}"
