"""Byte counts of a TCP connection in Linux's struct tcp_info."""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

TCP_INFO_BYTES: Final = 136
# Offset of bytes_acked and bytes_received (64 bits each).
ACKED: Final = 120
RECEIVED: Final = 128


class TcpByteCounts(NamedTuple):
    """Bytes received, and bytes acknowledged by the peer."""

    received: int
    acked: int


def read_byte_counts(info: bytes) -> TcpByteCounts:
    """Parse the result of getsockopt(TCP_INFO)."""
    return TcpByteCounts(
        *(int.from_bytes(info[at : at + 8], sys.byteorder) for at in (RECEIVED, ACKED))
    )
