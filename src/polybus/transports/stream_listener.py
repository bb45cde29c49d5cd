"""Listeners for TCP, Unix sockets and TLS, with a limit of connections.

A `ConnectionLimit` counts connections for all listeners that share it. A connection over the
limit is closed right after it is accepted, which the peer notices at once. Not accepting it
would leave the peer without an answer and the backlog full.

The listener accepts connections itself and not through the event loop, which without a free
descriptor closes all that are pending; the listener has a reserve (`descriptor_reserve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from polybus.errors import AddressError, AddressInUse
from polybus.kernel.pump import Pump
from polybus.kernel.receive_buffer import SharedBuffer
from polybus.model.address import Address
from polybus.model.identity import Identity
from polybus.transports.descriptor_reserve import descriptor_reserve
from polybus.transports.hangup_monitor import HangupMonitor
from polybus.transports.stream_connection import StreamConnection
from polybus.transports.stream_session import StreamSession
from polybus.transports.tls_connection import TlsConnection

BACKLOG = 1024  # connections that the kernel queues during one turn of the event loop
TURN_CONNECTIONS = 16  # so that a flood of connects does not delay open connections
RETRY_S = 0.1  # without a free descriptor or memory, accepting again at once would fail again
SEALED_BYTES = 64 * 1024  # encrypted bytes per read: a few TLS records

OpenSession = Callable[[StreamConnection], StreamSession]


class ConnectionLimit:
    """Counts open connections and calls `refused(peer)` for each one over the limit."""

    def __init__(self, max_connections: int, refused: Callable[[str], None]) -> None:
        self.open = 0
        self._max = max_connections
        self._refused = refused

    def enter(self, peer: str) -> bool:
        if self.open >= self._max:
            self._refused(peer)
            return False
        self.open += 1
        return True

    def leave(self) -> None:
        self.open -= 1


class CallerLimit(Protocol):
    """Counts connections per caller; `ConnectionLimit` counts all of them."""

    def acquire(self, identity: Identity) -> bool:
        """Count a connection. Returns False if the caller has reached its limit."""

    def release(self, identity: Identity) -> None: ...


@dataclass(frozen=True, slots=True)
class ListenOptions:
    connection_limit: ConnectionLimit
    shared: SharedBuffer
    # Serves the sockets without TLS; None: the event loop does.
    pump: Pump | None = None
    tls: ssl.SSLContext | None = None
    unix_mode: int = 0o600
    hangups: HangupMonitor | None = None
    caller_limit: CallerLimit | None = None
    # Descriptors of the reserve that the connections of this listener leave to others.
    spared_descriptors: int = 0
    # Called for each failed TLS handshake with the peer and the reason.
    on_handshake_failed: Callable[[str, str], None] = lambda peer, reason: None
    # Called with the error if pending connections cannot be accepted now.
    on_accept_failed: Callable[[OSError], None] = lambda error: None


class StreamEndpoint:
    """The connections of one kind of session: counted by the limits, and drained."""

    def __init__(self, open_session: OpenSession, options: ListenOptions) -> None:
        self._open_session = open_session
        self._options = options
        self._connections: set[StreamConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()  # admitted and without a transport
        self._empty = asyncio.Event()
        self._empty.set()
        self._loop = asyncio.get_running_loop()

    @property
    def connections(self) -> Set[StreamConnection]:
        """The open connections; the set changes with them."""
        return self._connections

    async def drain(self, timeout_s: float) -> None:
        """Wait for open connections to end, then abort the rest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        await asyncio.gather(*self._opening)
        for connection in list(self._connections):
            connection.abort()
        await self._empty.wait()

    def _admit(self, connection: StreamConnection) -> bool:
        limit, caller_limit = self._options.connection_limit, self._options.caller_limit
        if not limit.enter(connection.peer):
            return False
        if caller_limit is not None and not caller_limit.acquire(connection.identity):
            limit.leave()
            return False
        self._connections.add(connection)
        self._empty.clear()
        return True

    def _lost(self, connection: StreamConnection) -> None:
        self._options.connection_limit.leave()
        if self._options.caller_limit is not None:
            self._options.caller_limit.release(connection.identity)
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def _connection_maker(self, tls: ssl.SSLContext | None) -> Callable[[], StreamConnection]:
        options = self._options
        common = (self._open_session, options.shared, self._admit, self._lost, options.hangups)
        if tls is None:
            return partial(StreamConnection, *common)
        sealed = SharedBuffer(SEALED_BYTES)
        return partial(TlsConnection, *common, tls, sealed, options.on_handshake_failed)


class StreamListener(StreamEndpoint):
    """An open listener. `address` has the bound port."""

    def __init__(self, open_session: OpenSession, options: ListenOptions) -> None:
        super().__init__(open_session, options)
        self._retry: asyncio.TimerHandle | None = None
        self._socket: socket.socket
        self._make_connection: Callable[[], StreamConnection]
        self.address: Address

    def close(self) -> None:
        """Stop accepting connections; open ones stay."""
        if self._retry is not None:
            self._retry.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _accept_pending(self) -> None:
        """Accept pending connections, at most TURN_CONNECTIONS."""
        for _ in range(TURN_CONNECTIONS):
            try:
                sock = descriptor_reserve.accept(self._socket, self._options.spared_descriptors)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # the peer has hung up
                continue
            except OSError as error:
                self._options.on_accept_failed(error)
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(RETRY_S, self._accept)
                return
            connection = self._make_connection()
            if not connection.identify_and_admit(sock):
                sock.close()
                continue
            self._serve(connection, sock)

    def _serve(self, connection: StreamConnection, sock: socket.socket) -> None:
        """Give an admitted connection a transport: the pump's, or the loop's for TLS."""
        pump = self._options.pump
        if pump is None or isinstance(connection, TlsConnection):
            opening = self._loop.create_task(self._open_transport(connection, sock))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
            return
        try:
            pump.add(sock, connection)
        except OSError:  # it was lost before it had a transport
            sock.close()
            connection.discard()

    def _accept(self) -> None:
        self._loop.add_reader(self._socket, self._accept_pending)

    async def _open_transport(self, connection: StreamConnection, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, sock)
        except (OSError, RuntimeError):  # it was lost before it had a transport
            sock.close()
            connection.discard()

    async def open(self, address: Address) -> None:
        """Listen. Raises AddressInUse or AddressError with the reason."""
        try:
            await self._open(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(f"{address} is in use by another listener") from error
            reason = error.strerror or str(error)
            raise AddressError(f"{address}: cannot be listened on: {reason}") from error

    async def _open(self, address: Address) -> None:
        options = self._options
        if address.is_encrypted and options.tls is None:
            raise AddressError(
                f"{address}: a TLS listener must have a certificate;"
                " set certificate and key in [tls]"
            )
        self._make_connection = self._connection_maker(
            options.tls if address.is_encrypted else None
        )
        if address.is_unix:
            self._socket = _bind_unix(address, options.unix_mode)
            self.address = address
        else:
            self._socket = await _bind_tcp(address)
            # Port 0 asks the kernel for a free one.
            self.address = address.with_port(self._socket.getsockname()[1])
        self._socket.listen(BACKLOG)
        self._accept()


async def listen(
    address: Address, open_session: OpenSession, options: ListenOptions
) -> StreamListener:
    """Open a listener. Raises AddressInUse or AddressError with the reason."""
    listener = StreamListener(open_session, options)
    await listener.open(address)
    return listener


async def _bind_tcp(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    resolved = await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, endpoint = resolved[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # A restarted bus binds its port again while old connections are in TIME_WAIT.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(endpoint)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(address: Address, mode: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # umask and not chmod: the file must never have a wider mode, not even for a moment.
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(address.path)
        finally:
            os.umask(before)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
