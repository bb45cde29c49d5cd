"""`polybus rqueue sink` and `pusher` as processes: their output and exit codes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from polybus.dialects.rqueue.client.throughput_meter import ThroughputMeter
from polybus.testing.bus_process import POLYBUS, BusProcess, rqueue, run

PATIENCE_S = 50
SUMMARY = re.compile(
    r"(\w+) (\d+) messages, (\d+) bytes, [\d.]+ s: [\d,]+ messages/s, [\d,.]+ MB/s"
)


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with rqueue() as one:
        yield one


@contextmanager
def sink(bus: BusProcess, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Start a sink, and wait until it has subscribed: it received a first message."""
    command = [*POLYBUS, "rqueue", "sink", "--port", str(bus.address().port), *args]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def push(bus: BusProcess, *args: str) -> subprocess.CompletedProcess[str]:
    return run("rqueue", "pusher", "--port", str(bus.address().port), *args, timeout_s=PATIENCE_S)


def push_until_seen(bus: BusProcess, process: subprocess.Popen[str], topic: str) -> None:
    """Push until the sink reports a message."""
    assert process.stdout is not None
    args = ["--topic", topic, "--rate", "1000", "--size", "8"]
    pusher = subprocess.Popen(
        [*POLYBUS, "rqueue", "pusher", "--port", str(bus.address().port), *args],
        stdout=subprocess.DEVNULL,
    )
    try:
        assert "messages/s" in process.stdout.readline()
    finally:
        pusher.send_signal(signal.SIGINT)
        assert pusher.wait(PATIENCE_S) == 0


def totals(out: str) -> tuple[str, int, int]:
    """Verb, messages and bytes of the summary, which is the last line."""
    found = SUMMARY.fullmatch(out.splitlines()[-1])
    assert found, out
    return found[1], int(found[2]), int(found[3])


def test_pusher_sends_count_messages_of_the_given_size(bus, topic):
    done = push(bus, "--topic", topic, "--count", "5000", "--size", "100")
    assert (done.returncode, totals(done.stdout)) == (0, ("sent", 5000, 500_000))
    done = push(bus, "--topic", topic, "--count", "20", "--size", "5000", "--rate", "1000")
    assert (done.returncode, totals(done.stdout)) == (0, ("sent", 20, 100_000))


def test_sink_ends_after_count_messages(bus, topic):
    with sink(bus, "--topic", topic, "--count", "2500", "--size", "64") as process:
        while process.poll() is None:
            push(bus, "--topic", topic, "--count", "1000", "--size", "64")
        out, err = process.communicate()
        assert (process.returncode, totals(out), err) == (0, ("received", 2500, 160_000), "")


def test_sink_rejects_a_message_of_another_size(bus, topic):
    with sink(bus, "--topic", topic, "--count", "10", "--size", "64") as process:
        while process.poll() is None:
            push(bus, "--topic", topic, "--count", "10", "--size", "63")
        out, _ = process.communicate()
        assert process.returncode == 1
        assert "must have 64 bytes each" in out


@pytest.mark.parametrize(("count", "code"), [("0", 0), ("1000000000", 130)])
def test_ctrl_c_ends_the_sink_with_a_summary(bus, topic, count, code):
    with sink(bus, "--topic", topic, "--count", count) as process:
        push_until_seen(bus, process, topic)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (code, "")
        assert totals(out)[1] > 0


def test_sink_exits_3_when_the_server_closes(topic):
    with rqueue() as bus, sink(bus, "--topic", topic) as process:
        push_until_seen(bus, process, topic)
        bus.close()
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3
        assert totals(out)[0] == "received"
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["sink", "pusher"])
def test_missing_server_is_reported_in_one_line(command):
    done = run("rqueue", command, "--port", "1")
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"polybus: cannot connect to tcp://127.0.0.1:1.*\n", done.stderr)


@pytest.mark.parametrize(
    "args", [("--size", "x"), ("--port", "0"), ("--rate", "-1"), ("--topic", ""), ("--nope",)]
)
def test_invalid_flags_are_reported_in_one_line(bus, args):
    port = () if "--port" in args else ("--port", str(bus.address().port))
    done = run("rqueue", "pusher", "--count", "1", *port, *args)
    assert (done.returncode, done.stdout.count("\n")) == (2, 0 if "--topic" not in args else 1)
    assert len(done.stderr.splitlines()) == 1


def test_pusher_imports_no_heavy_module(bus, topic):
    port = str(bus.address().port)
    args = ["rqueue", "pusher", "--port", port, "--topic", topic, "--count", "1"]
    text = f"""
import sys
from polybus.cli.main import run
assert run({args!r}) == 0
heavy = {{"pyarrow", "zmq", "lmdb", "google", "rich", "structlog"}} & set(sys.modules)
sys.exit(f"loaded: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


class TestTally:
    def test_meter_reports_rates_per_interval_and_in_total(self):
        now_s = 100.0
        tally = ThroughputMeter("sent", clock=lambda: now_s)
        assert tally.interval() is None
        tally.add(10, 1000)
        now_s = 102.0
        assert tally.interval() == "5 messages/s, 0.0 MB/s"
        tally.add(100, 8_000_000)
        now_s = 104.0
        assert tally.interval() == "50 messages/s, 4.0 MB/s"
        assert (
            tally.summary() == "sent 110 messages, 8001000 bytes, 4.00 s: 28 messages/s, 2.0 MB/s"
        )

    def test_meter_without_messages_has_a_summary(self):
        assert (
            ThroughputMeter("sent")
            .summary()
            .endswith("0 messages, 0 bytes, 0.00 s: no time to measure")
        )
