"""Unread messages against their oracle: random programs, and columns that are wrong."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.freud.server.unread_queue import (
    GATHERED_BYTES,
    WORTH_A_CHUNK,
    Chunk,
    ChunkWriter,
    Range,
    UnreadQueue,
)
from tests.rig.oracle import unread as oracle

bodies = st.lists(
    st.binary(max_size=30)
    | st.integers(0, GATHERED_BYTES + 9).map(bytes)
    | st.sampled_from((b"\0FREUD", b"\0FREUD\0", b"\0FREUD\0x")),
    min_size=1,
    max_size=5,
)
batches = bodies | st.integers(1, 2 * WORTH_A_CHUNK).map(lambda count: [b"x" * 9] * count)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), batches, st.integers(0, 9)),
        st.tuples(st.just("skip"), st.integers(0, 3)),
        st.tuples(st.just("notice")),
        st.tuples(
            st.just("take"), st.integers(1, 99), st.integers(0, 2 * GATHERED_BYTES), st.booleans()
        ),
        st.tuples(st.just("give_back"), st.integers(0, 9)),
        st.tuples(st.just("confirm"), st.integers(0, 9)),
    ),
    max_size=40,
)


def columns(batch: list[bytes]) -> tuple[bytes, bytes]:
    ends = array("i", [0])
    for body in batch:
        ends.append(ends[-1] + len(body))
    return ends.tobytes(), b"".join(batch)


def messages(found: Range) -> list[oracle.Message]:
    chunk = found.chunk
    assert len(chunk.offsets) == len(chunk) + 1
    assert found.sizes() == [
        chunk.offsets[at + 1] - chunk.offsets[at] for at in range(found.start, found.end)
    ]
    return [
        oracle.Message(
            chunk.first_id + at,
            chunk.times[at],
            bytes(chunk.bodies[chunk.offsets[at] : chunk.offsets[at + 1]]),
            chunk.notice,
        )
        for at in range(found.start, found.end)
    ]


class Pair:
    """A topic's writer and one reader, in the kernel and in the oracle."""

    def __init__(self) -> None:
        self.writers = ChunkWriter(), oracle.Writer()
        self.readers = UnreadQueue(), oracle.Unread()
        self.next_id = 0
        self.out: list[Range] = []

    def put(self, batch: list[bytes], now_ns: int) -> None:
        found, plain = (one.write(self.next_id, *columns(batch), now_ns) for one in self.writers)
        assert isinstance(found, Range)
        assert messages(found) == plain
        assert (found.first_id, len(found), found.size) == (
            self.next_id,
            len(batch),
            sum(map(len, batch)),
        )
        self.next_id += len(batch)
        self.readers[0].put(found)
        self.readers[1].put(plain)

    def skip(self, count: int) -> None:
        """Ids that this reader never sees."""
        self.next_id += count

    def notice(self) -> None:
        body = b"the end"
        self.readers[0].put(Range(Chunk.of_notice(self.next_id, body, 7), 0, 1))
        self.readers[1].put([oracle.Message(self.next_id, 7, body, True)])
        self.next_id += 1

    def take(self, count: int, max_bytes: int, bare: bool = False) -> None:
        found = self.readers[0].take(count, max_bytes, bare)
        if found is None:
            assert self.readers[1].unread == []
            return
        assert 1 <= len(found) <= count
        assert len(found) == 1 or found.size <= max_bytes
        plain = self.readers[1].take(len(found))
        assert messages(found) == plain
        reserved = [one.body.startswith(b"\0FREUD\0") and not one.notice for one in plain]
        assert found.needs_escape == reserved[0]
        if bare and len(plain) > 1:
            assert not any(reserved)
        self.out.append(found)

    def give_back(self, place: int) -> None:
        self._return("give_back", place)

    def confirm(self, place: int) -> None:
        self._return("confirm", place)

    def _return(self, verb: str, place: int) -> None:
        if self.out:
            found = self.out.pop(place % len(self.out))
            getattr(self.readers[1], verb)(messages(found))
            getattr(self.readers[0], verb)(found)

    def check(self) -> None:
        kernel, plain = self.readers
        assert [one for each in kernel.ranges for one in messages(each)] == plain.unread
        assert (kernel.held_messages, kernel.held_bytes) == (
            plain.held_messages,
            plain.held_bytes,
        )


@given(steps)
def test_programs(program: list[tuple[Any, ...]]):
    pair = Pair()
    for verb, *fields in program:
        getattr(pair, verb)(*fields)
        pair.check()
    kernel, plain = pair.readers
    assert kernel.end() == plain.end()
    assert kernel.gone
    assert kernel.take(1, 1) is None


def test_long_programs():
    """Shrinking and gathering over many chunks."""
    chance, pair = Random(7), Pair()
    for _ in range(3000):
        if chance.random() < 0.5:
            pair.put([bytes(chance.randrange(3000))] * chance.choice((1, 1, 2, 70)), 0)
        elif chance.random() < 0.9:
            pair.take(chance.choice((1, 1, 5, 100)), chance.choice((0, 10_000, 200_000)))
        else:
            getattr(pair, chance.choice(("give_back", "confirm")))(chance.randrange(9))
    pair.check()


@given(st.lists(st.integers(-2, 12), max_size=6), st.binary(max_size=10))
def test_columns_are_believed_only_if_they_fit(ends: list[int], bodies: bytes):
    offsets = array("i", ends).tobytes()

    def outcome(writer: Any) -> Any:
        try:
            found = writer.write(0, offsets, bodies, 0)
        except ValueError:
            return ValueError
        return messages(found) if isinstance(found, Range) else found

    assert outcome(ChunkWriter()) == outcome(oracle.Writer())


@pytest.mark.parametrize("place", [(-1, 0), (0, 3), (2, 1), (3, 3)])
def test_a_range_lies_within_its_chunk(place: tuple[int, int]):
    chunk = Chunk.of_batch(0, *columns([b"a", b"b"]), 0)
    with pytest.raises(IndexError):
        Range(chunk, *place)
    with pytest.raises(IndexError):
        chunk.part(*place)
    found = Range(chunk, 0, 1)
    found.end = 9
    with pytest.raises(IndexError):
        found.sizes()


def test_ranges_that_touch_become_one():
    chunk = Chunk.of_batch(5, *columns([b"a", b"b", b"c"]), 0)
    first, second, third = (Range(chunk, at, at + 1) for at in range(3))
    assert not first.extend(third)
    assert first.extend(second)
    assert messages(first) == messages(Range(chunk, 0, 2))
    other = Chunk.of_batch(7, *columns([b"x", b"y", b"z"]), 0)
    assert not first.extend(Range(other, 2, 3))
