"""Who owns the other end of a loopback TCP connection.

Both ends of such a connection are in this host's socket table, so the kernel can
be asked for the other one by its exact addresses (sock_diag over netlink): one
request and one answer, which lies ready when the request returns. Nothing waits.

What the table says must be read with care, for it says uid 0 of what it does not
know:

    a socket whose process has closed it has no owner: uid 0, inode 0
    the remains of one (TIME_WAIT, some FIN_WAIT2)     uid 0, inode 0
    a connection that is only being made               uid 0, inode 0
    no such socket, but somebody listens at its port   the listener's uid

So only a socket with an inode, in a state that a connected peer can have, counts.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, Protocol

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
ALL_STATES = 0xFFFFFFFF
NO_COOKIE = 0xFFFFFFFF
# A peer to whom we have not said goodbye is in one of these.
ESTABLISHED, FIN_WAIT1, FIN_WAIT2 = 1, 4, 5
CONNECTED = (ESTABLISHED, FIN_WAIT1, FIN_WAIT2)

HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
REQUEST = struct.Struct("=BBBxI")  # struct inet_diag_req_v2 up to its id
ADDRESSES = struct.Struct("!HH16s16s")  # of struct inet_diag_sockid: ports, then addresses
COOKIE = struct.Struct("=III")  # and its end: interface, cookie
# struct inet_diag_msg behind a header: state, ..., uid, inode.
ANSWER = struct.Struct("=16xxBxx48x12xII")
MAX_ANSWER_BYTES = 4096
MAX_STRAY_ANSWERS = 8  # to requests that were given up


class End(NamedTuple):
    """One end of a connection: 4 or 16 bytes of address, in network order, and a port."""

    ip: bytes
    port: int


class SocketTable(Protocol):
    def owner(self, far: End, near: End) -> int | None:
        """The uid that holds the end `far` of the connection to `near`, if it is known."""


class SockDiag:
    """The kernel's socket table, asked over netlink."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._netlink = socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)
        self._sequence = 0

    def owner(self, far: End, near: End) -> int | None:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        try:
            self._netlink.send(_request(self._sequence, far, near))
            answer = self._answer()
        except OSError:
            return None
        return None if answer is None else owner_of(*answer)

    def close(self) -> None:
        self._netlink.close()

    def __del__(self) -> None:
        """The process's own table is closed by nobody else."""
        if hasattr(self, "_netlink"):  # where netlink is forbidden there is none
            self.close()

    def _answer(self) -> tuple[int, int, int] | None:
        for _ in range(MAX_STRAY_ANSWERS):
            data, (sender, _groups) = self._netlink.recvfrom(MAX_ANSWER_BYTES)
            _size, kind, _flags, sequence, _port = HEADER.unpack_from(data)
            if sender == 0 and sequence == self._sequence:
                whole = kind == SOCK_DIAG_BY_FAMILY and len(data) >= ANSWER.size
                return ANSWER.unpack_from(data) if whole else None
        return None


def owner_of(state: int, uid: int, inode: int) -> int | None:
    """The uid of a socket in the table, if that means anything."""
    return uid if inode and state in CONNECTED else None


def _request(sequence: int, far: End, near: End) -> bytes:
    """From where the other end stands: its own address comes first."""
    family = socket.AF_INET if len(far.ip) == 4 else socket.AF_INET6
    body = (
        REQUEST.pack(family, socket.IPPROTO_TCP, 0, ALL_STATES)
        + ADDRESSES.pack(far.port, near.port, far.ip, near.ip)
        + COOKIE.pack(0, NO_COOKIE, NO_COOKIE)
    )
    size = HEADER.size + len(body)
    return HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, sequence, 0) + body
