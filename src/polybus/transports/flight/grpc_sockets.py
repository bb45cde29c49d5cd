"""gRPC's own connections, found among this process's descriptors.

gRPC gives no way to end a connection: a server that is told to stop waits for idle
streams for ever, and a client that reads nothing holds its thread for ever. But
its sockets are ours, too: shut down through a second descriptor, gRPC takes it
for the peer's end, and everything that waits on it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
# Of Linux's struct tcp_info: where tcpi_last_data_recv (milliseconds, 32 bits) begins, and
# where tcpi_bytes_acked (64 bits) begins and ends.
LAST_DATA_RECV = 52
BYTES_ACKED, TCP_INFO_BYTES = 120, 128


def close_all(port: int) -> int:
    """Ends every connection to a port of ours; how many there were."""
    ended = 0
    for sock in _connected(port):
        ended += _end(sock)
    return ended


def close_one(port: int, peer_port: int) -> bool:
    """Ends the connection that comes from a port of the peer's."""
    found = False
    for sock in _connected(port):
        if sock.getpeername()[1] == peer_port:
            found = _end(sock)
    return found


def close_surplus(port: int, most: int) -> int:
    """Ends connections over so many, those first that were silent for longest; how many."""
    if sum(1 for _ in DESCRIPTORS.iterdir()) <= most:  # far quicker than to look at each
        return 0
    silence = {sock.getpeername()[1]: _silent_ms(sock) for sock in _connected(port)}
    by_silence = sorted(silence, key=lambda peer: silence[peer])
    surplus = set(by_silence[most:])
    return sum(_end(sock) for sock in _connected(port) if sock.getpeername()[1] in surplus)


def _silent_ms(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return int.from_bytes(info[LAST_DATA_RECV : LAST_DATA_RECV + 4], sys.byteorder)


def confirmed_bytes(port: int, peer_port: int) -> int | None:
    """How much of what we sent the peer's kernel has confirmed; None if it is not connected."""
    found = None
    for sock in _connected(port):
        if sock.getpeername()[1] == peer_port:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            found = int.from_bytes(info[BYTES_ACKED:TCP_INFO_BYTES], sys.byteorder)
    return found


def _end(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _connected(port: int) -> Iterator[socket.socket]:
    for entry in list(DESCRIPTORS.iterdir()):
        sock = _open(int(entry.name))
        if sock is None:
            continue
        with sock, contextlib.suppress(OSError):
            is_ours = sock.family in (socket.AF_INET, socket.AF_INET6)
            if is_ours and sock.getsockname()[1] == port and sock.getpeername():
                yield sock


def _open(descriptor: int) -> socket.socket | None:
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed since it was listed
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
