"""`polybus serve` and `polybus rqueue` as real processes: how they start, stop, and refuse to."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus.server.adminclient import ask
from polybus.testing import process, rqueue
from polybus.testing.certificates import trusting, write_certificate
from polybus.testing.process import POLYBUS, BusProcess, StartFailed, clean_environment
from polybus.testing.watch import connections, count, log_lines, stats, until

JSON_LOG = ("--log-format", "json")


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    """One bus for all tests that leave it as they found it."""
    with process.serve(*JSON_LOG) as bus:
        yield bus


@contextlib.contextmanager
def child(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone at the end, also when the test fails."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def start_fails(*args: str, **options) -> StartFailed:
    """How a bus refuses to start: one line, exit code 2, nothing said on stdout."""
    with pytest.raises(StartFailed) as caught:
        process.serve(*args, **options).close()
    failed = caught.value
    assert failed.code == 2
    assert failed.stdout == ""
    assert re.fullmatch(r"polybus: [^\n]+\n", failed.stderr), failed.stderr
    return failed


# --- starting ------------------------------------------------------------------


def test_it_says_where_it_listens_and_then_ready(bus):
    assert [dialect for dialect, _ in bus.listeners] == ["rqueue", "admin"]
    assert bus.address("rqueue").port != 0
    assert str(bus.address("admin")) == f"unix:{bus.runtime}/admin.sock"
    with rqueue.connect(bus.address()) as client:
        client.settle()
    assert stats(bus)["server"]["pid"] == bus.pid


def test_several_addresses_of_one_dialect(tmp_path):
    socket_path = tmp_path / "r.sock"
    listen = ("rqueue=tcp://127.0.0.1:0", "rqueue=tcp://127.0.0.1:0", f"rqueue=unix:{socket_path}")
    with process.serve(listen=listen) as bus:
        places = [address for dialect, address in bus.listeners if dialect == "rqueue"]
        assert len({str(place) for place in places}) == 3
        with rqueue.connect(places[0]) as reader:
            reader.send(rqueue.subscribe(b"t"))
            reader.settle()
            for place in places:
                with rqueue.connect(place) as writer:
                    writer.send(rqueue.publish(b"t", str(place).encode()))
                    writer.settle()
            assert [text for _, text in reader.messages(3)] == [str(p).encode() for p in places]
    assert not socket_path.exists()


def test_rqueue_alone_has_no_data_folder_and_no_admin_socket():
    with process.rqueue() as bus:
        assert [dialect for dialect, _ in bus.listeners] == ["rqueue"]
        assert not bus.data.exists()
        assert not bus.runtime.exists()
        assert bus.run("stats").returncode == 3
    with process.rqueue("--admin", "--max-payload", "4096") as bus:
        assert stats(bus)["server"]["pid"] == bus.pid
        with rqueue.connect(bus.address()) as client:
            client.send(rqueue.subscribe(b"t"), rqueue.publish(b"t", b"x" * 4000))
            assert client.messages(1) == [(b"t", b"x" * 4000)]


def test_the_rqueue_server_does_not_load_what_it_does_not_need():
    with process.rqueue() as bus:
        maps = Path(f"/proc/{bus.pid}/maps").read_text()
    assert "uvloop" in maps  # so that we know the look is worth something
    for heavy in ("pyarrow", "libarrow", "lmdb", "zmq", "grpc", "protobuf"):
        assert heavy not in maps


def test_settings_from_file_environment_and_flags(tmp_path):
    file = tmp_path / "bus.toml"
    file.write_text(
        'listen = ["rqueue=tcp://127.0.0.1:0"]\n[rqueue]\nmax_payload = 1000\n'
        '[log]\nlevel = "debug"\nformat = "human"\n'
    )
    env = {"POLYBUS_RQUEUE_MAX_PAYLOAD": "5000", "POLYBUS_PORT": "tcp://10.0.0.1:1"}
    with process.serve("--config", str(file), *JSON_LOG, listen=(), env=env) as bus:
        with rqueue.connect(bus.address()) as client:
            client.send(rqueue.subscribe(b"t"), rqueue.publish(b"t", b"x" * 4900))
            assert client.messages(1) == [(b"t", b"x" * 4900)]
        until(lambda: log_lines(bus, level="debug", event="connection opened"), "a debug line")
        (warning,) = log_lines(bus, event="ignored variable")
        assert "POLYBUS_PORT" in warning["text"]


def test_modes_of_folders_and_sockets(bus):
    is_root = os.getuid() == 0
    assert stat.S_IMODE(bus.data.stat().st_mode) == 0o700
    assert stat.S_IMODE(bus.runtime.stat().st_mode) == (0o755 if is_root else 0o700)
    assert stat.S_IMODE(bus.admin_path.stat().st_mode) == (0o666 if is_root else 0o600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_bus_of_an_ordinary_user(tmp_path):
    """Its folder and socket are its own; root is an admin there, another user is not let in."""
    home = Path("/tmp") / f"pb-user-{os.getpid()}"
    home.mkdir(mode=0o755)
    os.chown(home, 2000, 2000)
    env = {"XDG_RUNTIME_DIR": "", "TMPDIR": str(home), "POLYBUS_DATA": str(home / "data")}
    as_user = ["setpriv", "--reuid=2000", "--regid=2000", "--clear-groups"]
    try:
        command = [*as_user, *POLYBUS, "serve", "--listen", "rqueue=tcp://127.0.0.1:0"]
        with BusProcess(command, env=env) as bus:
            path = home / "polybus-2000" / "admin.sock"
            assert bus.admin_path == path
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert ask(path, "connections") == []
            as_stranger = ["setpriv", "--reuid=2001", "--regid=2001", "--clear-groups"]
            stranger = subprocess.run(
                [*as_stranger, *POLYBUS, "stats", "--admin", str(path)],
                env=bus.env,
                capture_output=True,
                text=True,
                check=False,
            )
            assert stranger.returncode == 4
            assert "is not for this user" in stranger.stderr
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_a_stranger_on_roots_bus_may_see_the_counters_and_no_more(bus):
    for folder in (bus.folder, bus.folder / "run"):
        folder.chmod(0o755)
    as_stranger = ["setpriv", "--reuid=2000", "--regid=2000", "--clear-groups", *POLYBUS]
    for command, code in (("stats", 0), ("connections", 4)):
        done = subprocess.run(
            [*as_stranger, command, "--admin", str(bus.admin_path)],
            env=bus.env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
    until(lambda: log_lines(bus, event="denied", verb="connections"), "the refusal in the log")


def test_the_soft_limit_on_descriptors_is_raised_to_the_hard_one():
    command = f"ulimit -Sn 100; ulimit -Hn 2000; exec {' '.join(POLYBUS)} rqueue --port 0"
    with BusProcess(["bash", "-c", f"{command} {' '.join(JSON_LOG)}"]) as bus:
        limits = Path(f"/proc/{bus.pid}/limits").read_text()
        assert re.search(r"Max open files +2000 +2000", limits)
        until(lambda: log_lines(bus, event="started"), "its first line in the log")
        (started,) = log_lines(bus, event="started")
        assert (started["descriptors_before"], started["descriptors"]) == (100, 2000)
        assert started["max_connections"] == 2000 - 128
        until(lambda: log_lines(bus, event="max_connections lowered"), "the warning")


# --- refusing to start ------------------------------------------------------------


def test_a_taken_port_is_one_line_and_nothing_is_left_behind(tmp_path):
    with taken_port() as port, socket.socket() as spare:
        spare.bind(("127.0.0.1", 0))
        free = spare.getsockname()[1]
        spare.close()
        socket_path = tmp_path / "r.sock"
        failed = start_fails(
            listen=(
                f"rqueue=tcp://127.0.0.1:{free}",
                f"rqueue=unix:{socket_path}",
                f"rqueue=tcp://127.0.0.1:{port}",
            ),
            folder=tmp_path,
        )
        assert f"tcp://127.0.0.1:{port}" in failed.stderr
        assert is_free(free)
        assert not socket_path.exists()
        assert not (tmp_path / "run" / "polybus" / "admin.sock").exists()
    # The data folder is free again, and the same command works once the port is.
    with process.serve(listen=(f"rqueue=tcp://127.0.0.1:{port}",), folder=tmp_path) as bus:
        assert bus.address().port == port


def test_a_data_folder_in_use_names_its_owner(bus, tmp_path):
    failed = start_fails(env={"POLYBUS_DATA": str(bus.data)}, folder=tmp_path)
    assert f"pid {bus.pid}" in failed.stderr
    assert "polybus://" in failed.stderr
    with rqueue.connect(bus.address()) as client:
        client.settle()  # and the owner has not noticed


def test_a_killed_bus_leaves_nothing_that_stops_the_next(tmp_path):
    with process.serve(folder=tmp_path) as first:
        first.signal(signal.SIGKILL)
        first.wait()
        assert first.admin_path.exists()  # the stale socket
    with process.serve(folder=tmp_path) as second:
        assert stats(second)["server"]["pid"] == second.pid


def test_a_living_admin_socket_is_an_error(bus, tmp_path):
    failed = start_fails(folder=tmp_path, env={"XDG_RUNTIME_DIR": str(bus.folder / "run")})
    assert "a running bus already listens there" in failed.stderr
    assert stats(bus)["server"]["pid"] == bus.pid


def test_a_file_in_the_place_of_a_socket_is_not_touched(tmp_path):
    (tmp_path / "r.sock").write_text("precious")
    failed = start_fails(listen=(f"rqueue=unix:{tmp_path}/r.sock",))
    assert "no socket is in the way" in failed.stderr
    assert (tmp_path / "r.sock").read_text() == "precious"


def test_a_bad_config_is_one_line(tmp_path):
    (tmp_path / "bus.toml").write_text("[limits]\nmax_topics = 'many'\n")
    failed = start_fails("--config", str(tmp_path / "bus.toml"), listen=())
    assert "bus.toml: [limits] max_topics: expected a whole number" in failed.stderr


# --- stopping -----------------------------------------------------------------------


def fill(bus: BusProcess, reader: rqueue.Client, writer: rqueue.Client) -> int:
    """Publish to a reader that does not read until the bus holds bytes for it; how many."""
    reader.send(rqueue.subscribe(b"t"))
    reader.settle()
    for batch in range(1, 1000):
        writer.send(*(rqueue.publish(b"t", b"x" * 1000) for _ in range(100)))
        writer.settle()
        if any(one["outbox_bytes"] for one in connections(bus)):
            return batch * 100
    raise AssertionError("the sockets took 100 MB")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_nothing_is_left(tmp_path, number):
    with process.serve(*JSON_LOG, folder=tmp_path) as bus, rqueue.connect(bus.address()) as client:
        client.settle()
        bus.signal(number)
        assert client.to_the_end() == []
        assert bus.wait() == 0
        assert not bus.admin_path.exists()
        assert is_free(bus.address().port)
        assert log_lines(bus, event="stopping", signal=number.name)
        assert log_lines(bus, event="stopped")


def test_what_a_reader_is_owed_still_reaches_it():
    """A reader that was not reading gets all that was published before the SIGTERM."""
    with process.serve(*JSON_LOG) as bus:
        with (
            rqueue.connect(bus.address(), receive_buffer=4096) as reader,
            rqueue.connect(bus.address()) as writer,
        ):
            total = fill(bus, reader, writer)
            bus.signal(signal.SIGTERM)
            until(lambda: log_lines(bus, event="stopping"), "the stop")
            assert len(reader.to_the_end()) == total
        assert bus.wait() == 0


def test_only_those_who_are_owed_something_are_waited_for():
    """Idle clients and admins are let go at once: the reader has not lost a byte by then."""
    with (
        process.serve(*JSON_LOG, env={"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "8"}) as bus,
        rqueue.connect(bus.address(), receive_buffer=4096) as reader,
        rqueue.connect(bus.address()) as writer,
        admin(bus) as idle_admin,
    ):
        total = fill(bus, reader, writer)
        bus.signal(signal.SIGTERM)
        assert writer.to_the_end() == []
        assert idle_admin.recv(1) == b""
        assert len(reader.to_the_end()) == total
        assert bus.wait() == 0


def test_a_reader_that_never_reads_does_not_hold_up_the_stop():
    with (
        process.serve(*JSON_LOG, env={"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "0.2"}) as bus,
        rqueue.connect(bus.address(), receive_buffer=4096) as reader,
        rqueue.connect(bus.address()) as writer,
    ):
        fill(bus, reader, writer)
        bus.signal(signal.SIGTERM)
        assert bus.wait(timeout_s=10) == 0


def test_a_second_signal_ends_it_at_once():
    with (
        process.serve(*JSON_LOG, env={"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "8"}) as bus,
        rqueue.connect(bus.address(), receive_buffer=4096) as reader,
        rqueue.connect(bus.address()) as writer,
    ):
        fill(bus, reader, writer)
        bus.signal(signal.SIGTERM)
        until(lambda: log_lines(bus, event="stopping"), "the first signal")
        assert bus.process.poll() is None  # the reader that does not read holds it
        bus.signal(signal.SIGTERM)
        assert bus.wait() == 128 + signal.SIGTERM
        assert log_lines(bus, event="stopping at once")


def test_a_stdout_or_stderr_that_nobody_reads_is_no_trouble(tmp_path):
    env = clean_environment(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [*POLYBUS, "serve", "--listen", "rqueue=tcp://127.0.0.1:0"]
    with child(command, env=env, stdout=writer, stderr=writer) as bus:
        os.close(writer)
        until(lambda: _answers(tmp_path / "run" / "polybus" / "admin.sock"), "an answer")
        bus.terminate()
        assert bus.wait(20) == 0


def test_closed_standard_streams_are_not_taken_for_sockets(tmp_path):
    """A listener that got number 2 would be sent our log."""
    env = clean_environment(tmp_path)
    command = f"exec {' '.join(POLYBUS)} serve --listen rqueue=tcp://127.0.0.1:0 <&- >&- 2>&-"
    with child(["bash", "-c", command], env=env) as bus:
        until(lambda: _answers(tmp_path / "run" / "polybus" / "admin.sock"), "an answer")
        streams = [Path(f"/proc/{bus.pid}/fd/{fd}").readlink() for fd in (0, 1, 2)]
        assert streams == [Path(os.devnull)] * 3
        bus.terminate()
        assert bus.wait(20) == 0


def test_a_sigterm_while_it_starts_is_a_clean_stop(tmp_path):
    """Sent at every moment of the start: gone with 0, or by the signal before it was ours."""
    for delay_ms in range(0, 800, 100):
        command = ["timeout", "--preserve-status", f"{delay_ms / 1000 + 0.05:.3f}", *POLYBUS]
        done = subprocess.run(
            [*command, "serve", "--listen", "rqueue=tcp://127.0.0.1:0"],
            env=clean_environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode in (0, 128 + signal.SIGTERM), done.stderr
        if done.returncode == 0:
            assert not (tmp_path / "run" / "polybus" / "admin.sock").exists()


def _answers(path: Path) -> bool:
    with contextlib.suppress(Exception):
        return bool(ask(path, "stats"))
    return False


# --- reloading ------------------------------------------------------------------------


def test_sighup_reloads_the_certificate_and_a_bad_one_changes_nothing(tmp_path):
    certificate, key = write_certificate(tmp_path)
    env = {"POLYBUS_TLS_CERTIFICATE": str(certificate), "POLYBUS_TLS_KEY": str(key)}
    with process.serve(*JSON_LOG, listen=("rqueue=tls://127.0.0.1:0",), env=env) as bus:
        first = trusting(certificate)
        with rqueue.connect(bus.address(), tls=first) as old:
            old.settle()
            write_certificate(tmp_path)
            bus.signal(signal.SIGHUP)
            until(lambda: log_lines(bus, event="reloaded", what="certificates"), "the reload")
            with rqueue.connect(bus.address(), tls=trusting(certificate)) as new:
                new.settle()
            second = trusting(certificate)
            key.write_text("broken")
            bus.signal(signal.SIGHUP)
            until(lambda: log_lines(bus, event="reload failed"), "the refusal")
            with rqueue.connect(bus.address(), tls=second) as new:
                new.settle()
            old.settle()  # was there all the time


def test_sighup_without_anything_to_reload_says_so_and_serves_on(bus):
    with rqueue.connect(bus.address()) as client:
        bus.signal(signal.SIGHUP)
        until(lambda: log_lines(bus, event="reloaded"), "the line in the log")
        client.settle()


# --- systemd ---------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tmp_path, abstract):
    name = f"polybus-notify-{os.getpid()}" if abstract else str(tmp_path / "notify.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(20)
        with process.serve(env={"NOTIFY_SOCKET": f"@{name}" if abstract else name}) as bus:
            assert b"READY=1" in manager.recv(1000)
            bus.signal(signal.SIGHUP)
            assert b"RELOADING=1" in manager.recv(1000)
            assert b"READY=1" in manager.recv(1000)
            bus.signal(signal.SIGTERM)
            assert b"STOPPING=1" in manager.recv(1000)
            assert bus.wait() == 0


# --- looking at it ---------------------------------------------------------------------


def test_stats_and_connections_show_what_happened(bus):
    with rqueue.connect(bus.address()) as client:
        client.send(rqueue.subscribe(b"t"))
        client.settle()
        client.send(*(rqueue.publish(b"t", b"12345") for _ in range(10)))
        client.messages(10)
        shown = json.loads(bus.run("connections", "--json").stdout)
        assert [(one["dialect"], one["peer"]) for one in shown] == [("rqueue", client.name)]
        table = bus.run("connections").stdout.splitlines()
        assert table[0].split()[:3] == ["id", "dialect", "peer"]
        assert client.name in table[1]
        assert json.loads(bus.run("stats", "--json").stdout)["messages"]["received"] >= 10
        assert re.search(r"^connections\.open +1$", bus.run("stats").stdout, re.MULTILINE)
    until(lambda: connections(bus) == [], "the client to be gone")
    assert bus.run("connections").stdout == "nobody is connected\n"


def test_on_a_terminal_of_80_columns_connections_fit(bus):
    controller, terminal = pty.openpty()
    with rqueue.connect(bus.address()) as client:
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
        # Over loopback the kernel says who the peer is: us.
        assert any(client.name in line and f"uid:{os.getuid()}" in line for line in lines)
        assert max(map(len, lines)) <= 80


def admin(bus: BusProcess) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(20)
    link.connect(str(bus.admin_path))
    return link


def test_bad_input_on_the_admin_socket_disturbs_nobody(bus):
    with rqueue.connect(bus.address()) as client, admin(bus) as link:
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


def test_a_silent_admin_connection_is_closed_after_its_time():
    env = {"POLYBUS_SERVER_ADMIN_IDLE_TIMEOUT_S": "0.3"}
    with process.serve(*JSON_LOG, env=env) as bus, admin(bus) as silent, admin(bus) as half:
        half.sendall(b'{"verb": "st')
        for link in (silent, half):
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(100) == b""
        until(lambda: len(log_lines(bus, dialect="admin", reason="idle")) == 2, "both in the log")
        assert stats(bus)["server"]["pid"] == bus.pid


def test_more_admin_connections_than_places_are_refused_and_counted():
    env = {"POLYBUS_SERVER_MAX_ADMIN_CONNECTIONS": "2"}
    with process.serve(*JSON_LOG, env=env) as bus:
        with admin(bus) as one, admin(bus) as two:
            for link in (one, two):
                link.sendall(b'{"verb": "stats"}\n')
                assert link.recv(1 << 16)
            assert bus.run("stats").returncode == 3
        until(lambda: _answers(bus.admin_path), "a place to be free again")
        assert count(bus, "refused", "max_admin_connections") >= 1


def test_a_flood_of_connections_over_the_limit_does_not_flood_the_log():
    attempts = 2000
    with (
        process.serve(*JSON_LOG, env={"POLYBUS_LIMITS_MAX_CONNECTIONS": "1"}) as bus,
        rqueue.connect(bus.address()) as keeper,
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


def test_a_stderr_that_is_never_read_does_not_stop_the_bus(tmp_path):
    """A pipe holds 64 KiB; this bus has far more than that to say, and nobody listens."""
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
