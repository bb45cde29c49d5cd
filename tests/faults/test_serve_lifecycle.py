"""`polybus serve` and `polybus rqueue` as real processes: how they start, reload, and refuse to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from polybus.server.admin_client import ask
from polybus.testing import bus_process
from polybus.testing.bus_process import POLYBUS, BusProcess, StartFailed
from tests.faults.serve_live import JSON_LOG, is_free
from tests.faults.strangers import STRANGERS
from tests.rig import rqueue_client, warm_bus
from tests.rig.certificates import trusting, write_certificate
from tests.rig.observer import log_lines, stats, until


@pytest.fixture(scope="module", autouse=True)
def in_programs_of_their_own() -> Iterator[None]:
    """Start real processes, because these tests are about the start."""
    with warm_bus.cold():
        yield


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    """One bus for all tests that leave it as they found it."""
    with bus_process.serve(*JSON_LOG) as bus:
        yield bus


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


def start_fails(*args: str, **options) -> StartFailed:
    """Start a bus that must refuse: one line on stderr, exit code 2, an empty stdout."""
    with pytest.raises(StartFailed) as caught:
        bus_process.serve(*args, **options).close()
    failed = caught.value
    assert failed.code == 2
    assert failed.stdout == ""
    assert re.fullmatch(r"polybus: [^\n]+\n", failed.stderr), failed.stderr
    return failed


# --- starting ------------------------------------------------------------------


def test_serve_prints_listeners_and_then_ready(bus):
    assert [dialect for dialect, _ in bus.listeners] == ["rqueue", "admin"]
    assert bus.address("rqueue").port != 0
    assert str(bus.address("admin")) == f"unix:{bus.runtime}/admin.sock"
    with rqueue_client.connect(bus.address()) as client:
        client.settle()
    assert stats(bus)["server"]["pid"] == bus.pid


def test_several_addresses_of_one_dialect(tmp_path):
    socket_path = tmp_path / "r.sock"
    listen = ("rqueue=tcp://127.0.0.1:0", "rqueue=tcp://127.0.0.1:0", f"rqueue=unix:{socket_path}")
    with bus_process.serve(listen=listen) as bus:
        places = [address for dialect, address in bus.listeners if dialect == "rqueue"]
        assert len({str(place) for place in places}) == 3
        with rqueue_client.connect(places[0]) as reader:
            reader.send(rqueue_client.subscribe(b"t"))
            reader.settle()
            for place in places:
                with rqueue_client.connect(place) as writer:
                    writer.send(rqueue_client.publish(b"t", str(place).encode()))
                    writer.settle()
            assert [text for _, text in reader.messages(3)] == [str(p).encode() for p in places]
    assert not socket_path.exists()


def test_rqueue_alone_has_no_data_folder_and_no_admin_socket():
    with bus_process.rqueue() as bus:
        assert [dialect for dialect, _ in bus.listeners] == ["rqueue"]
        assert not bus.data.exists()
        assert not bus.runtime.exists()
        assert bus.run("stats").returncode == 3
    with bus_process.rqueue("--admin", "--max-payload", "4096") as bus:
        assert stats(bus)["server"]["pid"] == bus.pid
        with rqueue_client.connect(bus.address()) as client:
            client.send(rqueue_client.subscribe(b"t"), rqueue_client.publish(b"t", b"x" * 4000))
            assert client.messages(1) == [(b"t", b"x" * 4000)]


def test_rqueue_server_imports_only_its_dialect():
    with bus_process.rqueue() as bus:
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
    with bus_process.serve("--config", str(file), *JSON_LOG, listen=(), env=env) as bus:
        with rqueue_client.connect(bus.address()) as client:
            client.send(rqueue_client.subscribe(b"t"), rqueue_client.publish(b"t", b"x" * 4900))
            assert client.messages(1) == [(b"t", b"x" * 4900)]
        until(lambda: log_lines(bus, level="debug", event="connection opened"), "a debug line")
        (warning,) = log_lines(bus, event="ignored variable")
        assert "POLYBUS_PORT" in warning["text"]


def test_modes_of_folders_and_sockets(bus):
    is_root = os.getuid() == 0
    assert stat.S_IMODE(bus.data.stat().st_mode) == 0o700
    assert stat.S_IMODE(bus.runtime.stat().st_mode) == (0o755 if is_root else 0o700)
    assert stat.S_IMODE(bus.admin_path.stat().st_mode) == (0o666 if is_root else 0o600)


@STRANGERS
def test_bus_of_an_ordinary_user(tmp_path):
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
            assert ask(path, "connections") == {"connections": [], "next": None}
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


@STRANGERS
def test_other_user_on_the_bus_of_root_may_read_stats_only(bus):
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


def test_soft_descriptor_limit_is_raised_to_the_hard_one():
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


def test_taken_port_is_one_line_and_leaves_nothing_behind(tmp_path):
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
    with bus_process.serve(listen=(f"rqueue=tcp://127.0.0.1:{port}",), folder=tmp_path) as bus:
        assert bus.address().port == port


@pytest.mark.parametrize("before", [(), ("pirate=tcp://127.0.0.1:0",)], ids=["first", "second"])
def test_taken_zeromq_port_is_one_line(tmp_path, before):
    with taken_port() as port:
        failed = start_fails(listen=(*before, f"pirate=tcp://127.0.0.1:{port}"), folder=tmp_path)
    assert f"tcp://127.0.0.1:{port} is in use by another listener" in failed.stderr


def test_used_data_folder_names_its_owner(bus, tmp_path):
    failed = start_fails(env={"POLYBUS_DATA": str(bus.data)}, folder=tmp_path)
    assert f"pid {bus.pid}" in failed.stderr
    assert "polybus://" in failed.stderr
    with rqueue_client.connect(bus.address()) as client:
        client.settle()  # and the owner has not noticed


def test_killed_bus_does_not_prevent_the_next_start(tmp_path):
    with bus_process.serve(folder=tmp_path) as first:
        first.signal(signal.SIGKILL)
        first.wait()
        assert first.admin_path.exists()  # the stale socket
    with bus_process.serve(folder=tmp_path) as second:
        assert stats(second)["server"]["pid"] == second.pid


def test_used_admin_socket_is_an_error(bus, tmp_path):
    failed = start_fails(folder=tmp_path, env={"XDG_RUNTIME_DIR": str(bus.folder / "run")})
    assert "a running bus already listens there" in failed.stderr
    assert stats(bus)["server"]["pid"] == bus.pid


def test_file_in_place_of_a_socket_is_kept(tmp_path):
    (tmp_path / "r.sock").write_text("precious")
    failed = start_fails(listen=(f"rqueue=unix:{tmp_path}/r.sock",))
    assert "exists and is not a socket" in failed.stderr
    assert (tmp_path / "r.sock").read_text() == "precious"


def test_invalid_config_is_one_line(tmp_path):
    (tmp_path / "bus.toml").write_text("[limits]\nmax_topics = 'many'\n")
    failed = start_fails("--config", str(tmp_path / "bus.toml"), listen=())
    assert "bus.toml: [limits] max_topics: expected a whole number" in failed.stderr


# --- reloading ------------------------------------------------------------------------


def test_sighup_reloads_the_certificate_unless_it_is_invalid(tmp_path):
    certificate, key = write_certificate(tmp_path)
    env = {"POLYBUS_TLS_CERTIFICATE": str(certificate), "POLYBUS_TLS_KEY": str(key)}
    with bus_process.serve(*JSON_LOG, listen=("rqueue=tls://127.0.0.1:0",), env=env) as bus:
        first = trusting(certificate)
        with rqueue_client.connect(bus.address(), tls=first) as old:
            old.settle()
            write_certificate(tmp_path)
            bus.signal(signal.SIGHUP)
            until(lambda: log_lines(bus, event="reloaded", what="certificates"), "the reload")
            with rqueue_client.connect(bus.address(), tls=trusting(certificate)) as new:
                new.settle()
            second = trusting(certificate)
            key.write_text("broken")
            bus.signal(signal.SIGHUP)
            until(lambda: log_lines(bus, event="reload failed"), "the refusal")
            with rqueue_client.connect(bus.address(), tls=second) as new:
                new.settle()
            old.settle()  # was there all the time


def test_sighup_without_files_is_logged(bus):
    with rqueue_client.connect(bus.address()) as client:
        bus.signal(signal.SIGHUP)
        until(lambda: log_lines(bus, event="reloaded"), "the line in the log")
        client.settle()


# --- systemd ---------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified(tmp_path, abstract):
    name = f"polybus-notify-{os.getpid()}" if abstract else str(tmp_path / "notify.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(20)
        with bus_process.serve(env={"NOTIFY_SOCKET": f"@{name}" if abstract else name}) as bus:
            assert b"READY=1" in manager.recv(1000)
            bus.signal(signal.SIGHUP)
            assert b"RELOADING=1" in manager.recv(1000)
            assert b"READY=1" in manager.recv(1000)
            bus.signal(signal.SIGTERM)
            assert b"STOPPING=1" in manager.recv(1000)
            assert bus.wait() == 0
