"""A TCP port that no process listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port of loopback. Another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
