"""HTTP/2 rapid reset: streams that the client cancels as soon as it has opened them.

gRPC's server inside pyarrow gives each call a thread and bounds neither calls nor streams, so
these streams once cost 16,000 threads and more than a gigabyte. The listener in front of gRPC
passes resets on at a bounded rate and cuts a connection that resets too many (ADR 0043), and
gRPC bounds the streams of a connection (ADR 0037).
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from polybus import native
from polybus.model.limits import NativeLimits
from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.peak_meter import MAX_GROWTH_BYTES, MIB, PeakMeter
from tests.attack.whole_bus import check_served, serve_all
from tests.rig.certificates import trusting, write_certificate
from tests.rig.http2_client import MAX_CONCURRENT_STREAMS, Http2Client, call_headers, grpc_message
from tests.rig.observer import check_unharmed, count, until
from tests.rig.soak_runs import SoakRun

SHORT_S, LONG_S = 3.0, 60.0
BURST = 100
KINDS = ("put", "action", "headers")
CROWD, LARGE_CROWD = 16, 64  # connections that attack at the same time
CALLS = NativeLimits().max_streams  # of a connection
MAX_THREADS = 128  # above an idle bus
# gRPC's own memory for streams that it refuses: 1 MiB in most runs, up to 298 in some; without
# its bounds 4 GiB in three seconds.
MAX_HEADERS_BYTES = 400 * MIB
# The log writes 20 lines of a kind per second, and one with the number of the others.
MAX_LINES_PER_S = 21
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


def reset_streams(
    bus: BusProcess, seconds: float, kind: str, crowd: int = 1, tls: ssl.SSLContext | None = None
) -> dict[str, float]:
    """Attack for some seconds, with a new connection whenever one is cut. Returns figures."""
    addresses = [address for name, address in bus.listeners if name == "native"]
    (port,) = [one.port for one in addresses if one.is_encrypted == (tls is not None)]
    lines_before = len(bus.log().splitlines())
    end_s = time.monotonic() + seconds

    def attack(_: int) -> tuple[int, int]:
        streams = connections = 0
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), Http2Client(port, tls) as client:
                connections += 1
                if tls is None:
                    client.drain()
                client.socket.settimeout(SEND_TIMEOUT_S)
                while time.monotonic() < end_s:
                    if tls is not None:
                        client.skip_received()
                    if kind == "put":
                        client.reset_burst(BURST, PUT)
                    elif kind == "action":
                        client.reset_burst(BURST, ACTION, STATS, ends=True)
                    else:
                        client.open_burst(BURST, ACTION)
                    streams += BURST
        return streams, connections

    with Bystander(bus) as bystander, PeakMeter(bus) as peak, ThreadPoolExecutor(crowd) as pool:
        streams, connections = map(sum, zip(*pool.map(attack, range(crowd)), strict=True))
    assert streams > BURST
    assert peak.threads <= MAX_THREADS, f"{peak.threads} threads above an idle bus"
    peak.check_memory(MAX_HEADERS_BYTES if kind == "headers" else MAX_GROWTH_BYTES)
    bystander.check_served()
    lines = bus.log().splitlines()[lines_before:]
    assert all(line.startswith("{") for line in lines), "gRPC writes to the log of the bus"
    assert len(lines) <= MAX_LINES_PER_S * (seconds + 2), f"{len(lines)} lines of log"
    return {
        "streams": streams,
        "connections": connections,
        **peak.figures(),
        **bystander.figures(),
    }


def test_streams_of_a_connection_are_bounded(bus):
    with Http2Client(bus.address("native").port) as client:
        assert client.settings[MAX_CONCURRENT_STREAMS] == CALLS


EXPECTED = "(threads|MiB) above an idle bus"
# Bounded by the streams of the connections, so it does not take all threads of the host.
UNPACED = pytest.mark.sabotage("resets-unpaced", expects=EXPECTED, tries=3)
UNBOUNDED = pytest.mark.sabotage("grpc-unbounded", expects=EXPECTED, tries=3)  # costs no threads


@pytest.mark.parametrize("kind", ["put", "action", pytest.param("headers", marks=UNBOUNDED)])
def test_rapid_reset_costs_neither_threads_nor_memory(bus, kind):
    """Reset puts, reset actions that are complete, and headers of actions that never follow."""
    reset_streams(bus, SHORT_S, kind)


@pytest.mark.parametrize("kind", [pytest.param("put", marks=UNPACED), "action", "headers"])
def test_rapid_reset_over_many_connections_is_bounded(bus, kind):
    reset_streams(bus, SHORT_S, kind, CROWD)


@pytest.mark.parametrize("kind", ["put", "action"])
def test_rapid_reset_over_tls_is_bounded(kind, tmp_path):
    cert, key = write_certificate(tmp_path)
    config = f"[tls]\ncertificate = '{cert}'\nkey = '{key}'\n"
    with serve_all("--listen", "native=grpc+tls://127.0.0.1:0", config=config) as bus:
        check_served(bus)
        reset_streams(bus, SHORT_S, kind, CROWD, trusting(cert))
        check_served(bus)
        check_unharmed(bus)


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


@pytest.mark.parametrize(("clients", "calls"), [(200, 1), (1, 48), (4, 48)])
def test_clients_that_call_in_one_moment_are_served(bus, clients, calls):
    """The gate refuses no call of a client that cancels none, however many there are."""
    ready = Barrier(clients * calls)

    def call(client: native.Client) -> list[str]:
        ready.wait()
        return [topic["topic"] for topic in client.topics()]

    url = f"polybus://127.0.0.1:{bus.address('native').port}"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(clients * calls) as pool:
        callers = [stack.enter_context(native.Client(url)) for _ in range(clients)]
        answers = list(pool.map(call, callers * calls))
    assert answers == [[]] * (clients * calls)
    assert count(bus, "refused", "native_limit_reached") == 0


@pytest.mark.soak
@pytest.mark.parametrize("crowd", [1, CROWD, LARGE_CROWD])
@pytest.mark.parametrize("kind", KINDS)
def test_rapid_reset_for_a_minute(bus, kind, crowd):
    run = SoakRun(f"attack/test_rapid_reset.py ({kind}, {crowd})", 0)
    run.record(**reset_streams(bus, LONG_S, kind, crowd))
