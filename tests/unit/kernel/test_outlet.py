"""The way out: into the socket if nothing is in the way, else to the loop, and all in order."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from polybus.kernel.socket_writer import SocketWriter


class Loop:
    """A transport double: the queued bytes, and whether it is closing."""

    def __init__(self) -> None:
        self.queue = b""
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return len(self.queue)

    def write(self, data: bytes) -> None:
        self.queue += data


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def test_what_the_socket_takes_is_not_queued(ends: Ends):
    near, far = ends
    loop = Loop()
    SocketWriter(near.fileno(), loop).write(b"abc")  # type: ignore[arg-type]
    assert (far.recv(9), loop.queue) == (b"abc", b"")


def test_what_it_does_not_take_is_queued_and_so_is_all_that_follows(ends: Ends):
    near, far = ends
    loop = Loop()
    outlet = SocketWriter(near.fileno(), loop)  # type: ignore[arg-type]
    data = bytes(range(256)) * 16384
    outlet.write(data)
    assert 0 < len(loop.queue) < len(data)
    sent = len(data) - len(loop.queue)
    got = far.recv(sent)  # there is room again, but bytes must not overtake the queue
    outlet.write(b"last")
    while len(got) < sent:
        got += far.recv(sent)
    assert got + loop.queue == data + b"last"


def test_a_socket_without_room_takes_nothing(ends: Ends):
    near, _ = ends
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(65536))
    loop = Loop()
    SocketWriter(near.fileno(), loop).write(b"abc")  # type: ignore[arg-type]
    assert loop.queue == b"abc"


def test_a_broken_socket_is_the_loops_to_find(ends: Ends):
    near, far = ends
    far.close()
    loop = Loop()
    SocketWriter(near.fileno(), loop).write(b"abc")  # type: ignore[arg-type]
    assert loop.queue == b"abc"


def test_a_closing_transports_descriptor_may_be_anybodys(ends: Ends):
    near, far = ends
    loop = Loop()
    loop.closing = True
    SocketWriter(near.fileno(), loop).write(b"abc")  # type: ignore[arg-type]
    assert loop.queue == b"abc"
    with pytest.raises(BlockingIOError):
        far.recv(9)
