"""The peer of a connection: its identity and its send queue, as the host's kernel reports them."""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import socket
import struct
import termios
from typing import Protocol

from polybus.model.identity import ANONYMOUS, IN_DOUBT, Identity
from polybus.transports.descriptor_reserve import descriptor_reserve
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


SocketName = tuple[str, int] | tuple[str, int, int, int]


class SocketLike(Protocol):
    """The socket methods that asyncio's TransportSocket has and this module uses."""

    @property
    def family(self) -> int: ...
    def fileno(self) -> int: ...
    def getpeername(self) -> SocketName: ...
    def getsockname(self) -> SocketName: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def identify_peer(sock: SocketLike | None, far: object = None) -> Identity:
    """Return the identity of the peer as far as the kernel vouches for it. Never blocks.

    `far` is the peer's address if the caller knows it: the socket forgets it when the peer
    resets the connection. A peer that may be on this machine is in doubt without an owner.
    """
    try:
        if sock is None:
            return IN_DOUBT
        if sock.family == socket.AF_UNIX:
            return of_unix_peer(sock)
        return _identify_tcp_peer(sock, far if isinstance(far, tuple) else sock.getpeername())
    except OSError:  # the peer has hung up, and its address is unknown
        return IN_DOUBT


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


def _identify_tcp_peer(sock: SocketLike, peername: SocketName) -> Identity:
    far, near = socket_end(peername), socket_end(sock.getsockname())
    if not is_own_address(far.ip):
        return ANONYMOUS
    uid = socket_table().owner(far, near)
    # After a reset by the peer another process may have the same two addresses, and the uid
    # would be that of the other process. Our end is closed then, so check it last.
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    if uid is None or state not in (ESTABLISHED, CLOSE_WAIT):
        return IN_DOUBT
    return Identity(uid=uid)


def socket_end(name: SocketName) -> SocketEnd:
    return SocketEnd(packed(name[0]), name[1])


def is_own_address(ip: bytes) -> bool:
    """Return whether an address is one of this machine, so that its peers are local.

    A user of this machine chooses which of its addresses it connects from.
    """
    if len(ip) == 4:
        family, is_loopback = socket.AF_INET, ip[0] == IPV4_LOOPBACK
    else:
        family, is_loopback = socket.AF_INET6, ip == IPV6_LOOPBACK
    if is_loopback:
        return True
    try:
        with descriptor_reserve.borrow(1), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((socket.inet_ntop(family, ip), 0))  # only to an address of this machine
    except OSError as error:
        # After any other error the peer may be local, such as without a free descriptor.
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _can_find_own_socket(table: SocketTable) -> bool:
    """Return whether the table finds a connection of our own (it needs a kernel module)."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=1.0) as client,
        ):
            near, far = socket_end(server.getsockname()), socket_end(client.getsockname())
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
