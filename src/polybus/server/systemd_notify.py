"""Reports the state of the bus to systemd (sd_notify).

With `Type=notify` systemd sets NOTIFY_SOCKET: a datagram socket, by path or, with a leading
'@', in the abstract namespace. Messages are lines of KEY=VALUE. Without the variable nothing
is sent. A message that cannot be sent is logged, and the bus continues.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

VARIABLE = "NOTIFY_SOCKET"


class SystemdNotifier:
    """Sends the state of the bus to the service manager, if there is one."""

    def __init__(self, environ: Mapping[str, str], log: Any) -> None:
        self._target = _target(environ.get(VARIABLE, ""))
        self._log = log

    def ready(self, listeners: int) -> None:
        self._send_state(f"READY=1\nSTATUS=Serving on {listeners} listeners\nMAINPID={os.getpid()}")

    def reloading(self) -> None:
        # systemd requires the time, to distinguish the READY of this reload from an earlier one.
        self._send_state(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send_state("STOPPING=1\nSTATUS=Draining")

    def _send_state(self, text: str) -> None:
        if self._target is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), self._target)
        except OSError as error:
            self._log.warning("systemd not told", socket=str(self._target), reason=error.strerror)


def _target(text: str) -> str | bytes | None:
    if text.startswith("@"):
        return b"\0" + os.fsencode(text[1:])
    return text or None
