"""`stats`, `connections`, the admin socket and the log of a running `polybus serve`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
from collections.abc import Iterator

import pytest

from polybus.server.admin_client import ask
from polybus.testing import bus_process
from polybus.testing.bus_process import POLYBUS, BusProcess, clean_environment
from tests.faults.serve_live import JSON_LOG, admin, answers, child
from tests.rig import rqueue_client
from tests.rig.observer import connections, count, log_lines, stats, until


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    """One bus for all tests that leave it as they found it."""
    with bus_process.serve(*JSON_LOG) as bus:
        yield bus


def test_stats_and_connections_show_traffic(bus):
    with rqueue_client.connect(bus.address()) as client:
        client.send(rqueue_client.subscribe(b"t"))
        client.settle()
        client.send(*(rqueue_client.publish(b"t", b"12345") for _ in range(10)))
        client.messages(10)
        shown = json.loads(bus.run("connections", "--json").stdout)
        assert [(one["dialect"], one["peer"]) for one in shown] == [("rqueue", client.name)]
        table = bus.run("connections").stdout.splitlines()
        assert table[0].split()[:3] == ["id", "dialect", "peer"]
        assert client.name in table[1]
        assert json.loads(bus.run("stats", "--json").stdout)["messages"]["received"] >= 10
        assert re.search(r"^connections\.open +1$", bus.run("stats").stdout, re.MULTILINE)
    until(lambda: connections(bus) == [], "the client to be gone")
    assert bus.run("connections").stdout == "no connections\n"


def test_connections_fit_80_columns(bus):
    controller, terminal = pty.openpty()
    with rqueue_client.connect(bus.address()) as client:
        client.settle()
        command = [*POLYBUS, "connections"]
        env = bus.env | {"COLUMNS": "80", "TERM": "xterm"}
        with child(command, env=env, stdout=terminal) as shown:
            os.close(terminal)
            assert shown.wait(20) == 0
        text = os.read(controller, 65536).decode()
        os.close(controller)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        assert lines[0].split()[:4] == ["id", "dialect", "peer", "who"]
        # Over loopback the kernel reports the peer's uid, which is ours.
        assert any(client.name in line and f"uid:{os.getuid()}" in line for line in lines)
        assert max(map(len, lines)) <= 80


def test_bad_input_on_the_admin_socket_does_not_affect_others(bus):
    with rqueue_client.connect(bus.address()) as client, admin(bus) as link:
        lines = link.makefile("rb")
        for line, code in (
            (b"no json", "bad_request"),
            (b'{"verb": "frob"}', "unknown_verb"),
            (b"[" * 50_000, "bad_request"),
            (b"\xff\xfe", "bad_request"),
        ):
            link.sendall(line + b"\n")
            assert json.loads(lines.readline())["error"]["code"] == code
        with contextlib.suppress(ConnectionError):
            link.sendall(b"a" * (2 << 20))
        assert json.loads(lines.readline())["error"]["code"] == "too_large"
        with contextlib.suppress(ConnectionError):
            assert lines.readline() == b""
        client.settle()


def test_silent_admin_connection_is_closed_after_its_timeout():
    env = {"POLYBUS_SERVER_ADMIN_IDLE_TIMEOUT_S": "0.3"}
    with bus_process.serve(*JSON_LOG, env=env) as bus, admin(bus) as silent, admin(bus) as half:
        half.sendall(b'{"verb": "st')
        for link in (silent, half):
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(100) == b""
        until(lambda: len(log_lines(bus, dialect="admin", reason="idle")) == 2, "both in the log")
        assert stats(bus)["server"]["pid"] == bus.pid


def test_admin_connections_over_the_limit_are_refused_and_counted():
    env = {"POLYBUS_SERVER_MAX_ADMIN_CONNECTIONS": "2"}
    with bus_process.serve(*JSON_LOG, env=env) as bus:
        with admin(bus) as one, admin(bus) as two:
            for link in (one, two):
                link.sendall(b'{"verb": "stats"}\n')
                assert link.recv(1 << 16)
            assert bus.run("stats").returncode == 3
        until(lambda: answers(bus.admin_path), "a place to be free again")
        assert count(bus, "refused", "max_admin_connections") >= 1


def test_connections_over_the_limit_do_not_flood_the_log():
    attempts = 2000
    with (
        bus_process.serve(*JSON_LOG, env={"POLYBUS_LIMITS_MAX_CONNECTIONS": "1"}) as bus,
        rqueue_client.connect(bus.address()) as keeper,
    ):
        keeper.settle()
        for _ in range(attempts):
            with socket.create_connection((bus.address().host, bus.address().port)):
                pass
        until(lambda: count(bus, "refused", "max_connections") == attempts, "all refusals")
        until(lambda: _told(bus) == attempts, "every refusal in the log, by line or by count")
        assert len(log_lines(bus, event="connection refused")) < attempts / 4
        keeper.settle()


def _told(bus: BusProcess) -> int:
    return sum(line.get("repeated", 1) for line in log_lines(bus, event="connection refused"))


def test_unread_stderr_does_not_stop_the_bus(tmp_path):
    """A pipe holds 64 KiB; this bus has far more than that to say, and no process reads it."""
    env = clean_environment(tmp_path) | {"POLYBUS_LOG_MAX_REPEATS_PER_S": "10000"}
    command = [*POLYBUS, "serve", "--listen", "rqueue=tcp://127.0.0.1:0", "--log-level", "debug"]
    with child(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as bus:
        assert bus.stdout is not None
        port = int(bus.stdout.readline().rpartition(":")[2])
        for _ in range(1500):
            with socket.create_connection(("127.0.0.1", port)):
                pass
        admin_path = tmp_path / "run" / "polybus" / "admin.sock"
        until(lambda: ask(admin_path, "stats")["connections"]["accepted"] == 1500, "all served")
        bus.terminate()
        assert bus.wait(20) == 0
