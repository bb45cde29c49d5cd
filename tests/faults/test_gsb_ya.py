"""Clients of GSB's deployed framing that fail, lose their connection, or do not read.

Each call ends once. A client never gets a packet at which that bus's own clients would end their
connection: an unknown code, a failure that is not UTF-8, a reply without a request.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import pytest

from polybus.testing.bus_process import BusProcess, serve
from tests.faults.gsb_live import SETTINGS, check_no_state_left, tables
from tests.rig import gsb_peer, ya_wire
from tests.rig.gsb_peer import HungUp
from tests.rig.observer import count, rss_bytes, until
from tests.rig.ya_peer import YaPeer, connect, dial
from tests.rig.ya_wire import CALL, PARTIAL, REGISTER, REPLY

ITEM = bytes(64 * 1024)
# The bus holds at most this much for a caller that does not read: its outbox, a few packets.
HELD_BYTES = 24 << 20
ROUNDS, CALLS = 40, 30


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    listen = ("gsb=tcp://127.0.0.1:0", "gsb+ya=tcp://127.0.0.1:0")
    with serve("--engine", "memory:", listen=listen, env=SETTINGS) as bus:
        yield bus


@pytest.fixture
def bus(running: BusProcess) -> Iterator[BusProcess]:
    """The bus that all tests of the module share."""
    yield running
    check_no_state_left(running)


def connect_ya(bus: BusProcess, **options: bool | bytes) -> YaPeer:
    return connect(bus.address("gsb+ya"), **options)  # type: ignore[arg-type]


def connect_gsb(bus: BusProcess) -> gsb_peer.Peer:
    return gsb_peer.connect(bus.address("gsb"))


def reset(peer: YaPeer) -> None:
    """Close with a RST, as a killed host does."""
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()


def test_lost_service_ends_its_calls_after_the_items_that_it_sent(bus):
    with connect_ya(bus) as caller, connect_gsb(bus) as other:
        with connect_ya(bus) as service:
            assert service.register("/local/many") == 0
            caller.send(ya_wire.call("/local/many", "1"))
            other.send(gsb_peer.call("many", "1"))
            for _ in range(2):
                request = service.next(CALL)
                service.send(ya_wire.reply(request.text(3), b"one", kind=PARTIAL))
            assert caller.next(REPLY).data(4) == b"one"
            assert other.reply().data == b"one"
        lost = caller.next(REPLY)
        assert (lost.number(2), lost.number(3), lost.data(4)[:4]) == (500, 0, b"503 ")
        assert other.reply().code == 500


@pytest.mark.sabotage("ya-replace-off", expects="the name is still taken")
def test_client_that_reconnects_gets_its_names_back(bus):
    """The bus has not noticed that the earlier connection is dead: it is silent and open."""
    with connect_ya(bus, instance=b"client") as dead:
        assert dead.register("/local/x") == 0
        with connect_ya(bus, instance=b"client") as again:
            assert again.register("/local/x") == 0, "the name is still taken"
        dead.wait_for_end()


@pytest.mark.sabotage("ya-failures-raw", expects="a client would end its connection")
@pytest.mark.parametrize("data", [b"\x81\xa7message\xa4boom", b"\xff\xfe", b"", b"text"])
def test_failures_are_text_in_utf_8(bus, data):
    with connect_ya(bus) as caller, connect_gsb(bus) as service:
        service.register("failing")
        caller.send(ya_wire.call("/local/failing", "1"))
        service.send(gsb_peer.reply(service.call().request_id, data, code=404))
        reply = caller.next(REPLY)
        assert reply.number(2) in (400, 500), "a client would end its connection"
        reply.text(4)


@pytest.mark.sabotage("pressure-off", expects="the bus accepted every item")
def test_items_for_a_caller_that_never_reads_are_bounded(bus):
    with (
        connect_ya(bus) as service,
        connect_ya(bus, small=True) as caller,
        connect_ya(bus) as other,
    ):
        service.register("/local/many")
        caller.send(ya_wire.call("/local/many", "1"))
        request = service.next(CALL)
        before, most, sent = rss_bytes(bus.pid), 4 * HELD_BYTES // len(ITEM), 0
        service.socket.settimeout(0.5)
        try:
            while sent < most:
                service.send(ya_wire.reply(request.text(3), ITEM, kind=PARTIAL))
                sent += 1
        except TimeoutError:
            pass
        assert sent < most, "the bus accepted every item"
        assert rss_bytes(bus.pid) - before < HELD_BYTES
        other.send(ya_wire.call("/local/sys/ping", "1", b"\x01"))
        assert other.next(REPLY).data(4) == b"\x01"


@pytest.mark.sabotage("ya-hello-off", expects="the bus answered without a hello")
def test_packet_before_the_hello_closes_the_connection(bus):
    before = count(bus, "connections", "closed", "no_hello")
    with dial(bus.address("gsb+ya")) as peer:
        peer.send(ya_wire.frame(REGISTER, {1: "/local/x"}))
        try:
            peer.packet()
            answered = True
        except (HungUp, ConnectionResetError):
            answered = False
        assert not answered, "the bus answered without a hello"
    until(
        lambda: count(bus, "connections", "closed", "no_hello") == before + 1,
        "the close is counted",
    )


class Round:
    """Callers of both framings, services of both, and random ends of connections."""

    def __init__(self, bus: BusProcess, seed: int) -> None:
        self._bus = bus
        self._random = random.Random(seed)
        self.ended: list[tuple[str, int]] = []

    def run(self) -> None:
        """Make CALLS calls to a service there, which ends after some of them."""
        chosen = self._random
        with connect_ya(self._bus) as caller, connect_gsb(self._bus) as native:
            service = connect_ya(self._bus)
            assert service.register("/local/s") == 0
            for number in range(CALLS):
                caller.send(ya_wire.call("/local/s", str(number)))
                native.send(gsb_peer.call("s", str(number)))
            for _ in range(chosen.randrange(2 * CALLS)):
                request = service.next(CALL)
                for _ in range(chosen.randrange(3)):
                    service.send(ya_wire.reply(request.text(3), b"item", kind=PARTIAL))
                if chosen.random() < 0.7:
                    service.send(ya_wire.reply(request.text(3), b"end"))
            chosen.choice((YaPeer.close, reset))(service)
            self.ended += [("ya", number) for number in self._ends(caller)]
            self.ended += [("gsb", number) for number in self._native_ends(native)]

    def _ends(self, caller: YaPeer) -> Iterator[int]:
        """Return the calls in the order of their ends, and check that none has a reply after it."""
        caller.send(ya_wire.frame(ya_wire.PING))
        left = CALLS
        done: set[str] = set()
        while left:
            packet = caller.packet()
            if packet.kind == ya_wire.PONG:
                continue
            assert packet.text(1) not in done, "a reply after the end"
            if packet.number(3) != PARTIAL:
                done.add(packet.text(1))
                left -= 1
                yield int(packet.text(1))

    def _native_ends(self, caller: gsb_peer.Peer) -> Iterator[int]:
        left = CALLS
        while left:
            reply = caller.reply()
            if reply.type != PARTIAL:
                left -= 1
                yield int(reply.request_id)


@pytest.mark.sabotage("ya-gone-off", expects="TimeoutError|no packet before the timeout")
def test_every_call_ends_once_whatever_ends_its_service(bus):
    for seed in range(ROUNDS):
        one = Round(bus, seed)
        one.run()
        both = [(framing, number) for framing in ("gsb", "ya") for number in range(CALLS)]
        assert sorted(one.ended) == both
    until(lambda: tables(bus)["open_calls"] == 0, "no call is open")
