"""The stop of `polybus serve`: pending output is sent, and no client can delay it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from polybus.testing import bus_process
from polybus.testing.bus_process import POLYBUS, BusProcess, clean_environment
from tests.faults.serve_live import JSON_LOG, admin, answers, child, is_free
from tests.rig import rqueue_client
from tests.rig.observer import connections, log_lines, until


def fill(bus: BusProcess, reader: rqueue_client.Client, writer: rqueue_client.Client) -> int:
    """Publish to a reader that does not read until its outbox has bytes. Returns the count."""
    reader.send(rqueue_client.subscribe(b"t"))
    reader.settle()
    for batch in range(1, 1000):
        writer.send(*(rqueue_client.publish(b"t", b"x" * 1000) for _ in range(100)))
        writer.settle()
        if any(one["outbox_bytes"] for one in connections(bus)):
            return batch * 100
    raise AssertionError("the sockets took 100 MB")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_the_bus_with_exit_code_0(tmp_path, number):
    with (
        bus_process.serve(*JSON_LOG, folder=tmp_path) as bus,
        rqueue_client.connect(bus.address()) as client,
    ):
        client.settle()
        bus.signal(number)
        assert client.to_the_end() == []
        assert bus.wait() == 0
        assert not bus.admin_path.exists()
        assert is_free(bus.address().port)
        assert log_lines(bus, event="stopping", signal=number.name)
        assert log_lines(bus, event="stopped")


def test_pending_output_reaches_the_reader_at_shutdown():
    """A reader that was not reading gets all that was published before the SIGTERM."""
    with bus_process.serve(*JSON_LOG) as bus:
        with (
            rqueue_client.connect(bus.address(), receive_buffer=4096) as reader,
            rqueue_client.connect(bus.address()) as writer,
        ):
            total = fill(bus, reader, writer)
            bus.signal(signal.SIGTERM)
            until(lambda: log_lines(bus, event="stopping"), "the stop")
            assert len(reader.to_the_end()) == total
        assert bus.wait() == 0


def test_shutdown_waits_only_for_connections_with_pending_output():
    """Idle clients and admins are let go at once: the reader has not lost a byte by then."""
    with (
        bus_process.serve(*JSON_LOG, env={"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "8"}) as bus,
        rqueue_client.connect(bus.address(), receive_buffer=4096) as reader,
        rqueue_client.connect(bus.address()) as writer,
        admin(bus) as idle_admin,
    ):
        total = fill(bus, reader, writer)
        bus.signal(signal.SIGTERM)
        assert writer.to_the_end() == []
        assert idle_admin.recv(1) == b""
        assert len(reader.to_the_end()) == total
        assert bus.wait() == 0


def test_reader_that_never_reads_does_not_delay_the_stop():
    with (
        bus_process.serve(*JSON_LOG, env={"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "0.2"}) as bus,
        rqueue_client.connect(bus.address(), receive_buffer=4096) as reader,
        rqueue_client.connect(bus.address()) as writer,
    ):
        fill(bus, reader, writer)
        bus.signal(signal.SIGTERM)
        assert bus.wait(timeout_s=10) == 0


def test_second_signal_exits_at_once():
    with (
        bus_process.serve(*JSON_LOG, env={"POLYBUS_SERVER_DRAIN_TIMEOUT_S": "8"}) as bus,
        rqueue_client.connect(bus.address(), receive_buffer=4096) as reader,
        rqueue_client.connect(bus.address()) as writer,
    ):
        fill(bus, reader, writer)
        bus.signal(signal.SIGTERM)
        until(lambda: log_lines(bus, event="stopping"), "the first signal")
        assert bus.process.poll() is None  # the reader that does not read holds it
        bus.signal(signal.SIGTERM)
        assert bus.wait() == 128 + signal.SIGTERM
        assert log_lines(bus, event="stopping at once")


def test_unread_stdout_and_stderr_do_not_block(tmp_path):
    env = clean_environment(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [*POLYBUS, "serve", "--listen", "rqueue=tcp://127.0.0.1:0"]
    with child(command, env=env, stdout=writer, stderr=writer) as bus:
        os.close(writer)
        until(lambda: answers(tmp_path / "run" / "polybus" / "admin.sock"), "an answer")
        bus.terminate()
        assert bus.wait(20) == 0


def test_closed_standard_streams_are_replaced(tmp_path):
    """A listener that got number 2 would be sent our log."""
    env = clean_environment(tmp_path)
    command = f"exec {' '.join(POLYBUS)} serve --listen rqueue=tcp://127.0.0.1:0 <&- >&- 2>&-"
    with child(["bash", "-c", command], env=env) as bus:
        until(lambda: answers(tmp_path / "run" / "polybus" / "admin.sock"), "an answer")
        streams = [Path(f"/proc/{bus.pid}/fd/{fd}").readlink() for fd in (0, 1, 2)]
        assert streams == [Path(os.devnull)] * 3
        bus.terminate()
        assert bus.wait(20) == 0


def test_sigterm_during_start_is_a_clean_stop(tmp_path):
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
