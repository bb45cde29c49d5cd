"""The other end of a connection, as the host's kernel tells it: who, and how far along."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from typing import Protocol

from polybus.model.identity import ANONYMOUS, Identity

CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
COUNT = struct.Struct("i")
# A peer whose host has vanished is noticed after some two minutes, not after two hours.
KEEPALIVE_IDLE_S = 60
KEEPALIVE_INTERVAL_S = 15


class SocketLike(Protocol):
    """asyncio hands out a wrapper, not a socket; these calls are all we need."""

    @property
    def family(self) -> int: ...
    def fileno(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def identify(sock: SocketLike | None) -> Identity:
    """The kernel's word for a Unix socket; over TCP nobody vouches for the peer yet."""
    if sock is None or sock.family != socket.AF_UNIX:
        return ANONYMOUS
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(raw)
    return Identity(uid=uid, gid=gid, pid=pid)


def describe(peername: object, identity: Identity) -> str:
    """A name for logs: where it calls from, or which process it is."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        host = f"[{peername[0]}]" if ":" in str(peername[0]) else peername[0]
        return f"{host}:{peername[1]}"
    if identity.pid is None:
        return "gone"  # it hung up before it could be asked
    return f"unix:pid={identity.pid},uid={identity.uid}"


def keep_alive(sock: SocketLike | None) -> None:
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)


def unsent_bytes(sock: SocketLike | None) -> int:
    """What lies in the kernel's send queue: not yet confirmed (TCP), or not yet read (Unix)."""
    if sock is None:
        return 0
    try:
        raw = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(COUNT.size))
    except (OSError, ValueError):  # closed in the meantime
        return 0
    return int(COUNT.unpack(raw)[0])
