"""Sockets of gRPC, found among the descriptors of this process.

gRPC has no call to close a connection: a stopping server waits forever for idle streams, and
a client that does not read blocks its thread forever. The sockets belong to this process,
however: after a shutdown through a duplicate descriptor, gRPC sees the peer disconnect and
ends everything that waits on it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
# Offsets in Linux's struct tcp_info: start of tcpi_last_data_recv (milliseconds, 32 bits),
# start and end of tcpi_bytes_acked (64 bits).
LAST_DATA_RECV = 52
BYTES_ACKED, TCP_INFO_BYTES = 120, 128


def close_all(port: int) -> int:
    """Close every connection to a local port. Returns their number."""
    ended = 0
    for sock in _connected(port):
        ended += _end(sock)
    return ended


def close_one(port: int, peer_port: int) -> bool:
    """Close the connection from a port of the peer. Returns whether there was one."""
    found = False
    for sock in _connected(port):
        if sock.getpeername()[1] == peer_port:
            found = _end(sock)
    return found


def close_surplus(port: int, most: int) -> int:
    """Close connections beyond `most`, the longest silent first. Returns their number."""
    if sum(1 for _ in DESCRIPTORS.iterdir()) <= most:  # much faster than inspecting each
        return 0
    silence = {sock.getpeername()[1]: _silent_ms(sock) for sock in _connected(port)}
    by_silence = sorted(silence, key=lambda peer: silence[peer])
    surplus = set(by_silence[most:])
    return sum(_end(sock) for sock in _connected(port) if sock.getpeername()[1] in surplus)


def _silent_ms(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return int.from_bytes(info[LAST_DATA_RECV : LAST_DATA_RECV + 4], sys.byteorder)


def confirmed_bytes(port: int, peer_port: int) -> int | None:
    """Return the sent bytes that the peer has acknowledged, None if it is not connected."""
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
    except OSError:  # not a socket
        os.close(copy)
        return None
