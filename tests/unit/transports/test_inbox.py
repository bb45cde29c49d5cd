"""Received bytes: nothing lost, doubled or out of order, wherever the stream is cut."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from polybus.kernel.receive_buffer import ReceiveBuffer, SharedBuffer
from tests.rig.byte_feeder import cut, feed, one_by_one

SHARED = 64  # tiny, so that frames are larger than it


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class Frames:
    """A session that takes whole frames, and stops after `budget` of them as if blocked."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.budget: int | None = None
        self.offers: list[int] = []

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        data = bytes(memoryview(buffer)[start:end])
        self.offers.append(len(data))
        at = 0
        while len(data) - at >= 4 and self.budget != 0:
            (length,) = struct.unpack_from(">I", data, at)
            if len(data) - at - 4 < length:
                break
            self.bodies.append(data[at + 4 : at + 4 + length])
            at += 4 + length
            if self.budget is not None:
                self.budget -= 1
        return at


def arrive(inbox: ReceiveBuffer, session: Frames, data: bytes) -> None:
    """Feed bytes as an event loop does: as many as fit, repeatedly."""
    while data:
        space = inbox.get_buffer()
        assert len(space) > 0, "a buffer without space would loop forever"
        count = min(len(space), len(data))
        space[:count] = data[:count]
        inbox.receive = session.receive
        inbox.buffer_updated(count)
        data = data[count:]


BODIES = st.lists(st.binary(max_size=3 * SHARED), max_size=12)


@given(BODIES, st.lists(st.integers(0, 2000), max_size=40))
def test_frames_survive_any_cuts(bodies: list[bytes], cuts: list[int]):
    stream = b"".join(map(framed, bodies))
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    for piece in cut(stream, cuts):
        arrive(inbox, session, piece)
    assert session.bodies == bodies
    assert inbox.held_bytes == 0


@given(BODIES, BODIES, st.lists(st.integers(1, 50), min_size=1))
def test_two_connections_share_a_buffer_without_mixing(
    first: list[bytes], second: list[bytes], sizes: list[int]
):
    shared = SharedBuffer(SHARED)
    streams = [b"".join(map(framed, bodies)) for bodies in (first, second)]
    ends = [(ReceiveBuffer(shared), Frames()) for _ in streams]
    at = [0, 0]
    for turn in range(2 * sum(map(len, streams)) + 2):
        which, size = turn % 2, sizes[turn % len(sizes)]
        arrive(*ends[which], streams[which][at[which] : at[which] + size])
        at[which] += size
    assert [session.bodies for _, session in ends] == [first, second]


@given(BODIES, st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 2000)))
def test_session_may_stop_anywhere_and_continue(
    bodies: list[bytes], budgets: list[int], cuts: list[int]
):
    """As a full reader makes it: it leaves whole frames, and takes them when offered again."""
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    for piece in cut(b"".join(map(framed, bodies)), cuts):
        session.budget = budgets.pop() if budgets else None
        arrive(inbox, session, piece)
        session.budget = budgets.pop() if budgets else None
        inbox.redeliver_held()
    session.budget = None
    inbox.redeliver_held()
    assert session.bodies == bodies
    assert inbox.held_bytes == 0


def test_held_bytes_precede_the_next_read():
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    arrive(inbox, session, framed(b"whole") + framed(b"half")[:5])
    assert session.bodies == [b"whole"]
    assert inbox.held_bytes == 5
    arrive(inbox, session, framed(b"half")[5:])
    assert session.bodies == [b"whole", b"half"]
    assert inbox.held_bytes == 0


def test_redelivery_without_held_bytes_does_nothing():
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    inbox.redeliver_held()
    assert session.offers == []


def test_idle_connection_reads_into_the_shared_buffer():
    shared = SharedBuffer(SHARED)
    assert ReceiveBuffer(shared).get_buffer() is shared.view


@pytest.mark.parametrize("promised", [SHARED, 10**6, 2**32 - 1])
def test_announced_large_frame_allocates_nothing(promised: int):
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    arrive(inbox, session, struct.pack(">I", promised))
    assert len(inbox.get_buffer()) <= SHARED


def test_a_buffer_grows_only_as_bytes_arrive():
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    stream = framed(bytes(100 * SHARED))
    for piece in cut(stream[:-1], range(10, len(stream), 10)):
        arrive(inbox, session, piece)
        assert inbox.held_bytes + len(inbox.get_buffer()) <= max(SHARED, 2 * inbox.held_bytes)
    arrive(inbox, session, stream[-1:])
    assert session.bodies == [bytes(100 * SHARED)]
    assert len(inbox.get_buffer()) == SHARED  # and it is given back


def test_large_frame_is_delivered_few_times_while_it_grows():
    """Doubling, not a little more each time: else a large frame would cost its square."""
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    arrive(inbox, session, framed(bytes(1000 * SHARED)))
    assert len(session.offers) < 30


def test_blocked_session_does_not_grow_the_buffer():
    inbox, session = ReceiveBuffer(SharedBuffer(SHARED)), Frames()
    session.budget = 0
    arrive(inbox, session, framed(b"x" * 40))
    before = len(inbox.get_buffer())
    for _ in range(100):
        inbox.redeliver_held()
    assert len(inbox.get_buffer()) == before


def test_byte_by_byte_input_gives_the_same_frames():
    """The feeder of codec tests: it must hold tails just as an inbox does."""
    session = Frames()
    bodies = [b"", b"a", b"bc"]
    stream = b"".join(map(framed, bodies))
    assert feed(session.receive, one_by_one(stream + b"\0\0")) == b"\0\0"
    assert session.bodies == bodies
    assert list(cut(b"abcd", [0, 3, 1, 9])) == [b"a", b"bc", b"d"]
