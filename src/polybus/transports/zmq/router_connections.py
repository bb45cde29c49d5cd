"""The connections of a ROUTER: their identities, their byte counts, and their ends.

libzmq owns the connections and reports them in two ways: its monitor reports accepted and closed
descriptors, and each message has the descriptor that it came from. The kernel knows the peer of
a descriptor. Descriptors are reused, so a message belongs to a connection only if no other
connection with that descriptor can have sent it. Otherwise its sender is in doubt, as is that of
a connection that ended before the kernel was asked (`model.identity`).

A connection may end before its last messages are read, so it is remembered for REMEMBERED_S.
When a new connection gets the descriptor of earlier ones, all their messages have arrived; once
the socket was found empty after that, they are forgotten, and the new one is unambiguous. That
takes less time than its handshake, unless the bus is busy.
"""

from __future__ import annotations

import fcntl
import socket
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from polybus.model import tcp_info
from polybus.model.identity import IN_DOUBT, Identity
from polybus.transports.peer_identity import describe_peer, identify_peer, unsent_bytes
from polybus.transports.spare_descriptor import spare_descriptor

REMEMBERED_S: Final = 1.0  # an ended connection may still have unread messages
GUESSED_BYTES: Final = 1 << 20
SPARE: Final = "zmq"


class ConnectionGate(Protocol):
    def enter(self, peer: str, identity: Identity) -> bool: ...
    def leave(self, identity: Identity) -> None: ...


class RouterConnection:
    """One accepted connection. `routing` is the routing id for replies."""

    def __init__(self, fd: int, since_s: float, number: int = 0) -> None:
        self.fd = fd
        self.number = number
        self.since_s = since_s
        self.identity = IN_DOUBT
        self.key: bytes | None = None
        self.peer_text = "gone"
        self.address: object = None
        self.routing: bytes | None = None
        self.ended_s: float | None = None
        self.admitted_as: Identity | None = None  # counted; a key may change `identity` later
        self.received = self.received_bytes = 0
        self.sent = self.sent_bytes = 0
        self.is_full: Callable[[], bool] = lambda: False
        # State of MemoryWatch, in bytes: `baseline` belongs to no message, `unfinished` is
        # received and unread, `acked` is acknowledged by the peer.
        self.whole = -1
        self.baseline = 0
        self.baseline_s = since_s  # when `baseline` was last updated
        self.unfinished = 0
        self.acked = 0
        self.slow_since_s: float | None = None
        self.slow_acked = 0
        self.is_guessed = False
        self._guess = 0
        self.send: Callable[[list[bytes], list[bytes]], None]

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes sent and not acknowledged, as of the last measurement."""
        return max(0, self.sent_bytes - self.acked)

    def identify_peer(self) -> None:
        """Ask the kernel for the identity of the peer. Does not block."""
        with self.duplicate_socket() as sock:
            if sock is not None:
                self.identity = identify_peer(sock)
                self.address = _address(sock)
                self.peer_text = describe_peer(self.address, self.identity)

    def cut(self) -> bool:
        """Shut down the connection. libzmq then drops incomplete messages.

        Returns False if it has already ended.
        """
        with self.duplicate_socket() as sock:
            if sock is None or (self.address is not None and _address(sock) != self.address):
                return False
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
            return True

    def read_byte_counts(self) -> tuple[int, int] | None:
        """Return the bytes received by the kernel and the bytes acknowledged by the peer.

        The kernel counts neither for a Unix socket; it only knows whether bytes are queued on
        either side. Queued bytes then count as GUESSED_BYTES per check.
        """
        with self.duplicate_socket() as sock:
            if sock is None or _address(sock) != self.address:
                return None
            try:
                if sock.family != socket.AF_UNIX:
                    info = sock.getsockopt(
                        socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.TCP_INFO_BYTES
                    )
                    return tcp_info.read_byte_counts(info)
                self.is_guessed = True
                if any(fcntl.ioctl(sock, termios.FIONREAD, bytes(4))):
                    self._guess += GUESSED_BYTES
                return self._guess, self.acked if unsent_bytes(sock) else self.sent_bytes
            except OSError:
                return None

    @contextmanager
    def duplicate_socket(self) -> Iterator[socket.socket | None]:
        """Yield the connection's socket with a duplicated descriptor; None if it has ended."""
        with spare_descriptor(SPARE).duplicate(self.fd) as sock:
            yield sock


def _address(sock: socket.socket) -> Any:
    try:
        return sock.getpeername()
    except OSError:
        return None


class RouterConnections:
    """`changes` returns the next monitor events, as (descriptor, True if accepted).

    `attach` must set the `send` and `is_full` of a connection.
    """

    def __init__(
        self,
        gate: ConnectionGate,
        changes: Callable[[], list[tuple[int, bool]]],
        clock: Callable[[], float],
        attach: Callable[[RouterConnection], None],
    ) -> None:
        spare_descriptor(SPARE)  # while there are descriptors
        self._gate = gate
        self._changes = changes
        self._clock = clock
        self._attach = attach
        self._by_routing: dict[bytes, RouterConnection] = {}
        self._open: dict[int, RouterConnection] = {}
        self._unclaimed: dict[int, list[RouterConnection]] = {}
        # The newest of several unclaimed ones, by descriptor.
        self._ambiguous: dict[int, RouterConnection] = {}
        self._ended: list[RouterConnection] = []
        # Identified; events that came meanwhile have not been read.
        self._unchecked: list[RouterConnection] = []
        self.accepted = 0

    def find(self, routing: bytes, fd: int) -> RouterConnection:
        """Return the connection of a message."""
        connection = self._by_routing.get(routing)
        if connection is not None and connection.fd == fd:
            return connection
        self.read_events()
        candidates = self._unclaimed.get(fd, ())
        if len(candidates) == 1:
            (connection,) = self._unclaimed.pop(fd)
        else:  # of none or of one of several connections: its sender is in doubt
            connection = RouterConnection(fd, self._clock())
        connection.routing = routing
        self._attach(connection)
        if connection.ended_s is None and self._open.get(fd) is connection:
            self._by_routing[routing] = connection
        return connection

    def ambiguous(self) -> list[RouterConnection]:
        """Return the newest connection of each ambiguous descriptor."""
        return list(self._ambiguous.values()) if self._ambiguous else []

    def resolve_ambiguous(self, newest: list[RouterConnection]) -> None:
        """Forget the predecessors of these connections: all their messages were read."""
        for connection in newest:
            candidates = self._unclaimed.get(connection.fd, [])
            if connection in candidates:
                del candidates[: candidates.index(connection)]
            if self._ambiguous.get(connection.fd) is connection:
                del self._ambiguous[connection.fd]

    def read_events(self) -> None:
        """Apply the events of the monitor."""
        while self.read_some_events():
            pass

    def read_some_events(self) -> bool:
        """Apply the next events of the monitor. Returns False if there are none."""
        events = self._changes()
        new: list[RouterConnection] = []
        for fd, is_accepted in events:
            self._end(fd)  # also of an accepted one: its predecessor's end may be unreported
            if is_accepted:
                new.append(self._begin(fd))
        # Identify, then read all events again: a connection may have ended just before it was
        # identified, and another may already have had its descriptor.
        for connection in new:
            if connection.ended_s is None:
                connection.identify_peer()
        self._unchecked += new
        if not events and self._unchecked:
            self._admit_checked()
        return bool(events)

    def _admit_checked(self) -> None:
        checked, self._unchecked = self._unchecked, []
        for connection in checked:
            if connection.ended_s is not None:
                connection.identity = IN_DOUBT
            elif self._gate.enter(connection.peer_text, connection.identity):
                connection.admitted_as = connection.identity
            else:
                connection.cut()

    def tick(self) -> None:
        """Forget connections that ended more than REMEMBERED_S ago."""
        self.read_some_events()
        before_s = self._clock() - REMEMBERED_S
        ended, self._ended = self._ended, []
        for connection in ended:
            if connection.ended_s is None or connection.ended_s > before_s:
                self._ended.append(connection)
                continue
            routing = connection.routing
            if routing is not None and self._by_routing.get(routing) is connection:
                del self._by_routing[routing]
            candidates = self._unclaimed.get(connection.fd, [])
            if connection in candidates:
                candidates.remove(connection)
                if not candidates:
                    del self._unclaimed[connection.fd]

    @property
    def count(self) -> int:
        return len(self._open)

    def open(self) -> list[RouterConnection]:
        return list(self._open.values())

    def close(self) -> None:
        for fd in list(self._open):
            self._end(fd)

    def _begin(self, fd: int) -> RouterConnection:
        self.accepted += 1
        connection = self._open[fd] = RouterConnection(fd, self._clock(), self.accepted)
        candidates = self._unclaimed.setdefault(fd, [])
        candidates.append(connection)
        if len(candidates) > 1:
            self._ambiguous[fd] = connection
        return connection

    def _end(self, fd: int) -> None:
        connection = self._open.pop(fd, None)
        if connection is None:
            return
        connection.ended_s = self._clock()
        self._ended.append(connection)
        if connection.admitted_as is not None:
            self._gate.leave(connection.admitted_as)
