"""The compiled ROUTER compared with pyzmq."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator

import pytest
import zmq
from zmq.backend.cython import _zmq

from polybus.dialects.pirate.server.router_socket import Router
from polybus.model import tcp_info
from tests.rig.observer import until

WAIT_MS = 20_000
MANY, MUCH = 1000, 1 << 30
SIZES = (0, 1, 8, 255, 256, 70_000)

Received = tuple[int, str | None, int, list[bytes]]


class Pair:
    """A ROUTER, and dealers that are connected to it."""

    def __init__(self, *, sealed: bool = False) -> None:
        self.keys = zmq.curve_keypair() if sealed else None
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.ROUTER_MANDATORY = 1
        if self.keys:
            self.router.curve_server = True
            self.router.curve_publickey, self.router.curve_secretkey = self.keys
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.kernel = Router(_zmq.__file__, self.router.underlying)
        self._dealers: list[zmq.Socket[bytes]] = []

    def dealer(self, name: bytes) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.routing_id = name
        if self.keys:
            dealer.curve_serverkey = self.keys[0]
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        self._dealers.append(dealer)
        return dealer

    def close(self) -> None:
        for one in (*self._dealers, self.router):
            one.close(0)
        self.context.term()

    def receive(self, count: int, max_frames: int = 100) -> list[Received]:
        found: list[Received] = []

        def received() -> bool:
            found.extend(self.kernel.receive(MANY, MUCH, max_frames, self.keys is not None))
            return len(found) >= count

        until(received, f"{count} messages are received")
        return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.close()


def on_wire(message: list[bytes]) -> int:
    """Return the size of a message in ZMTP, without the routing id that the socket adds."""
    return sum(len(frame) + (2 if len(frame) < 256 else 9) for frame in message[1:])


def test_router_receives_the_same_messages_as_pyzmq(pair):
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
    assert [size for _, _, size, _ in by_kernel] == [on_wire(one) for one in by_pyzmq]
    assert by_pyzmq[0][0] == b"d"


def test_descriptor_is_the_one_of_pyzmq(pair):
    first, second = pair.dealer(b"1"), pair.dealer(b"2")
    first.send(b"")
    second.send(b"")
    found = {frames[0]: descriptor for descriptor, _, _, frames in pair.receive(2)}
    assert len(set(found.values())) == 2
    first.send(b"")
    assert pair.router.poll(WAIT_MS)
    frame = pair.router.recv(copy=False)
    assert frame.get(zmq.SRCFD) == found[b"1"]


def test_empty_socket_returns_no_messages(pair):
    assert pair.kernel.receive(MANY, MUCH, 10) == []


def test_number_of_received_messages_is_bounded(pair):
    dealer = pair.dealer(b"d")
    for number in range(10):
        dealer.send(b"%d" % number)
    found = pair.receive(1)
    while len(found) < 10:
        found += pair.kernel.receive(3, MUCH, 10)
    assert [frames[1] for _, _, _, frames in found] == [b"%d" % number for number in range(10)]


def test_received_bytes_per_call_are_bounded(pair):
    dealer = pair.dealer(b"d")
    for _ in range(3):
        dealer.send(bytes(1000))
    found = pair.receive(1)
    sizes = [len(found)]
    while sum(sizes) < 3:
        sizes.append(len(pair.kernel.receive(MANY, 1001, 10)))
        assert sizes[-1] <= 1


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def any_pair(request) -> Iterator[Pair]:
    one = Pair(sealed=request.param)
    yield one
    one.close()


def test_received_bytes_match_the_count_of_the_kernel(any_pair):
    """To the byte: else the unfinished bytes would grow with each message."""
    pair = any_pair
    dealer = pair.dealer(b"d")
    dealer.send_multipart([b"", b"x"])
    ((fd, _, first, _),) = pair.receive(1)
    before = received(fd)
    assert first < before  # the handshake
    taken = 0
    for size in SIZES:
        dealer.send_multipart([b"", bytes(size), b"end"])
        taken += sum(one[2] for one in pair.receive(1))
    assert received(fd) - before == taken


def received(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as one:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.TCP_INFO_BYTES)
    return tcp_info.read_byte_counts(info).received


def test_frames_over_the_bound_are_dropped_and_the_next_message_is_complete(pair):
    dealer = pair.dealer(b"d")
    dealer.send_multipart([b"x"] * 5000)
    dealer.send_multipart([b"y", b"z"])
    first, second = pair.receive(2, max_frames=7)
    assert first[3] == [b"d", *[b"x"] * 6]
    assert first[2] == 5000 * 3  # those that were passed over have come, too
    assert second[3] == [b"d", b"y", b"z"]


def test_sent_messages_arrive_and_unknown_peers_are_errors(pair):
    dealer = pair.dealer(b"d")
    dealer.send(b"hello")
    pair.receive(1)
    assert pair.kernel.send([b"d"], [b"answer", bytes(100_000)], MUCH) == 100_000 + 1 + 6 + 8
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"", b"answer", bytes(100_000)]
    assert pair.kernel.send([b"unknown"], [b"x"], MUCH) == -errno.EHOSTUNREACH
    assert pair.kernel.send([b"d"], [bytes(100)], 100) == 0  # too large to be copied
    assert pair.kernel.send([b"d", b"hop"], [b"again"], MUCH)
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"hop", b"", b"again"]


def test_frames_must_be_bytes_and_nothing_is_sent_otherwise(pair):
    dealer = pair.dealer(b"d")
    dealer.send(b"hello")
    pair.receive(1)
    for wrong in (["text"], [None], [b"x", memoryview(b"x")], None):
        with pytest.raises(TypeError):
            pair.kernel.send([b"d"], wrong, MUCH)
        with pytest.raises(TypeError):
            pair.kernel.send(wrong, [b"x"], MUCH)
    assert pair.kernel.send([b"d"], [b"whole"], MUCH)
    assert dealer.poll(WAIT_MS)
    assert dealer.recv_multipart() == [b"", b"whole"]


def test_unloaded_library_is_an_error():
    with pytest.raises(OSError, match="not loaded"):
        Router("/nowhere/libzmq.so", 0)
