"""What can be set on an rqueue client, with the reason for each default."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from polybus.dialects.rqueue import codec
from polybus.dialects.rqueue.parts import PartLimits
from polybus.errors import UsageError
from polybus.model.limits import MIB

DEFAULT_ADDRESS = "tcp://127.0.0.1:6567"


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Settings of one client; `connect` takes each as a keyword."""

    # Come back by itself after a lost connection, with all subscriptions.
    reconnect: bool = True
    # Must be the server's --max-payload: over it, the server hangs up and so do we.
    max_payload: int = codec.DEFAULT_MAX_PAYLOAD
    # For tls:// addresses; None means the system's certificates.
    tls: ssl.SSLContext | None = None
    # Received and not yet read: over this the client stops reading from the socket.
    max_inbox_bytes: int = 16 * MIB
    # Name lookup, connecting and the first echo together.
    connect_timeout_s: float = 10.0
    # How long a call waits for a connection that is down.
    wait_timeout_s: float = 30.0
    # How long a call waits for the server to get to it; publishers may be held up for a while.
    echo_timeout_s: float = 30.0
    # Reconnecting starts quickly, doubles, and stays polite to a bus that is down for long.
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    # Bounds on messages that arrive in parts.
    parts: PartLimits = PartLimits()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        codec.check_max_payload(self.max_payload)
        for name in ("max_inbox_bytes", "connect_timeout_s", "wait_timeout_s", "echo_timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be more than 0")
        if not 0 < self.backoff_first_s <= self.backoff_max_s:
            raise UsageError("backoff_first_s must be more than 0 and at most backoff_max_s")
