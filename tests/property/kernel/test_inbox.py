"""The inbox against its oracle: the same bytes, offered as long as they are not taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from polybus.kernel.receive_buffer import ReceiveBuffer, SharedBuffer
from tests.rig.oracle import inbox as oracle

SHARED = 16


class Picky:
    """Consumes the given number of bytes of each call."""

    def __init__(self, appetites: list[int]) -> None:
        self.appetites = list(appetites)
        self.taken = b""

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        count = min(end - start, self.appetites.pop(0) if self.appetites else end)
        self.taken += bytes(memoryview(buffer)[start : start + count])
        return count


@given(
    st.lists(st.binary(max_size=3 * SHARED) | st.none(), max_size=20),
    st.lists(st.integers(0, 2 * SHARED), max_size=40),
)
def test_programs(program: list[bytes | None], appetites: list[int]):
    """None: redeliver the held bytes."""
    kernel, plain = ReceiveBuffer(SharedBuffer(SHARED)), oracle.ReceiveBuffer()
    sessions = Picky(appetites), Picky(appetites)
    kernel.receive, plain.receive = sessions[0].receive, sessions[1].receive
    for data in program:
        if data is None:
            kernel.redeliver_held()
            plain.redeliver()
        while data:
            space = kernel.get_buffer()
            piece, data = data[: len(space)], data[len(space) :]
            space[: len(piece)] = piece
            kernel.buffer_updated(len(piece))
            plain.arrived(piece)
        assert (sessions[0].taken, kernel.held_bytes) == (sessions[1].taken, plain.held_bytes)


def test_without_a_session_bytes_are_thrown_away():
    kernel = ReceiveBuffer(SharedBuffer(SHARED))
    kernel.get_buffer()[:3] = b"abc"
    kernel.buffer_updated(3)
    assert kernel.held_bytes == 0
