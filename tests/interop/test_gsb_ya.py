"""Clients of the deployed Golem service bus on a real bus: `gsb+ya=`.

Its client is tests/rig/ya_peer.py, which is written from ya.proto and the framing rule alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest

from polybus import gsb
from polybus.errors import ServiceFailed
from polybus.testing.bus_process import BusProcess, serve
from tests.rig import ya_wire
from tests.rig.byte_feeder import drip, one_by_one
from tests.rig.gsb_network import GsbNetwork
from tests.rig.observer import until
from tests.rig.ya_peer import YaPeer, connect, dial
from tests.rig.ya_wire import (
    BROADCAST,
    BROADCAST_REPLY,
    CALL,
    PARTIAL,
    REPLY,
    SUBSCRIBE,
    Packet,
)
from tests.vectors import ya as golden

STREAM = 5000


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(data) if data else None


@pytest.fixture(scope="module", params=["tcp", "unix"])
def bus(request, tmp_path_factory) -> Iterator[BusProcess]:
    path = tmp_path_factory.mktemp("ya") / "ya.sock"
    ya = f"unix:{path}" if request.param == "unix" else "tcp://127.0.0.1:0"
    with serve(listen=["gsb=tcp://127.0.0.1:0", f"gsb+ya={ya}"]) as bus:
        yield bus


@pytest.fixture
def peer(bus) -> Iterator[YaPeer]:
    with connect(bus.address("gsb+ya")) as peer:
        yield peer


@pytest.fixture
def client(bus) -> Iterator[gsb.blocking.Client]:  # type: ignore[name-defined]
    with gsb.blocking.connect(str(bus.address("gsb"))) as client:
        yield client


def read_stream(peer: YaPeer) -> list[bytes]:
    """Return the data of all replies to a call, the FULL included."""
    items = []
    while True:
        reply = peer.next(REPLY)
        items.append(reply.data(4))
        if reply.number(3) != PARTIAL:
            return items


@contextmanager
def answering(peer: YaPeer, answer: Callable[[Packet], Iterable[bytes]]) -> Iterator[None]:
    """Answer the next call on a thread, with the frames that `answer` returns."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(lambda: peer.send(*answer(peer.next(CALL))))
        yield
        done.result()


def test_its_clients_call_services_of_python(peer, client):
    @client.service("greeter")
    def greet(call: gsb.Call) -> object:
        return {"address": call.address, "data": call.data, "caller": call.caller.split(":")[0]}

    peer.send(ya_wire.call("/local/greeter/Hello", "8526495043095935", b"\x05"))
    reply = peer.next(REPLY)
    assert (reply.text(1), reply.number(2), reply.number(3)) == ("8526495043095935", 0, 0)
    expected = {"address": "greeter/Hello", "data": 5, "caller": "local"}
    assert unpack(reply.data(4)) == expected


def test_python_calls_services_of_its_clients(peer, client):
    assert peer.register("/public/market") == 0

    def answer(request: Packet) -> list[bytes]:
        assert request.text(2) == "/public/market/Get"
        return [ya_wire.reply(request.text(3), request.data(4))]

    with answering(peer, answer):
        assert client.call("public/market/Get", {"n": 1}) == {"n": 1}
    assert "public/market" in [row["id"] for row in client.call("sys/services")]


def test_streams_both_ways(peer, client):
    @client.service("count")
    def count(call: gsb.Call) -> object:
        yield from range(STREAM)

    peer.send(ya_wire.call("/local/count", "1"))
    items = read_stream(peer)
    assert [unpack(item) for item in items] == [*range(STREAM), None]

    assert peer.register("/local/counted") == 0

    def answer(request: Packet) -> Iterator[bytes]:
        for item in range(STREAM):
            yield ya_wire.reply(request.text(3), msgpack.packb(item), kind=PARTIAL)
        yield ya_wire.reply(request.text(3))

    with answering(peer, answer):
        assert list(client.stream("counted")) == [*range(STREAM)]


def test_failures_both_ways(peer, client):
    @client.service("failing")
    def fail(call: gsb.Call) -> object:
        raise gsb.ServiceFailed("no such item", 404)

    peer.send(ya_wire.call("/local/failing", "1"))
    reply = peer.next(REPLY)
    assert (reply.number(2), reply.data(4)) == (400, b"no such item")

    assert peer.register("/local/broken") == 0

    def answer(request: Packet) -> list[bytes]:
        return [ya_wire.reply(request.text(3), b"out of paper", code=500)]

    with answering(peer, answer), pytest.raises(ServiceFailed, match="out of paper"):
        client.call("broken")


def test_replies_of_many_streams_belong_to_their_calls(bus, peer, client):
    @client.service("count")
    def count(call: gsb.Call) -> object:
        yield from range(call.data)

    for number in range(100):
        peer.send(ya_wire.call("/local/count", str(number), msgpack.packb(number)))
    received: dict[str, list[object]] = {}
    open_calls = 100
    while open_calls:
        reply = peer.next(REPLY)
        received.setdefault(reply.text(1), []).append(unpack(reply.data(4)))
        open_calls -= reply.number(3) != PARTIAL
    assert received == {str(number): [*range(number), None] for number in range(100)}


def test_broadcasts_meet_on_a_topic(peer, client):
    assert peer.request(SUBSCRIBE, "news") == 0
    with client.subscribe("news") as news:
        client.broadcast("news", "from here")
        peer.send(ya_wire.frame(BROADCAST, {2: msgpack.packb("from there"), 3: "news"}))
        assert [next(news).data for _ in range(2)] == ["from here", "from there"]
    received = [peer.packet() for _ in range(3)]
    bodies = [unpack(one.data(2)) for one in received if one.kind == BROADCAST]
    assert bodies == ["from here", "from there"]
    assert [one.kind for one in received].count(BROADCAST_REPLY) == 1


def test_recorded_bytes_of_its_clients_byte_by_byte(bus, client):
    """A conversation of recorded frames: hello, register, a call to itself, its reply."""
    frames = ["hello", "register_request", "call_request, no reply", "unregister_request", "ping"]
    with connect(bus.address("gsb+ya")) as other:
        assert other.register("/public/market") == 0
        with dial(bus.address("gsb+ya")) as raw:
            stream = b"".join(golden.BY_NAME[name].frame for name in frames)
            assert drip(raw.socket, one_by_one(stream)) == len(stream)
            kinds = [raw.packet().kind for _ in range(4)]
            assert kinds == [1, 3, 5, 15]
        pushed = other.next(CALL)
        assert (pushed.text(2), pushed.data(4), pushed.number(5)) == ("/public/market", b"x", 1)


def test_bad_input_closes_only_its_connection(bus, peer):
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0", b"\0\0\0\2\xff\xff", ya_wire.frame(14)):
        with dial(bus.address("gsb+ya")) as raw:
            raw.send(data)
            raw.wait_for_end()
    peer.send(ya_wire.call("/local/sys/ping", "1", b"\x01"))
    assert peer.next(REPLY).data(4) == b"\x01"
    closed = json.loads(bus.run("stats", "--json").stdout)["connections"]["closed"]
    assert closed["no_hello"] + closed["no_packet"] >= 4


def test_connections_of_both_framings_are_listed(bus, peer, client):
    rows = json.loads(bus.run("connections", "--json").stdout)
    assert {"gsb", "gsb+ya"} <= {row["dialect"] for row in rows}


def test_slow_caller_does_not_grow_the_bus(bus, client):
    """It reads nothing of an endless stream; the service stops, and its cancel arrives."""
    stopped = threading.Event()

    @client.service("endless")
    def endless(call: gsb.Call) -> object:
        try:
            while True:
                yield b"x" * 10_000
        finally:
            stopped.set()

    slow = connect(bus.address("gsb+ya"), small=True)
    slow.send(ya_wire.call("/local/endless", "1"))

    def is_full() -> bool:
        return bool(json.loads(bus.run("stats", "--json").stdout)["gsb"]["full"])

    until(is_full, "the caller is full")
    client.call("sys/ping", 1)
    slow.close()
    assert stopped.wait(20)


def test_listener_alone_serves_gsb():
    with serve(listen=["gsb+ya=tcp://127.0.0.1:0"]) as bus:
        with connect(bus.address("gsb+ya")) as service, connect(bus.address("gsb+ya")) as caller:
            assert service.register("/local/x") == 0
            caller.send(ya_wire.call("/local/x", "1"))
            service.send(ya_wire.reply(service.next(CALL).text(3), b"done"))
            assert caller.next(REPLY).data(4) == b"done"
        assert bus.stop() == 0


def test_listener_with_tls_uses_the_certificate_of_the_node():
    with (
        serve(listen=["gsb+ya=tls+tcp://127.0.0.1:0"]) as bus,
        connect(bus.address("gsb+ya"), tls=True) as peer,
    ):
        peer.send(ya_wire.call("/local/sys/ping", "1", b"\x01"))
        assert peer.next(REPLY).data(4) == b"\x01"


# --- between nodes


@pytest.fixture(scope="module")
def pair() -> Iterator[GsbNetwork]:
    with GsbNetwork() as net:
        net.start("a")
        net.start("b", links=["a"])
        net.await_nodes(2)
        yield net


def test_calls_over_the_network(pair):
    with connect(pair.ya_address("a")) as caller, connect(pair.ya_address("b")) as service:
        assert service.register("/public/market") == 0
        caller.send(ya_wire.call(f"/net/{pair.ids['b']}/market/Get", "1", b"data"))
        request = service.next(CALL)
        assert (request.text(1), request.text(2)) == (pair.ids["a"], "/public/market/Get")
        partials = [b"%d" % item for item in range(STREAM)]
        with ThreadPoolExecutor(1) as thread:  # clients must read while they send
            items = thread.submit(read_stream, caller)
            for item in partials:
                service.send(ya_wire.reply(request.text(3), item, kind=PARTIAL))
            service.send(ya_wire.reply(request.text(3), b"end"))
            assert items.result() == [*partials, b"end"]


def test_network_calls_between_framings(pair):
    with connect(pair.ya_address("a")) as peer, pair.client("b") as client:

        @client.service("public/greeter")
        def greet(call: gsb.Call) -> object:
            return [call.caller, call.address]

        peer.send(ya_wire.call(f"/net/{pair.ids['b']}/greeter", "1"))
        assert unpack(peer.next(REPLY).data(4)) == [pair.ids["a"], "public/greeter"]

        def answer(request: Packet) -> list[bytes]:
            names = [request.text(1), request.text(2)]
            return [ya_wire.reply(request.text(3), msgpack.packb(names))]

        assert peer.register("/public/echo") == 0
        with answering(peer, answer):
            remote = pair.remote("a", "public/echo/x")
            assert client.call(remote) == [pair.ids["b"], "/public/echo/x"]


def test_unknown_node_and_private_service_are_bad_requests(pair):
    with connect(pair.ya_address("a")) as caller, connect(pair.ya_address("b")) as service:
        assert service.register("/local/private") == 0
        for address in (f"/net/0x{'11' * 20}/x", f"/net/{pair.ids['b']}/private"):
            caller.send(ya_wire.call(address, "1"))
            reply = caller.next(REPLY)
            assert (reply.number(2), reply.data(4)[:4]) == (400, b"404 ")
