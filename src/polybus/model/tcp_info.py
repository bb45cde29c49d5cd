"""What Linux counts of a TCP connection: where the numbers are in its struct tcp_info."""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

TCP_INFO_BYTES: Final = 136
# Where bytes_acked and bytes_received (64 bits each) begin.
ACKED: Final = 120
RECEIVED: Final = 128


class TcpByteCounts(NamedTuple):
    """Bytes that have come, and those that the other end has confirmed."""

    received: int
    acked: int


def read_byte_counts(info: bytes) -> TcpByteCounts:
    """Of what getsockopt gives for TCP_INFO."""
    return TcpByteCounts(
        *(int.from_bytes(info[at : at + 8], sys.byteorder) for at in (RECEIVED, ACKED))
    )
