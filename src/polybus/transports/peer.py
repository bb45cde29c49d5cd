"""Who is at the other end of a connection, as the host's kernel tells it."""

from __future__ import annotations

import socket
import struct
from typing import Protocol

from polybus.model.identity import ANONYMOUS, Identity

CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class SocketLike(Protocol):
    """asyncio hands out a wrapper, not a socket; these two calls are all we need."""

    @property
    def family(self) -> int: ...
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


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
    return f"unix:pid={identity.pid},uid={identity.uid}"
