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
from typing import NamedTuple, Protocol

from polybus.transports.sockdiag_query import query_socket

NETLINK_SOCK_DIAG = 4
# A peer to whom we have not said goodbye is in one of these.
ESTABLISHED, FIN_WAIT1, FIN_WAIT2 = 1, 4, 5
CONNECTED = (ESTABLISHED, FIN_WAIT1, FIN_WAIT2)


class SocketEnd(NamedTuple):
    """One end of a connection: 4 or 16 bytes of address, in network order, and a port."""

    ip: bytes
    port: int


class SocketTable(Protocol):
    def owner(self, far: SocketEnd, near: SocketEnd) -> int | None:
        """The uid that holds the end `far` of the connection to `near`, if it is known."""


class NetlinkSocketTable:
    """The kernel's socket table, asked over netlink."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._netlink = socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)
        self._sequence = 0

    def owner(self, far: SocketEnd, near: SocketEnd) -> int | None:
        """From where the other end stands: its own address comes first."""
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        try:
            found = query_socket(self._netlink.fileno(), self._sequence, *far, *near)
        except (OSError, ValueError):
            return None
        return None if found is None else owner_of(*found)

    def close(self) -> None:
        self._netlink.close()

    def __del__(self) -> None:
        """The process's own table is closed by nobody else."""
        if hasattr(self, "_netlink"):  # where netlink is forbidden there is none
            self.close()


def owner_of(state: int, uid: int, inode: int) -> int | None:
    """The uid of a socket in the table, if that means anything."""
    return uid if inode and state in CONNECTED else None
