"""The owner of the other end of a loopback TCP connection.

Both ends of such a connection are in this host's socket table, so the kernel can be asked
for the other end by its exact addresses (sock_diag over netlink): one request and one
response, which is ready when the request returns. Nothing blocks.

The table reports uid 0 for sockets whose owner it does not know:

    a socket that its process has closed               uid 0, inode 0
    the remains of one (TIME_WAIT, some FIN_WAIT2)     uid 0, inode 0
    a connection that is being established             uid 0, inode 0
    no such socket, but a listener at its port         the uid of the listener

So only a socket with an inode, in a state that a connected peer can have, is accepted.
"""

from __future__ import annotations

import socket
from typing import NamedTuple, Protocol

from polybus.transports.sockdiag_query import query_socket

NETLINK_SOCK_DIAG = 4
# The states of a peer whose connection we have not closed.
ESTABLISHED, FIN_WAIT1, FIN_WAIT2 = 1, 4, 5
CONNECTED = (ESTABLISHED, FIN_WAIT1, FIN_WAIT2)


class SocketEnd(NamedTuple):
    """One end of a connection: 4 or 16 bytes of address in network order, and a port."""

    ip: bytes
    port: int


class SocketTable(Protocol):
    def owner(self, far: SocketEnd, near: SocketEnd) -> int | None:
        """Return the uid that owns the end `far` of the connection to `near`, or None."""


class NetlinkSocketTable:
    """The kernel's socket table, queried over netlink."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._netlink = socket.socket(socket.AF_NETLINK, kind, NETLINK_SOCK_DIAG)
        self._sequence = 0

    def owner(self, far: SocketEnd, near: SocketEnd) -> int | None:
        """Query from the view of the other end: its own address comes first."""
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        try:
            found = query_socket(self._netlink.fileno(), self._sequence, *far, *near)
        except (OSError, ValueError):
            return None
        return None if found is None else owner_of(*found)

    def close(self) -> None:
        self._netlink.close()

    def __del__(self) -> None:
        """Close the netlink socket; only the owner of the table may do that."""
        if hasattr(self, "_netlink"):  # the constructor raised: netlink is forbidden here
            self.close()


def owner_of(state: int, uid: int, inode: int) -> int | None:
    """Return the uid of a table entry, or None if the entry does not name an owner."""
    return uid if inode and state in CONNECTED else None
