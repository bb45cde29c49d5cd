"""Direct writes: into the socket if the loop has no queue, else to the loop, in order."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from polybus.kernel.stream_io import SharedBuffer, StreamIO


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


def attached(near: socket.socket, loop: Loop) -> StreamIO:
    stream = StreamIO(SharedBuffer(64))
    stream.attach(near.fileno(), loop)  # type: ignore[arg-type]
    return stream


def test_bytes_that_fit_the_socket_are_not_queued(ends: Ends):
    near, far = ends
    loop = Loop()
    attached(near, loop).write(b"abc")
    assert (far.recv(9), loop.queue) == (b"abc", b"")


def test_rest_and_later_writes_are_queued_in_order(ends: Ends):
    near, far = ends
    loop = Loop()
    stream = attached(near, loop)
    data = bytes(range(256)) * 16384
    stream.write(data)
    assert 0 < len(loop.queue) < len(data)
    sent = len(data) - len(loop.queue)
    got = far.recv(sent)  # there is room again, but bytes must not overtake the queue
    stream.write(b"last")
    while len(got) < sent:
        got += far.recv(sent)
    assert got + loop.queue == data + b"last"


def test_write_to_a_full_socket_is_queued(ends: Ends):
    near, _ = ends
    with contextlib.suppress(BlockingIOError):
        while True:
            near.send(bytes(65536))
    loop = Loop()
    attached(near, loop).write(b"abc")
    assert loop.queue == b"abc"


def test_write_to_a_broken_socket_is_left_to_the_loop(ends: Ends):
    near, far = ends
    far.close()
    loop = Loop()
    attached(near, loop).write(b"abc")
    assert loop.queue == b"abc"


def test_closing_transport_is_not_written_to_directly(ends: Ends):
    near, far = ends
    loop = Loop()
    loop.closing = True
    attached(near, loop).write(b"abc")
    assert loop.queue == b"abc"
    with pytest.raises(BlockingIOError):
        far.recv(9)
