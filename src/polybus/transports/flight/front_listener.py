"""The listener in front of gRPC (ADR 0043).

It accepts the clients of the native port, as the listeners of other dialects do: within the
limits of connections, with the identity that the kernel knows when the connection begins, and
with TLS. Each client gets a connection to gRPC, and the relay moves the bytes:

    client ── TCP ──────────────▶ Http2Relay ── Unix socket ──▶ gRPC
    client ── TLS ─▶ TlsBridge ─▶ Http2Relay ── Unix socket ──▶ gRPC

gRPC names the peer of a call by the name of the Unix socket, which is a random one, and `find`
returns the client that has it. A client that has hung up is not found.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from polybus.model.identity import Identity
from polybus.transports.descriptor_reserve import descriptor_reserve
from polybus.transports.flight.http2_relay import CLOSED, NOT_HTTP2, RESETS, Http2Relay
from polybus.transports.peer_identity import keep_alive
from polybus.transports.stream_connection import StreamConnection
from polybus.transports.stream_listener import StreamListener
from polybus.transports.tls_connection import TlsConnection

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Buffer

    from polybus.transports.flight.grpc_socket import GrpcSocket
    from polybus.transports.stream_listener import ListenOptions

BRIDGE_BYTES = 64 * 1024
# Calls that all clients together may reset: gRPC may need a thread for each, for milliseconds.
RESETS_PER_S = 2000
RESET_THREADS = 64  # beyond it resets wait; some that were passed on have no thread yet
REASONS = {RESETS: "rapid_reset", NOT_HTTP2: "not_http2"}


class FrontPeer:
    """A client of the port. `number` identifies its connection in the relay."""

    def __init__(self, number: int, connection: StreamConnection, identity: Identity) -> None:
        self.number = number
        self.name = f"polybus-{number}-{secrets.token_hex(8)}"
        self.connection = connection
        self.identity = identity
        self.bridge: TlsBridge | None = None


class RelayedConnection(StreamConnection):
    """A connection without TLS: the relay reads and writes its socket."""

    cut: Callable[[], object]  # set when the relay has it

    def abort(self) -> None:
        self.cut()


class TlsBridge:
    """The session of a TLS connection: passes the decrypted bytes to the relay, and back."""

    def __init__(
        self, connection: StreamConnection, sock: socket.socket, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._connection = connection
        self._socket = sock
        self._loop = loop
        self._written = 0
        loop.add_reader(sock, self._read)

    def confirmed_bytes(self) -> int:
        """Return about how many bytes the client has acknowledged."""
        unconfirmed = self._connection.backlog_bytes() + self._connection.unconfirmed_bytes()
        return max(0, self._written - unconfirmed)

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        try:
            sent = self._socket.send(memoryview(buffer)[start:end])
        except BlockingIOError:
            sent = 0
        except OSError:  # the relay has ended; `_read` sees that, too
            return end - start
        if sent < end - start:
            self._connection.pause_reading()
            self._loop.add_writer(self._socket, self._resume)
        return sent

    def on_stalled(self) -> None:
        self._loop.remove_reader(self._socket)

    def on_writable(self) -> None:
        self._loop.add_reader(self._socket, self._read)

    def on_half_closed(self) -> bool:
        return False

    def on_ended(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _resume(self) -> None:
        self._loop.remove_writer(self._socket)
        self._connection.resume_reading()

    def _read(self) -> None:
        try:
            data = self._socket.recv(BRIDGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._written += len(data)
            self._connection.write(data)
        else:
            self._loop.remove_reader(self._socket)
            self._connection.close()


class FrontListener(StreamListener):
    """`on_cut(reason, peer)` is called for each connection that the relay has cut."""

    def __init__(
        self,
        options: ListenOptions,
        grpc: GrpcSocket,
        max_resets_per_s: int,
        on_cut: Callable[[str, str], None],
    ) -> None:
        super().__init__(self._open_bridge, options)
        self._grpc = grpc
        self._on_cut = on_cut
        self._relay = Http2Relay(max_resets_per_s, RESETS_PER_S, RESET_THREADS)
        self._numbers = count(1)
        self._peers: dict[str, FrontPeer] = {}
        self._by_number: dict[int, FrontPeer] = {}
        self._loop.add_reader(self._relay.ended_event, self._on_relays_ended)

    # --- called by the port's threads, too

    @property
    def has_clients(self) -> bool:
        return bool(self._peers)

    def find(self, peer: str) -> FrontPeer | None:
        """Return the client of a call by the peer that gRPC reports."""
        return self._peers.get(peer.rpartition(":")[2])

    def cut(self, peer: FrontPeer) -> bool:
        """End a connection. Returns False if it has ended already."""
        return self._relay.cut(peer.number)

    def confirmed_bytes(self, peer: FrontPeer) -> int | None:
        """Return the sent bytes that a client has acknowledged, None if it is gone."""
        if peer.bridge is not None:
            return peer.bridge.confirmed_bytes()
        return self._relay.confirmed_bytes(peer.number)

    def cut_all(self) -> int:
        """End all connections. Returns their number."""
        return sum(map(self.cut, list(self._peers.values())))

    def stop_relay(self) -> None:
        """End the relay and its connections, after `drain`."""
        self._loop.remove_reader(self._relay.ended_event)
        self._relay.stop()

    # --- on the loop

    def use_certificate(self, tls: ssl.SSLContext) -> None:
        """Use this for connections that begin later."""
        self._make_connection = self._connection_maker(tls)

    def _connection_maker(self, tls: ssl.SSLContext | None) -> Callable[[], StreamConnection]:
        if tls is not None:
            return super()._connection_maker(tls)
        options = self._options
        return partial(
            RelayedConnection, self._open_session, options.shared, self._admit, self._lost
        )

    def _serve(self, connection: StreamConnection, sock: socket.socket) -> None:
        if not isinstance(connection, RelayedConnection):
            super()._serve(connection, sock)
            return
        try:
            keep_alive(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = self._begin(connection, sock, connection.identity)
        except OSError:  # the client has hung up, or there is no descriptor for gRPC's end
            self._on_cut("unavailable", connection.peer)
            sock.close()
            connection.discard()
        else:
            connection.cut = partial(self._relay.cut, peer.number)

    def _open_bridge(self, connection: StreamConnection) -> TlsBridge:
        """Open the session of a TLS connection, after its handshake."""
        assert isinstance(connection, TlsConnection)
        name = connection.certificate_name
        with descriptor_reserve.borrow(2):
            near, far = socket.socketpair()
        near.setblocking(False)
        far.setblocking(False)
        try:
            identity = Identity(key=name) if name else connection.identity
            peer = self._begin(connection, far, identity)
        except BaseException:
            near.close()
            far.close()
            raise
        peer.bridge = TlsBridge(connection, near, self._loop)
        return peer.bridge

    def _begin(
        self, connection: StreamConnection, sock: socket.socket, identity: Identity
    ) -> FrontPeer:
        peer = FrontPeer(next(self._numbers), connection, identity)
        with descriptor_reserve.borrow(1):
            server = self._grpc.connect(peer.name)
        self._peers[peer.name] = self._by_number[peer.number] = peer
        self._relay.add(peer.number, sock.detach(), server.detach())
        return peer

    def _on_relays_ended(self) -> None:
        for number, reason in self._relay.take_ended():
            peer = self._by_number.pop(number)
            del self._peers[peer.name]
            if reason != CLOSED:
                self._on_cut(REASONS[reason], peer.connection.peer)
            if isinstance(peer.connection, RelayedConnection):
                peer.connection.discard()
