"""What can be set on a GSB client, with the reason for each default."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from polybus.dialects.gsb import codec
from polybus.errors import UsageError
from polybus.model.address import Address
from polybus.model.limits import MIB
from polybus.model.socket_path import find_socket

SOCKET_NAME = "gsb.sock"
DEFAULT_TCP = "tcp://127.0.0.1:6569"
MAX_DEADLINE_S = 0xFFFF_FFFF / 1000  # the hello has 32 bits, for milliseconds


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # How long the bus waits for the next reply of a call; None: its own default, 60 s.
    deadline_s: float | None = None
    # Should be the bus's own: a larger call or reply is refused here, before it is sent.
    max_packet_bytes: int = codec.DEFAULT_MAX_PACKET_BYTES
    # Each stream has a connection of its own, up to so many; more of them share.
    stream_connections: int = 16
    # What a stream has received and nobody has read. Then its connection is left alone,
    # so that the service feels it. If it shares it, and others wait there, it is read on,
    # up to `cut_unread_bytes`: then the fullest stream is cut. A subscription that holds
    # so much loses what comes next, counted.
    max_unread_bytes: int = 4 * MIB
    cut_unread_bytes: int = 64 * MIB
    # Calls that are answered at once; one more is told that the service is busy.
    max_calls: int = 10_000
    # Threads for services that are plain functions.
    threads: int = 16
    # Finding the bus, and its first answer.
    connect_timeout_s: float = 10.0
    # How long a call waits for a connection that is down.
    wait_timeout_s: float = 30.0
    # How long a request without a deadline of its own (register, subscribe, …) waits.
    answer_timeout_s: float = 30.0
    # After a lost connection: come back, and register again.
    reconnect: bool = True
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    # For tls+tcp://; None: the system's certificates.
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_packet_bytes",
            "stream_connections",
            "max_unread_bytes",
            "max_calls",
            "threads",
            "connect_timeout_s",
            "wait_timeout_s",
            "answer_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0")
        if self.deadline_s is not None and not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise UsageError(f"deadline_s must be more than 0 and at most {MAX_DEADLINE_S:g}")
        if self.cut_unread_bytes < self.max_unread_bytes:
            raise UsageError("cut_unread_bytes must be at least max_unread_bytes")
        if not 0 < self.backoff_first_s <= self.backoff_max_s:
            raise UsageError("backoff_first_s must be more than 0 and at most backoff_max_s")

    @property
    def deadline_ms(self) -> int:
        """As the hello has it; 0 is the bus's default."""
        return 0 if self.deadline_s is None else max(1, round(self.deadline_s * 1000))


def default_address() -> Address:
    """The socket of this user's bus, or of the machine's; without one, the default port."""
    path = find_socket(SOCKET_NAME, os.environ)
    try:
        there = path.exists()
    except OSError:
        there = False
    return Address.parse(f"ipc://{path}" if there else DEFAULT_TCP)
