"""The kernel's way to a ROUTER, beside pyzmq's own."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest
import zmq
from zmq.backend.cython import _zmq

from polybus.kernel.router import Router
from polybus.testing.watch import until

WAIT_MS = 20_000
MANY = 1000
SIZES = (0, 1, 8, 255, 256, 70_000)

Came = tuple[int, str | None, int, list[bytes]]


class Pair:
    """A ROUTER, and dealers that are connected to it."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.ROUTER_MANDATORY = 1
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.kernel = Router(_zmq.__file__, self.router.underlying)
        self._dealers: list[zmq.Socket[bytes]] = []

    def dealer(self, name: bytes) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.routing_id = name
        socket.connect(f"tcp://127.0.0.1:{self.port}")
        self._dealers.append(socket)
        return socket

    def close(self) -> None:
        for socket in (*self._dealers, self.router):
            socket.close(0)
        self.context.term()

    def receive(self, count: int, max_frames: int = 100) -> list[Came]:
        found: list[Came] = []

        def came() -> bool:
            found.extend(self.kernel.receive(MANY, max_frames))
            return len(found) >= count

        until(came, f"{count} messages have come")
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.close()


def test_messages_come_as_pyzmq_has_them(pair):
    chance = random.Random(7)
    dealer = pair.dealer(b"d")
    sent = [
        [chance.randbytes(chance.choice(SIZES)) for _ in range(chance.randint(1, 9))]
        for _ in range(60)
    ]
    for message in sent:
        dealer.send_multipart(message)
    by_kernel = pair.receive(len(sent))
    for message in sent:
        dealer.send_multipart(message)
    by_pyzmq = []
    for _ in sent:
        assert pair.router.poll(WAIT_MS)
        by_pyzmq.append(pair.router.recv_multipart())
    assert [frames for _, _, _, frames in by_kernel] == by_pyzmq
    assert [size for _, _, size, _ in by_kernel] == [sum(map(len, one)) for one in by_pyzmq]
    assert by_pyzmq[0][0] == b"d"


def test_the_descriptor_is_the_one_that_pyzmq_tells(pair):
    first, second = pair.dealer(b"1"), pair.dealer(b"2")
    first.send(b"")
    second.send(b"")
    found = {frames[0]: descriptor for descriptor, _, _, frames in pair.receive(2)}
    assert len(set(found.values())) == 2
    first.send(b"")
    assert pair.router.poll(WAIT_MS)
    frame = pair.router.recv(copy=False)
    assert frame.get(zmq.SRCFD) == found[b"1"]


def test_nothing_to_receive_is_nothing(pair):
    assert pair.kernel.receive(MANY, 10) == []


def test_no_more_than_asked_for(pair):
    dealer = pair.dealer(b"d")
    for number in range(10):
        dealer.send(b"%d" % number)
    found = pair.receive(1)
    while len(found) < 10:
        found += pair.kernel.receive(3, 10)
    assert [frames[1] for _, _, _, frames in found] == [b"%d" % number for number in range(10)]


def test_frames_beyond_the_bound_are_passed_over_and_the_next_message_is_whole(pair):
    dealer = pair.dealer(b"d")
    dealer.send_multipart([b"x"] * 5000)
    dealer.send_multipart([b"y", b"z"])
    first, second = pair.receive(2, max_frames=7)
    assert first[3] == [b"d", *[b"x"] * 6]
    assert first[2] == 7
    assert second[3] == [b"d", b"y", b"z"]


def test_what_is_sent_arrives_and_who_is_not_there_is_told(pair):
    dealer = pair.dealer(b"d")
    dealer.send(b"hello")
    pair.receive(1)
    assert pair.kernel.send([b"d", b"", b"answer", bytes(100_000)]) == 0
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"", b"answer", bytes(100_000)]
    assert pair.kernel.send([b"nobody", b"", b"x"]) == errno.EHOSTUNREACH
    assert pair.kernel.send([b"d", b"again"]) == 0
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"again"]


def test_only_bytes_are_sent_and_nothing_is_begun_otherwise(pair):
    dealer = pair.dealer(b"d")
    dealer.send(b"hello")
    pair.receive(1)
    for wrong in ([b"d", "text"], [b"d", None], [b"d", memoryview(b"x")]):
        with pytest.raises(TypeError):
            pair.kernel.send(wrong)
    with pytest.raises(TypeError):
        pair.kernel.send(None)
    assert pair.kernel.send([b"d", b"whole"]) == 0
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"whole"]


def test_a_library_that_is_not_loaded_is_an_error():
    with pytest.raises(OSError, match="not loaded"):
        Router("/nowhere/libzmq.so", 0)
