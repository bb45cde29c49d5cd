"""Sockets of gRPC, found among the descriptors of this process.

gRPC has no call to close a connection: a stopping server waits forever for idle streams, and
a client that does not read blocks its thread forever. The sockets belong to this process,
however: after a shutdown through a duplicate descriptor, gRPC sees the peer disconnect and
ends everything that waits on it. None of this needs a free descriptor: see `spare_descriptor`.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

from polybus.transports.peer_identity import socket_end
from polybus.transports.socket_table import SocketEnd
from polybus.transports.spare_descriptor import spare_descriptor

DESCRIPTORS = Path("/proc/self/fd")
SPARE = "grpc"
# Offsets in Linux's struct tcp_info: start of tcpi_last_data_recv (milliseconds, 32 bits),
# start and end of tcpi_bytes_acked (64 bits).
LAST_DATA_RECV = 52
BYTES_ACKED, TCP_INFO_BYTES = 120, 128


def reserve_spare() -> None:
    """Open the spare descriptor, while there are descriptors."""
    spare_descriptor(SPARE)


def close_all(port: int) -> int:
    """Close every connection to a local port. Returns their number."""
    return sum(_end(sock) for sock, _ in _connected(port))


def close_one(port: int, peer_port: int) -> bool:
    """Close the connection from a port of the peer. Returns whether there was one."""
    was_closed = False
    for sock, far in _connected(port):
        if far.port == peer_port:
            was_closed = _end(sock)
    return was_closed


def close_surplus(
    port: int, most: int, owner_of: Callable[[SocketEnd, SocketEnd], Hashable]
) -> int:
    """Close connections beyond `most`. Returns their number.

    Those of the owner with the most connections are closed first, its longest silent before
    the others, so a flood by one user ends no connection of another. `owner_of` gets the far
    and the near end of a connection.
    """
    if len(_list_descriptors()) <= most:  # much faster than inspecting each
        return 0
    silent_ms: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for sock, far in _connected(port):
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        since_ms = int.from_bytes(info[LAST_DATA_RECV : LAST_DATA_RECV + 4], sys.byteorder)
        owner = owner_of(far, socket_end(sock.getsockname()))
        silent_ms[owner].append((since_ms, far.port))
    # The newest of each owner, then the second of each, and so on.
    ranked = sorted(
        (rank, one) for owned in silent_ms.values() for rank, one in enumerate(sorted(owned))
    )
    surplus = {peer_port for _, (_, peer_port) in ranked[most:]}
    return sum(_end(sock) for sock, far in _connected(port) if far.port in surplus)


def confirmed_bytes(port: int, peer_port: int) -> int | None:
    """Return the sent bytes that the peer has acknowledged, None if it is not connected."""
    confirmed = None
    for sock, far in _connected(port):
        if far.port == peer_port:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            confirmed = int.from_bytes(info[BYTES_ACKED:TCP_INFO_BYTES], sys.byteorder)
    return confirmed


def _end(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
        return True
    return False


def _connected(port: int) -> Iterator[tuple[socket.socket, SocketEnd]]:
    """Yield each connection with its far end, which the socket forgets after a reset."""
    for descriptor in _list_descriptors():
        with spare_descriptor(SPARE).duplicate(descriptor) as sock:
            if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                if sock.getsockname()[1] != port:
                    continue
                far = socket_end(sock.getpeername())
            except OSError:  # the listener, or a connection that was reset
                continue
            yield sock, far


def _list_descriptors() -> list[int]:
    try:
        return [int(entry.name) for entry in DESCRIPTORS.iterdir()]
    except OSError:  # the list itself needs a descriptor
        return list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
