"""The peer of a connection: its identity and its send queue, as the host's kernel reports them."""

from __future__ import annotations

import fcntl
import functools
import os
import socket
import struct
import termios
from typing import Protocol

from polybus.model.identity import ANONYMOUS, Identity
from polybus.transports.proc_net_table import ProcNetSocketTable, packed
from polybus.transports.socket_table import NetlinkSocketTable, SocketEnd, SocketTable
from polybus.transports.unix_credentials import of_unix_peer

COUNT = struct.Struct("i")
# Keepalive: a peer whose host is down is detected after two minutes, not after two hours.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15

IPV4_LOOPBACK = 127  # the first byte
IPV6_LOOPBACK = bytes(15) + b"\x01"
# TCP_ESTABLISHED, in the first byte of TCP_INFO.
ESTABLISHED, CLOSE_WAIT = 1, 8


class SocketLike(Protocol):
    """The socket methods that asyncio's TransportSocket has and this module uses."""

    @property
    def family(self) -> int: ...
    def fileno(self) -> int: ...
    def getpeername(self) -> tuple[str, int] | tuple[str, int, int, int]: ...
    def getsockname(self) -> tuple[str, int] | tuple[str, int, int, int]: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def identify_peer(sock: SocketLike | None) -> Identity:
    """Return the identity of the peer as far as the kernel vouches for it. Never blocks."""
    try:
        if sock is None:
            return ANONYMOUS
        if sock.family == socket.AF_UNIX:
            return of_unix_peer(sock)
        uid = _tcp_owner(sock, socket_table())
    except OSError:  # the peer has hung up
        return ANONYMOUS
    return ANONYMOUS if uid is None else Identity(uid=uid)


@functools.cache
def socket_table() -> SocketTable:
    """Return the socket table of the event loop's thread; one per process."""
    return open_socket_table()


def open_socket_table() -> SocketTable:
    """Return a socket table that works on this host. Threads must not share it."""
    try:
        diag = NetlinkSocketTable()
    except OSError:
        return ProcNetSocketTable()
    if _can_find_own_socket(diag):
        return diag
    diag.close()
    return ProcNetSocketTable()


def _tcp_owner(sock: SocketLike, table: SocketTable) -> int | None:
    far, near = _end(sock.getpeername()), _end(sock.getsockname())
    if not (is_loopback(far) and is_loopback(near)):
        return None
    uid = table.owner(far, near)
    # After a reset by the peer another process may have the same two addresses, and the uid
    # would be that of the other process. Our end is closed then, so check it last.
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return uid if state in (ESTABLISHED, CLOSE_WAIT) else None


def _end(name: tuple[str, int] | tuple[str, int, int, int]) -> SocketEnd:
    return SocketEnd(packed(name[0]), name[1])


def is_loopback(end: SocketEnd) -> bool:
    return end.ip[0] == IPV4_LOOPBACK if len(end.ip) == 4 else end.ip == IPV6_LOOPBACK


def _can_find_own_socket(table: SocketTable) -> bool:
    """Return whether the table finds a connection of our own (it needs a kernel module)."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=1.0) as client,
        ):
            near, far = _end(server.getsockname()), _end(client.getsockname())
            return table.owner(far, near) == os.geteuid()
    except OSError:
        return False


def describe_peer(peername: object, identity: Identity) -> str:
    """Return a name of the peer for logs: its address, or its process."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        host = f"[{peername[0]}]" if ":" in str(peername[0]) else peername[0]
        return f"{host}:{peername[1]}"
    if identity.pid is None:
        return "gone"  # the peer hung up first
    return f"unix:pid={identity.pid},uid={identity.uid}"


def keep_alive(sock: SocketLike | None) -> None:
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)


def unsent_bytes(sock: SocketLike | None) -> int:
    """Return the bytes in the kernel's send queue: unacknowledged (TCP) or unread (Unix)."""
    if sock is None:
        return 0
    try:
        raw = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(COUNT.size))
    except (OSError, ValueError):  # closed concurrently
        return 0
    return int(COUNT.unpack(raw)[0])
