"""Messages to systemd."""

from __future__ import annotations

import os
import socket

import pytest

from polybus.server.systemd_notify import SystemdNotifier


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_fields: object) -> None:
        self.events.append(event)


@pytest.mark.parametrize("abstract", [False, True])
def test_states_are_sent_to_systemd(tmp_path, abstract):
    name = f"polybus-test-{os.getpid()}" if abstract else str(tmp_path / "notify.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        log = Log()
        notifier = SystemdNotifier({"NOTIFY_SOCKET": f"@{name}" if abstract else name}, log)
        notifier.ready(2)
        assert manager.recv(1000).startswith(b"READY=1\n")
        notifier.reloading()
        assert manager.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        notifier.stopping()
        assert manager.recv(1000).startswith(b"STOPPING=1\n")
        assert log.events == []


def test_without_notify_socket_nothing_is_sent():
    log = Log()
    SystemdNotifier({}, log).ready(1)
    SystemdNotifier({"NOTIFY_SOCKET": ""}, log).ready(1)
    assert log.events == []


def test_unreachable_service_manager_is_logged(tmp_path):
    log = Log()
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}, log).ready(1)
    SystemdNotifier({"NOTIFY_SOCKET": "x" * 500}, log).ready(1)
    assert log.events == ["systemd not told", "systemd not told"]
