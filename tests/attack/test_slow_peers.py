"""Peers that never finish, and peers that vanish: they hold little, and no other client waits.

- *Slowloris*: many connections to every port send a valid opening and then half a frame, a byte
  at a time, or nothing at all.
- *Half-open*: the peer's host is gone, so neither FIN nor RST arrives. A socket in TCP's repair
  mode closes that way; the bus learns of it when it next sends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.peak_meter import PeakMeter
from tests.attack.port_fuzzer import Port, open_ports
from tests.attack.whole_bus import check_served, serve_all
from tests.rig import gsb_peer, rqueue_client
from tests.rig.observer import check_unharmed, connections, open_descriptors, until
from tests.rig.soak_runs import SoakRun

SHORT_CONNECTIONS, LONG_CONNECTIONS = 20, 400  # per port
SHORT_ROUNDS, LONG_ROUNDS = 12, 300  # a byte of each connection
# gRPC keeps most: buffers for HTTP/2 of a connection. The stream dialects share one buffer.
MAX_BYTES_PER_CONNECTION = 512 * 1024
TCP_REPAIR = 19
HALF_OPEN = 50


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serve_all() as running:
        yield running
        check_unharmed(running)


def send_slowly(bus: BusProcess, per_port: int, rounds: int) -> dict[str, float]:
    """Hold slow connections to every port while a bystander works. Returns counts."""
    ports = open_ports(bus)
    check_served(bus)  # every part has its memory before the first measurement
    descriptors = open_descriptors(bus.pid)
    with Bystander(bus) as bystander, PeakMeter(bus) as peak, ExitStack() as stack:
        slow = [
            (stack.enter_context(port.connect()), port)
            for port in ports
            # These peers are admins and may fill the admin socket; test_floods.py has others.
            for _ in range(SHORT_CONNECTIONS if port.name == "admin" else per_port)
        ]
        streams = [(sock, iter(_half_stream(port, n))) for n, (sock, port) in enumerate(slow)]
        for _ in range(rounds):
            for sock, stream in streams:
                _send_byte(sock, stream)
            check_served(bus)
    grown = peak.growth_bytes
    assert grown / len(slow) < MAX_BYTES_PER_CONNECTION, f"{grown} bytes for {len(slow)} peers"
    bystander.check_served()
    until(lambda: open_descriptors(bus.pid) <= descriptors, "descriptors of closed peers are freed")
    return {"connections": len(slow), **peak.figures(), **bystander.figures()}


def _half_stream(port: Port, number: int) -> bytes:
    """Return the opening and half a frame; every third peer stays silent after the opening."""
    longest = max(port.frames, key=len)
    return port.opening + (b"" if number % 3 == 0 else longest[: len(longest) // 2])


def _send_byte(sock: socket.socket, stream: Iterator[int]) -> None:
    for byte in stream:
        try:
            sock.send(bytes([byte]))
        except OSError:
            pass  # the bus has cut this peer
        return


@pytest.mark.sabotage("buffer-per-connection", expects="bytes for [0-9]+ peers")
def test_peers_that_never_finish_delay_no_other(bus: BusProcess) -> None:
    send_slowly(bus, SHORT_CONNECTIONS, SHORT_ROUNDS)


@pytest.mark.soak
def test_many_peers_that_never_finish_delay_no_other(bus: BusProcess) -> None:
    run = SoakRun("attack/test_slow_peers.py", 0)
    run.record(**send_slowly(bus, LONG_CONNECTIONS, LONG_ROUNDS))


@pytest.mark.sabotage("lost-connections-stay", expects="no packet before the timeout")
@pytest.mark.skipif(os.getuid() != 0, reason="needs root for TCP's repair mode")
def test_half_open_peers_are_removed_when_the_bus_sends(bus: BusProcess) -> None:
    subscribed, services = [], []
    for number in range(HALF_OPEN):
        client = rqueue_client.connect(bus.address("rqueue"))
        client.send(rqueue_client.subscribe(b"news"))
        client.settle()
        subscribed.append(client.sock)
        peer = gsb_peer.connect(bus.address("gsb"))
        assert peer.register(f"service{number}") == 0
        services.append(peer.socket)
    for sock in (*subscribed, *services):
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        sock.close()
    assert len(connections(bus)) >= 2 * HALF_OPEN, "the bus has noticed before it sent anything"
    with rqueue_client.connect(bus.address("rqueue")) as publisher:
        publisher.send(rqueue_client.publish(b"news", b"hello"))
        publisher.settle()
    with gsb_peer.connect(bus.address("gsb")) as caller:
        for number in range(HALF_OPEN):
            caller.send(gsb_peer.call(f"service{number}", str(number)))
        codes = {caller.reply().code for _ in range(HALF_OPEN)}
        assert 0 not in codes, "a call to a peer that is gone was answered as done"
    until(lambda: len(connections(bus)) == 0, "half-open peers are removed")
    check_served(bus)
