"""A ROUTER socket as a listener of the bus: bound, drained from the loop, closed.

The socket's descriptor becomes readable only when the state of the socket changes. So the
listener drains it until it is empty, at most TURN_MESSAGES and TURN_S per turn, and checks it
again after each send. Messages are complete. The session gets them one by one, and then
`on_turn_end`, so that it can commit the requests of a turn together.
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

from polybus.dialects.pirate import codec
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


class RouterSession(Protocol):
    """The dialect behind a ROUTER: one session for all its peers."""

    def receive(self, peer: RouterConnection, frames: list[bytes]) -> None:
        """Handle one message, which begins with its envelope."""

    def on_turn_end(self) -> None:
        """All messages of this turn were handled."""

    @property
    def unanswered(self) -> int:
        """Number of requests without a reply."""


TURN_MESSAGES: Final = 256
# The first message of a connection costs some twenty times as much as a later one, so a turn is
# bounded in time, too: it is looked at after each SLICE_MESSAGES.
TURN_S: Final = 0.004
SLICE_MESSAGES: Final = 8
SLICE_EVENTS: Final = 16  # of the monitor
# Large messages end a turn sooner: they take memory, and time from all other connections.
TURN_BYTES: Final = 8 << 20
# A frame one byte over the largest message is read and refused. A larger one ends the connection.
MAX_FRAME_BYTES: Final = codec.MAX_MESSAGE_BYTES + 1
# Complete messages of one connection in libzmq's queue. libzmq counts no bytes and a message may
# have 64 MiB: with two, three pushing peers took half a gigabyte more. A peer that sends more is
# not read until then, which clients that wait for their replies do not notice.
RECEIVE_HWM: Final = 1
# With CURVE libzmq queues the peer's User-Id as a message that is counted when it arrives and
# not when it is read. With room for one alone, no message could ever follow it.
COUNTED_USER_ID: Final = 1
# Frames of one message: the most that a body, its head and its envelope may have, and one more,
# by which the session detects a message with too many.
MAX_FRAMES: Final = codec.MAX_BODY_FRAMES + codec.HEAD_FRAMES + codec.MAX_ENVELOPE_FRAMES + 1 + 1
COPIED_BYTES: Final = 64 << 10  # larger replies are sent without a copy
SETTLE_S: Final = 0.01
EVENTS: Final = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = Struct("=Hi")


@dataclass(frozen=True, slots=True)
class CurveSettings:
    """The secret key of the bus (Z85), and callbacks that identify and check client keys."""

    secret: bytes
    identify: Callable[[bytes], Identity]
    is_allowed: Callable[[bytes], bool]


class RouterListener:
    """`count(family, reason)` counts drops; `curve` is None on a listener without CURVE."""

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
        self._clock = clock
        self._count = count
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._socket = socket = context.socket(zmq.ROUTER)
        self._curve = curve
        configure(socket, address, curve)
        self.connections = RouterConnections(gate, self._read_monitor, clock, self._attach)
        self._watch = MemoryWatch(
            self.connections.open, bounds, clock, self._has_waiting, self._cut
        )
        self._monitor = socket.get_monitor_socket(EVENTS)
        try:
            self.address = _bind(socket, address)
        except BaseException:
            socket.disable_monitor()
            self._monitor.close(0)  # the context terminates only after all its sockets are closed
            socket.close(0)
            raise
        self._router = Router(_zmq.__file__, socket.underlying)
        self._loop.add_reader(socket.FD, self._read)
        self._loop.add_reader(self._monitor.FD, self._on_monitor_event)
        self._reading = True
        self._is_read_scheduled = False
        self._schedule_read()
        self._memory_timer: asyncio.TimerHandle | None = None  # None without connections

    # --- receiving

    def _read(self) -> None:
        self._is_read_scheduled = False
        if not self._reading:
            return
        # Taken before receiving: if the socket is then found empty, all messages of their
        # predecessors were read.
        in_doubt = self.connections.ambiguous()
        is_empty, received, left_bytes = False, 0, TURN_BYTES
        end_s = self._clock() + TURN_S
        # After a flood of connections there are events for several turns. Messages wait for them,
        # because the connections of messages must be known.
        while self.connections.read_some_events():
            if self._clock() > end_s:
                self._schedule_read()
                return
        while not is_empty and received < TURN_MESSAGES and left_bytes > 0:
            messages = self._router.receive(
                SLICE_MESSAGES, left_bytes, MAX_FRAMES, self._curve is not None
            )
            self._receive(messages)
            is_empty = not messages
            received += len(messages)
            left_bytes -= sum(size for _, _, size, _ in messages)
            if self._clock() > end_s:
                break
        if received:  # there may be more
            self._schedule_read()
        elif in_doubt:
            self.connections.resolve_ambiguous(in_doubt)
        self._session.on_turn_end()

    def _receive(self, messages: list[tuple[int, str | None, int, list[bytes]]]) -> None:
        find, receive = self.connections.find, self._session.receive
        for descriptor, user, size, frames in messages:
            connection = find(frames[0], descriptor)
            connection.received += 1
            connection.received_bytes += size
            if self._curve is not None and not self._authenticate(self._curve, connection, user):
                continue
            try:
                receive(connection, frames)
            except Exception as error:  # one message must not affect the others
                self._loop.call_exception_handler({"message": "pirate", "exception": error})

    def _authenticate(
        self, curve: CurveSettings, connection: RouterConnection, shown: str | None
    ) -> bool:
        """Return True if the key of a message is still allowed. libzmq has verified the key.

        It was allowed when the connection began. A connection has no identity before its first
        message.
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
        """Close the connections of revoked keys and update the names of the others."""
        for connection in self.connections.open():
            if self._curve is None or connection.key is None:
                continue
            if self._curve.is_allowed(connection.key):
                connection.identity = self._curve.identify(connection.key)
            else:
                self._cut_revoked(connection)

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
        if self._curve is None and connection.identity.is_in_doubt:
            self._count("in_doubt", "pirate")

    def _send(
        self, connection: RouterConnection, envelope: list[bytes], frames: list[bytes]
    ) -> None:
        if self._socket.closed:
            return
        size = self._router.send(envelope, frames, COPIED_BYTES)
        if not size:  # too large to be copied
            message = [*envelope, b"", *frames]
            try:
                self._socket.send_multipart(message, zmq.NOBLOCK, copy=False)
                size = sum(map(len, message))
            except zmq.ZMQError as error:
                size = -(error.errno or zmq.EAGAIN)
        if size < 0:
            self._count("dropped", "peer_slow" if size == -zmq.EAGAIN else "peer_gone")
            return
        connection.sent += 1
        connection.sent_bytes += size
        self._watch.add_sent(size)
        if not self._is_read_scheduled:  # a send may clear the descriptor's signal
            self._schedule_read()

    # --- connections

    def tick(self) -> None:
        if self._monitor.closed:  # drained, while other listeners still drain
            return
        self.connections.tick()
        self._on_monitor_event()

    def _on_monitor_event(self) -> None:
        # A few, so that a flood of connections does not delay others: `_read` reads all.
        if self.connections.read_some_events() or self.connections.ambiguous():
            self._schedule_read()
        if self._memory_timer is None and self.connections.open():
            self._watch.set_baseline()
            self._memory_timer = self._loop.call_later(CHECK_INTERVAL_S, self._check_memory)

    def _check_memory(self) -> None:
        self._memory_timer = None
        if self.connections.open():
            self._memory_timer = self._loop.call_later(self._watch.check(), self._check_memory)

    def _has_waiting(self) -> bool:
        events: Any = self._socket.EVENTS
        if not events & zmq.POLLIN:
            return False
        self._schedule_read()  # reading EVENTS clears the descriptor's signal
        return True

    def _cut(self, connection: RouterConnection, reason: str) -> None:
        self._count("closed", reason)
        self._log.warning(
            "connection cut", dialect="pirate", peer=connection.peer_text, reason=reason
        )

    def _read_monitor(self) -> list[tuple[int, bool]]:
        events: list[tuple[int, bool]] = []
        while len(events) < SLICE_EVENTS:
            try:
                event = self._monitor.recv(zmq.NOBLOCK)
            except zmq.Again:
                return events
            self._monitor.recv(zmq.NOBLOCK)  # the address of this socket
            kind, fd = _EVENT.unpack(event)
            if kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
                events.append((fd, kind == zmq.EVENT_ACCEPTED))
        return events

    # --- the end

    def close(self) -> None:
        """Stop receiving. Received requests are still answered."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.FD)
            endpoint: Any = self._socket.last_endpoint
            self._socket.unbind(endpoint)

    async def drain(self, timeout_s: float) -> None:
        """Wait until all requests are answered and sent, at most `timeout_s`, and close."""
        self.close()
        if self._socket.closed:
            return
        end_s = self._loop.time() + timeout_s
        # A session has no loop to notify, so it is polled.
        while self._session.unanswered and self._loop.time() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_S)
        if self._memory_timer is not None:
            self._memory_timer.cancel()
        self._loop.remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self.connections.close()
        left_ms = max(0.0, min(1.0, end_s - self._loop.time())) * 1000
        self._socket.close(int(left_ms))


def configure(
    socket: zmq.Socket[bytes], address: Address, curve: CurveSettings | None = None
) -> None:
    socket.ROUTER_MANDATORY = 1  # a reply to a closed connection is an error, and so is counted
    socket.MAXMSGSIZE = MAX_FRAME_BYTES
    socket.RCVHWM = RECEIVE_HWM
    socket.IPV6 = ":" in address.host
    socket.TCP_KEEPALIVE = 1
    socket.TCP_KEEPALIVE_IDLE = 60
    socket.TCP_KEEPALIVE_INTVL = 10
    socket.BACKLOG = 1024
    if curve is not None:
        socket.CURVE_SERVER = 1
        socket.CURVE_SECRETKEY = curve.secret
        socket.ZAP_DOMAIN = DOMAIN.encode()
        socket.ZAP_ENFORCE_DOMAIN = 1  # without a ZAP handler every connection is refused
        socket.MAXMSGSIZE = MAX_FRAME_BYTES + codec.SEALED_BYTES
        socket.RCVHWM = RECEIVE_HWM + COUNTED_USER_ID


def _bind(socket: zmq.Socket[bytes], address: Address) -> Address:
    host = f"[{address.host}]" if ":" in address.host else address.host
    tcp_endpoint = f"tcp://{host}:{address.port or '*'}"  # *: any free port
    try:
        socket.bind(str(address) if address.is_unix else tcp_endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{address} is in use by another listener") from None
        raise AddressError(f"cannot listen on {address}: {error.strerror}") from None
    if address.is_unix:
        return address
    bound: Any = socket.last_endpoint
    return address.with_port(int(bound.decode().rpartition(":")[2]))
