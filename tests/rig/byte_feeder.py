"""Feed bytes in pieces: one by one, or cut at given places.

A stream has no frames: sent bytes can arrive in any pieces, and a reader must give the same
result. `cut` makes the pieces, `feed` passes them to a session's `receive`, and `drip` sends
them over a socket as packets of their own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator

Receive = Callable[[bytes, int, int], int]


def cut(data: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    """`data` in pieces that end at the given offsets; empty pieces are left out."""
    start = 0
    for end in [*sorted(cuts), len(data)]:
        if start < end <= len(data):
            yield data[start:end]
            start = end


def one_by_one(data: bytes) -> Iterator[bytes]:
    return cut(data, range(1, len(data)))


def feed(receive: Receive, pieces: Iterable[bytes]) -> bytes:
    """Pass each piece with the unconsumed bytes before it. Returns the bytes left at the end."""
    held = b""
    for piece in pieces:
        held += piece
        held = held[receive(held, 0, len(held)) :]
    return held


def drip(sock: socket.socket, pieces: Iterable[bytes]) -> int:
    """Send each piece in a packet of its own, so that the kernel does not merge two pieces.

    Stops when the peer closes. Returns the number of bytes sent.
    """
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = 0
    for piece in pieces:
        try:
            sock.sendall(piece)
        except ConnectionError:
            break
        sent += len(piece)
    return sent
