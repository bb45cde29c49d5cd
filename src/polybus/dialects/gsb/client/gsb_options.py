"""Options of a GSB client, with the reason for each default."""

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
MAX_DEADLINE_S = 0xFFFF_FFFF / 1000  # 32 bits of milliseconds in the hello


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # How long the bus waits for the next reply of a call. None: its default, 60 s.
    deadline_s: float | None = None
    # Should equal the bus's limit: a larger call or reply is refused before it is sent.
    max_packet_bytes: int = codec.DEFAULT_MAX_PACKET_BYTES
    # Connections for streams: one per stream, and shared beyond this number.
    stream_connections: int = 16
    # Received and unread bytes of a stream. Over this its connection is not read, so that
    # back-pressure reaches the service. A shared connection on which others wait is read up to
    # `cut_unread_bytes`; then the stream with the most unread bytes is cut. A subscription over
    # `max_unread_bytes` drops new messages and counts them.
    max_unread_bytes: int = 4 * MIB
    cut_unread_bytes: int = 64 * MIB
    # Concurrent calls to the services of this client. More are refused as busy.
    max_calls: int = 10_000
    # Threads for services that are plain functions.
    threads: int = 16
    # Connecting, with the first answer of the bus.
    connect_timeout_s: float = 10.0
    # How long a call waits for a connection that is down.
    wait_timeout_s: float = 30.0
    # How long a request without a deadline of its own (register, subscribe, …) waits.
    answer_timeout_s: float = 30.0
    # Reconnect after a lost connection, and register again.
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
                raise UsageError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.deadline_s is not None and not 0 < self.deadline_s <= MAX_DEADLINE_S:
            raise UsageError(
                f"deadline_s must be > 0 and <= {MAX_DEADLINE_S:g}, got {self.deadline_s:g}"
            )
        if self.cut_unread_bytes < self.max_unread_bytes:
            raise UsageError("cut_unread_bytes must be >= max_unread_bytes")
        if not 0 < self.backoff_first_s <= self.backoff_max_s:
            raise UsageError("backoff_first_s must be > 0 and <= backoff_max_s")

    @property
    def deadline_ms(self) -> int:
        """The deadline in the hello; 0 is the bus's default."""
        return 0 if self.deadline_s is None else max(1, round(self.deadline_s * 1000))


def default_address() -> Address:
    """Return the socket of this user's or the machine's bus, or else the default port."""
    path = find_socket(SOCKET_NAME, os.environ)
    try:
        exists = path.exists()
    except OSError:
        exists = False
    return Address.parse(f"ipc://{path}" if exists else DEFAULT_TCP)
