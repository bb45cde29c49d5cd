"""Whether a connection still moves: how much has come and gone by it, as the kernel counts.

A message of 64 MiB takes a slow link longer than an answer may take. ZeroMQ tells of it when
it is whole; the kernel tells that it is on its way.
"""

from __future__ import annotations

import os
import socket
from typing import Final, NamedTuple

from polybus.model import tcp_info

MIN_PROGRESS_BYTES: Final = 16 << 10  # between two looks: less is no large message on its way


class TransferMark(NamedTuple):
    """What has come and gone by the connection that has this descriptor."""

    fd: int
    moved: int


def read_mark(fd: int) -> TransferMark:
    """Nothing moves by what is no TCP connection, or has ended."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.TCP_INFO_BYTES)
    except OSError:
        return TransferMark(fd, 0)
    return TransferMark(fd, sum(tcp_info.read_byte_counts(info)))


def has_moved(before: TransferMark, now: TransferMark) -> bool:
    """Another connection has begun with nothing."""
    return now.moved - (before.moved if before.fd == now.fd else 0) >= MIN_PROGRESS_BYTES
