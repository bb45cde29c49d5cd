"""Child processes, admin sockets and their answers, for tests of a live server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess

JSON_LOG = ("--log-format", "json")


@contextlib.contextmanager
def child(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, also when the test fails."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def admin(bus: BusProcess) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(20)
    link.connect(str(bus.admin_path))
    return link


def answers(path: Path) -> bool:
    with contextlib.suppress(Exception):
        return bool(ask(path, "stats"))
    return False
