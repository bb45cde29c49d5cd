"""HTTP/2 rapid reset: streams that the client cancels as soon as it has opened them.

gRPC's server inside pyarrow gives each call a thread and bounds neither calls nor streams, so
these streams once cost 16,000 threads and more than a gigabyte. The bus bounds the streams of a
connection and cuts a connection that cancels too many (ADR 0037).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from polybus.model.limits import NativeLimits
from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.whole_bus import check_served, serve_all
from tests.rig.http2_client import MAX_CONCURRENT_STREAMS, Http2Client, call_headers, grpc_message
from tests.rig.observer import check_unharmed, count, rss_bytes, until
from tests.rig.soak_runs import SoakRun

MIB = 1 << 20
SHORT_S, LONG_S = 3.0, 60.0
BURST = 100
MAX_THREADS, MAX_GROWTH = 128, 200 * MIB  # above an idle bus
# gRPC stops reading while it owes too many refusals; the attacker then connects again.
SEND_TIMEOUT_S = 1.0
PUT, ACTION = call_headers("DoPut"), call_headers("DoAction")
STATS = grpc_message(b"\x0a\x05stats")  # an Action: field 1, its type


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serve_all() as running:
        check_served(running)  # every part has its memory and threads before the measurement
        yield running
        check_served(running)
        check_unharmed(running)


def thread_count(bus: BusProcess) -> int:
    status = Path(f"/proc/{bus.pid}/status").read_text()
    return int(status.partition("Threads:")[2].split()[0])


class PeakMeter:
    """Samples threads and memory of a bus while it is attacked."""

    def __init__(self, bus: BusProcess) -> None:
        self._bus = bus
        self._idle = thread_count(bus), rss_bytes(bus.pid)
        self._done = Event()
        self._thread = Thread(target=self._run)
        self.threads = self.growth = 0

    def __enter__(self) -> PeakMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(0.002):
            self.threads = max(self.threads, thread_count(self._bus) - self._idle[0])
            self.growth = max(self.growth, rss_bytes(self._bus.pid) - self._idle[1])


def reset_streams(bus: BusProcess, seconds: float, kind: str) -> dict[str, float]:
    """Attack for some seconds, with a new connection whenever one is cut. Returns figures."""
    port = bus.address("native").port
    streams = connections = 0
    with Bystander(bus) as bystander, PeakMeter(bus) as peak:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), Http2Client(port) as client:
                connections += 1
                client.drain()
                client.socket.settimeout(SEND_TIMEOUT_S)
                while time.monotonic() < end_s:
                    if kind == "put":
                        client.reset_burst(BURST, PUT)
                    elif kind == "action":
                        client.reset_burst(BURST, ACTION, STATS, ends=True)
                    else:
                        client.open_burst(BURST, ACTION)
                    streams += BURST
    assert streams > BURST
    assert peak.threads <= MAX_THREADS, f"{peak.threads} threads above an idle bus"
    assert peak.growth <= MAX_GROWTH, f"{peak.growth >> 20} MiB above an idle bus"
    assert bystander.publish.number, "the bystander was not served"
    assert bystander.stats.number, "the bystander was not served"
    return {
        "streams": streams,
        "connections": connections,
        "threads_max": peak.threads,
        "rss_growth_mb_max": peak.growth >> 20,
        **bystander.figures(),
    }


def test_streams_of_a_connection_are_bounded(bus):
    with Http2Client(bus.address("native").port) as client:
        assert client.settings[MAX_CONCURRENT_STREAMS] == NativeLimits().max_streams


@pytest.mark.sabotage("grpc-unbounded", expects="(threads|MiB) above an idle bus")
@pytest.mark.parametrize("kind", ["put", "action", "headers"])
def test_rapid_reset_costs_neither_threads_nor_memory(bus, kind):
    """Reset puts, reset actions that are complete, and headers of actions that never follow."""
    reset_streams(bus, SHORT_S, kind)


@pytest.mark.sabotage("resets-uncounted", expects="the connection is cut")
def test_connection_that_cancels_too_many_calls_is_cut(bus):
    with Http2Client(bus.address("native").port) as client:
        client.drain()
        client.socket.settimeout(SEND_TIMEOUT_S)

        def is_cut() -> bool:
            with contextlib.suppress(OSError):
                client.reset_burst(BURST, PUT)
            return count(bus, "connections", "closed", "rapid_reset") == 1

        until(is_cut, "the connection is cut")
    until(lambda: count(bus, "refused", "native_rapid_reset"), "refused calls are counted")


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["put", "action", "headers"])
def test_rapid_reset_for_a_minute(bus, kind):
    run = SoakRun(f"attack/test_rapid_reset.py ({kind})", 0)
    run.record(**reset_streams(bus, LONG_S, kind))
