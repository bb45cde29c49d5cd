"""Real nng sockets, `pynng.Pair0`, as callers and services of a bus."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynng
import pytest

from polybus import gsb
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.testing.bus_process import BusProcess, serve
from tests.rig.gsb_peer import call, cancel, hello, packet, partial, reply
from tests.rig.observer import check_unharmed, stats, until

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_MS = 20_000
PATIENCE_S = 60


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    # A short path, because the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder:
        listen = ("gsb=tcp://127.0.0.1:0", f"gsb=ipc://{folder}/gsb.sock")
        with serve("--engine", "memory:", listen=listen) as running:
            yield running


@pytest.fixture(params=["tcp", "ipc"])
def address(bus: BusProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    yield next(str(place) for _, place in bus.listeners if place.scheme == request.param)
    until(lambda: stats(bus)["gsb"]["connections"] == 0, "all connections end")
    left = stats(bus)["gsb"]
    assert (left["services"], left["open_calls"], left["serving"]) == (0, 0, 0)
    check_unharmed(bus)


def dialled(address: str) -> Any:
    return pynng.Pair0(
        dial=address,
        block_on_dial=True,
        recv_timeout=TIMEOUT_MS,
        send_timeout=TIMEOUT_MS,
        recv_max_size=0,
    )


def receive(socket: Any, kind: str) -> Any:
    packet = pb.Packet.FromString(socket.recv())
    assert packet.WhichOneof("kind") == kind, packet
    return getattr(packet, kind)


def register(socket: Any, name: str) -> None:
    socket.send(packet("register_request", service_id=name))
    assert receive(socket, "register_reply").code == 0


@pytest.mark.parametrize("size", [0, 1, 100, 65_536, 5_000_000])
def test_call_between_two_nng_sockets(address, size):
    with dialled(address) as service, dialled(address) as caller:
        register(service, "echo")
        caller.send(call("echo", "1", b"q" * size))
        request = receive(service, "call_request")
        assert request.data == b"q" * size
        assert request.caller.startswith("local:")
        service.send(partial(request.request_id, b"p" * size))
        service.send(reply(request.request_id, b"a" * size))
        assert receive(caller, "call_reply").data == b"p" * size
        assert receive(caller, "call_reply").data == b"a" * size


def test_a_thousand_concurrent_calls(address):
    with dialled(address) as service, dialled(address) as caller:
        register(service, "echo")

        def answer() -> None:
            for _ in range(1000):
                request = receive(service, "call_request")
                service.send(reply(request.request_id, request.data))

        thread = threading.Thread(target=answer)
        thread.start()
        for number in range(1000):
            caller.send(call("echo", str(number), b"%d" % number))
        answers = [receive(caller, "call_reply") for _ in range(1000)]
        thread.join()
        assert [(answer.request_id, answer.data) for answer in answers] == [
            (str(number), b"%d" % number) for number in range(1000)
        ]


def test_long_stream_without_credits_arrives_completely(address):
    with dialled(address) as service, dialled(address) as caller:
        register(service, "many")
        caller.send(call("many", "1"))
        request = receive(service, "call_request")

        def send() -> None:
            for number in range(3000):
                service.send(partial(request.request_id, b"%d" % number + bytes(2000)))
            service.send(reply(request.request_id))

        thread = threading.Thread(target=send)
        thread.start()
        for number in range(3000):
            assert receive(caller, "call_reply").data == b"%d" % number + bytes(2000)
        assert receive(caller, "call_reply").type == 0
        thread.join()


def test_cancelled_stream_ends_at_caller_and_service(address):
    with dialled(address) as service, dialled(address) as caller:
        register(service, "many")
        caller.send(call("many", "1"))
        request = receive(service, "call_request")
        service.send(partial(request.request_id, b"1"))
        assert receive(caller, "call_reply").data == b"1"
        caller.send(cancel("1"))
        assert receive(caller, "call_reply").code == 500
        assert receive(service, "cancel").request_id == request.request_id


def test_hello_ping_subscribe_and_broadcast(address):
    with dialled(address) as subscriber, dialled(address) as sender:
        subscriber.send(hello(deadline_ms=1000))
        subscriber.send(packet("ping", token=b"1"))
        assert receive(subscriber, "pong").token == b"1"
        for verb in ("subscribe", "subscribe"):  # a second subscribe succeeds and changes nothing
            subscriber.send(packet(f"{verb}_request", topic="news"))
            assert receive(subscriber, f"{verb}_reply").code == 0
        sender.send(packet("broadcast_request", topic="news", data=b"data", caller="a lie"))
        assert receive(sender, "broadcast_reply").code == 0
        message = receive(subscriber, "broadcast_request")
        assert (message.topic, message.data) == ("news", b"data")
        assert message.caller.startswith("local:")
        subscriber.send(packet("unsubscribe_request", topic="news"))
        assert receive(subscriber, "unsubscribe_reply").code == 0
        subscriber.send(packet("unsubscribe_request", topic="news"))
        assert receive(subscriber, "unsubscribe_reply").code == 404
        sender.send(packet("broadcast_request", topic="news", data=b"unread"))
        assert receive(sender, "broadcast_reply").code == 0


def test_client_and_nng_call_each_other(address):
    with dialled(address) as socket, gsb.blocking.connect(address) as ours:

        @ours.service("ours")
        def double(call: gsb.Call) -> int:
            return int(call.data) * 2

        socket.send(call("ours", "1", b"\x15"))
        assert receive(socket, "call_reply").data == b"\x2a"
        register(socket, "theirs")
        answer: list[object] = []
        thread = threading.Thread(target=lambda: answer.append(ours.call("theirs", "question")))
        thread.start()
        request = receive(socket, "call_request")
        socket.send(reply(request.request_id, b"\x2a"))
        thread.join()
        assert answer == [42]


def test_nng_service_registers_again_after_a_restart_of_the_bus():
    with serve("--engine", "memory:", listen=("gsb=tcp://127.0.0.1:0",)) as first:
        place = first.address("gsb")
        service = pynng.Pair0(recv_timeout=TIMEOUT_MS, reconnect_time_min=20)
        service.add_post_pipe_connect_cb(
            lambda _pipe: service.send(packet("register_request", service_id="echo"))
        )
        service.dial(str(place), block=True)
        assert receive(service, "register_reply").code == 0
        first.process.kill()
        first.wait()
    with serve("--engine", "memory:", listen=(f"gsb={place}",)) as second, service:
        assert receive(service, "register_reply").code == 0
        with dialled(str(place)) as caller:
            caller.send(call("echo", "1", b"again"))
            request = receive(service, "call_request")
            service.send(reply(request.request_id, request.data))
            assert receive(caller, "call_reply").data == b"again"
        check_unharmed(second)


def run_example(name: str, address: str) -> list[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_example_with_pynng_only(address):
    assert "polybus" not in _imports(EXAMPLES / "gsb_pynng.py")
    lines = run_example("gsb_pynng", address)
    assert lines[:5] == ["registered, code 0", "item 3", "item 2", "item 1", "that was all"]
    assert [line for line in lines if line.startswith("item ")][3:6] == [
        "item 1000",
        "item 999",
        "item 998",
    ]
    assert any("has heard enough of countdown/from" in line for line in lines)
    assert any("'code': 499" in line for line in lines)


def test_example_with_the_client(address):
    lines = run_example("gsb", address)
    assert lines[0] == "{'hello': 'Ada'}"
    assert lines.count("the stream has ended") == 2
    assert lines[-2:] == ["greeter was called 1 times", "greeter/many was called 2 times"]


def _imports(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line.split()[1].partition(".")[0] for line in lines if line[:5] in ("from ", "impor")]
