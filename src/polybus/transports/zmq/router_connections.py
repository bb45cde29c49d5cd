"""The connections of a ROUTER: who is behind each, how much it sends, and when it ends.

libzmq owns the connections, and tells of them in two ways: its monitor says when a
descriptor was accepted and when it has ended, and each message says by which descriptor
it came. From the descriptor the kernel tells who is at the other end. Descriptors are
used again, so a message is one connection's only if no other of that descriptor could
have sent it; in doubt it is anonymous.

A connection ends before its last messages are read, so it is remembered for a little while.
Of those that had a descriptor before, all has come when another is told to have it: once the
socket was found empty since, they are forgotten, and the new one is in no doubt. That takes
less time than its handshake, unless the bus has much to do.
"""

from __future__ import annotations

import fcntl
import os
import socket
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from polybus.model import tcp_info
from polybus.model.identity import ANONYMOUS
from polybus.transports.peer_identity import describe_peer, identify_peer, unsent_bytes

REMEMBERED_S: Final = 1.0  # how long an ended connection may still have messages to be read
GUESSED_BYTES: Final = 1 << 20


class ConnectionGate(Protocol):
    def enter(self, peer: str) -> bool: ...
    def leave(self) -> None: ...


class RouterConnection:
    """One accepted connection; `routing` is what its messages are answered by."""

    def __init__(self, fd: int, since_s: float, number: int = 0) -> None:
        self.fd = fd
        self.number = number
        self.since_s = since_s
        self.identity = ANONYMOUS
        self.key: bytes | None = None
        self.peer_text = "gone"
        self.address: object = None
        self.routing: bytes | None = None
        self.ended_s: float | None = None
        self.admitted = False
        self.received = self.received_bytes = 0
        self.sent = self.sent_bytes = 0
        self.is_full: Callable[[], bool] = lambda: False
        # Of the watch, in bytes: what has come and is no message's, what is neither that nor
        # was it taken, and what the peer has confirmed.
        self.whole = -1
        self.baseline = 0
        self.baseline_s = since_s  # when that was reckoned last
        self.unfinished = 0
        self.acked = 0
        self.slow_since_s: float | None = None
        self.slow_acked = 0
        self.is_guessed = False
        self._guess = 0
        self.send: Callable[[list[bytes], list[bytes]], None]

    @property
    def unacknowledged_bytes(self) -> int:
        """What was sent and not confirmed, as far as is known."""
        return max(0, self.sent_bytes - self.acked)

    def identify_peer(self) -> None:
        """Asks the kernel who is at the other end. Nothing here waits."""
        with self.duplicate_socket() as sock:
            if sock is not None:
                self.identity = identify_peer(sock)
                self.address = _address(sock)
                self.peer_text = describe_peer(self.address, self.identity)

    def cut(self) -> bool:
        """Ends it; libzmq takes that for the peer's end, and forgets what was not whole."""
        with self.duplicate_socket() as sock:
            if sock is None or (self.address is not None and _address(sock) != self.address):
                return False
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
            return True

    def read_byte_counts(self) -> tuple[int, int] | None:
        """Bytes that the kernel has received and that the peer has confirmed.

        Of a Unix socket the kernel counts neither: it is known whether something waits to be
        read, on either side. What comes all the time counts as a megabyte a look.
        """
        with self.duplicate_socket() as sock:
            if sock is None or _address(sock) != self.address:
                return None
            try:
                if sock.family == socket.AF_UNIX:
                    return self._estimate_counts(sock)
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.TCP_INFO_BYTES)
            except OSError:
                return None
        return tcp_info.read_byte_counts(info)

    def _estimate_counts(self, sock: socket.socket) -> tuple[int, int]:
        self.is_guessed = True
        waiting = fcntl.ioctl(sock, termios.FIONREAD, bytes(4))
        if any(waiting):
            self._guess += GUESSED_BYTES
        return self._guess, self.acked if unsent_bytes(sock) else self.sent_bytes

    @contextmanager
    def duplicate_socket(self) -> Iterator[socket.socket | None]:
        """The connection's socket by a descriptor of our own; None if it has ended."""
        try:
            sock = socket.socket(fileno=os.dup(self.fd))
        except OSError:
            yield None
            return
        with sock:
            yield sock


def _address(sock: socket.socket) -> Any:
    try:
        return sock.getpeername()
    except OSError:
        return None


class RouterConnections:
    """`changes` takes what the monitor has to tell: (descriptor, has it begun?), in order.

    `attach` gives a connection its ways out.
    """

    def __init__(
        self,
        gate: ConnectionGate,
        changes: Callable[[], list[tuple[int, bool]]],
        clock: Callable[[], float],
        attach: Callable[[RouterConnection], None],
    ) -> None:
        self._gate = gate
        self._changes = changes
        self._clock = clock
        self._attach = attach
        self._by_routing: dict[bytes, RouterConnection] = {}
        self._open: dict[int, RouterConnection] = {}
        self._unclaimed: dict[int, list[RouterConnection]] = {}
        self._ambiguous: dict[int, RouterConnection] = {}  # the newest of several unclaimed
        self._ended: list[RouterConnection] = []
        self.accepted = 0

    def find(self, routing: bytes, fd: int) -> RouterConnection:
        """The connection by which a message has come."""
        found = self._by_routing.get(routing)
        if found is not None and found.fd == fd:
            return found
        self.read_events()
        waiting = self._unclaimed.get(fd, ())
        if len(waiting) == 1:
            (found,) = self._unclaimed.pop(fd)
        else:  # nobody's, or one of several's: none of them vouches for it
            found = RouterConnection(fd, self._clock())
        found.routing = routing
        self._attach(found)
        if found.ended_s is None and self._open.get(fd) is found:
            self._by_routing[routing] = found
        return found

    def ambiguous(self) -> list[RouterConnection]:
        """The newest of each descriptor that others had before, if it is in doubt."""
        return list(self._ambiguous.values()) if self._ambiguous else []

    def resolve_ambiguous(self, newest: list[RouterConnection]) -> None:
        """Since these were told of, all was read: nothing is left of those before them."""
        for one in newest:
            waiting = self._unclaimed.get(one.fd, [])
            if one in waiting:
                del waiting[: waiting.index(one)]
            if self._ambiguous.get(one.fd) is one:
                del self._ambiguous[one.fd]

    def read_events(self) -> None:
        """Takes in what the monitor tells."""
        new: list[RouterConnection] = []
        while told := self._changes():
            for fd, begun in told:
                self._end(fd)
                if begun:
                    new.append(self._begin(fd))
            # One look, then again what has happened meanwhile: what was looked at may have
            # ended just before, and another may have had its descriptor by then.
            for one in new:
                if one.ended_s is None and one.address is None:
                    one.identify_peer()
        for one in new:
            if one.ended_s is not None:
                one.identity = ANONYMOUS
            elif not self._admit(one):
                one.cut()

    def tick(self) -> None:
        """Forgets those that have ended a while ago."""
        self.read_events()
        before_s = self._clock() - REMEMBERED_S
        ended, self._ended = self._ended, []
        for one in ended:
            if one.ended_s is None or one.ended_s > before_s:
                self._ended.append(one)
                continue
            if one.routing is not None and self._by_routing.get(one.routing) is one:
                del self._by_routing[one.routing]
            waiting = self._unclaimed.get(one.fd, [])
            if one in waiting:
                waiting.remove(one)
                if not waiting:
                    del self._unclaimed[one.fd]

    def open(self) -> list[RouterConnection]:
        return list(self._open.values())

    def close(self) -> None:
        for fd in list(self._open):
            self._end(fd)

    def _begin(self, fd: int) -> RouterConnection:
        self.accepted += 1
        found = self._open[fd] = RouterConnection(fd, self._clock(), self.accepted)
        waiting = self._unclaimed.setdefault(fd, [])
        waiting.append(found)
        if len(waiting) > 1:
            self._ambiguous[fd] = found
        return found

    def _admit(self, new: RouterConnection) -> bool:
        new.admitted = self._gate.enter(new.peer_text)
        return new.admitted

    def _end(self, fd: int) -> None:
        gone = self._open.pop(fd, None)
        if gone is None:
            return
        gone.ended_s = self._clock()
        self._ended.append(gone)
        if gone.admitted:
            self._gate.leave()
