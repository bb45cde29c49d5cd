"""An outbox alone: its states, its bounds, and the bytes of each write call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.kernel.outbox import WORTH_A_WRITE_BYTES, LoopTurn, Outbox
from tests.rig.memory_pipe import MemoryPipe

HIGH_WATER = 1000
MAX_BYTES = 5000


class RecordingOwner:
    """An owner that records the events of its outboxes in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def on_filled(self, outbox: Outbox) -> None:
        assert outbox.full
        self.words.append("filled")

    def on_room(self, outbox: Outbox) -> None:
        assert not outbox.full
        self.words.append("has_room")

    def on_overflow(self, outbox: Outbox) -> None:
        self.words.append("overflowed")


class Wire:
    """The session's part that concerns the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self.on_stalled = outbox.on_stalled
        self.on_writable = outbox.on_writable

    def receive(self, buffer: object, start: int, end: int) -> int:
        return end - start

    def on_half_closed(self) -> bool:
        return False

    def on_ended(self) -> None: ...


class Bench:
    """An outbox, its pipe, and a loop whose turns the test ends."""

    def __init__(self, appetite: int | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.soon: list[Callable[[], None]] = []
        self.pipe = MemoryPipe(appetite=appetite)
        self.owner = RecordingOwner()
        self.box = Outbox(self.pipe, LoopTurn(self.soon.append), self.owner, HIGH_WATER, max_bytes)
        self.pipe.attach(Wire(self.box))

    def end_turn(self) -> None:
        for callback in [self.soon.pop(0) for _ in list(self.soon)]:
            callback()


def sizes(bench: Bench) -> list[int]:
    return [sum(map(len, chunks)) for chunks in bench.pipe.writes]


def test_first_push_of_a_turn_is_written_at_once():
    bench = Bench()
    bench.box.push(b"a")
    assert bench.pipe.taken == b"a"


def test_later_pushes_of_a_turn_are_written_together_at_its_end():
    bench = Bench()
    for byte in (b"a", b"b", b"c"):
        bench.box.push(byte)
    assert bench.pipe.taken == b"a"
    bench.end_turn()
    assert bench.pipe.writes == [[b"a"], [b"b", b"c"]]


def test_each_turn_writes_its_first_push_at_once():
    bench = Bench()
    bench.box.push(b"a")
    bench.end_turn()
    bench.box.push(b"b")
    assert bench.pipe.writes == [[b"a"], [b"b"]]


def test_push_after_a_flush_in_the_same_turn_is_written():
    bench = Bench()
    bench.box.push(b"a")
    bench.box.push(b"b")
    bench.end_turn()  # writes b, in the new turn
    bench.box.push(b"c")
    assert bench.pipe.taken == b"ab"
    bench.end_turn()
    assert bench.pipe.taken == b"abc"


def test_two_outboxes_of_one_turn_are_both_flushed():
    bench = Bench()
    turn = LoopTurn(bench.soon.append)
    pipes = [MemoryPipe() for _ in range(2)]
    boxes = [Outbox(pipe, turn, bench.owner, HIGH_WATER, MAX_BYTES) for pipe in pipes]
    for box in boxes * 2:
        box.push(b"x")
    bench.end_turn()
    assert [bytes(pipe.taken) for pipe in pipes] == [b"xx", b"xx"]


@pytest.mark.parametrize(
    ("gathered", "writes"), [(WORTH_A_WRITE_BYTES - 1, 1), (WORTH_A_WRITE_BYTES, 2)]
)
def test_large_gathered_output_is_written_before_the_turn_ends(gathered: int, writes: int):
    bench = Bench()
    bench.box.push(b"a")
    bench.box.push(bytes(gathered))
    assert len(bench.pipe.writes) == writes
    bench.end_turn()
    assert sizes(bench) == [1, gathered]


def test_stalled_outbox_holds_output():
    bench = Bench(appetite=0)
    bench.box.push(b"a")
    bench.end_turn()
    bench.box.push(b"b")
    bench.end_turn()
    assert bench.pipe.writes == [[b"a"]]
    assert bench.box.backlog() == 2
    bench.pipe.eat()
    assert bench.pipe.writes == [[b"a"], [b"b"]]
    assert bench.pipe.taken == b"ab"
    assert bench.box.backlog() == 0


def test_output_gathered_before_a_stall_is_written_first():
    bench = Bench(appetite=1, max_bytes=2 * WORTH_A_WRITE_BYTES)
    bench.box.push(b"a")
    bench.box.push(b"b")  # gathered
    bench.box.push(bytes(WORTH_A_WRITE_BYTES))  # flushes both, and stalls
    bench.box.push(b"c")
    bench.pipe.eat()
    bench.end_turn()
    assert bench.pipe.taken == b"ab" + bytes(WORTH_A_WRITE_BYTES) + b"c"


@pytest.mark.parametrize("way", ["in one write", "held"])
def test_outbox_is_full_one_byte_over_its_high_water_mark(way: str):
    bench = Bench(appetite=0)
    if way == "held":
        bench.box.push(b"a")
        bench.box.push(bytes(HIGH_WATER - 1))
    else:
        bench.box.push(bytes(HIGH_WATER))
    assert bench.owner.words == []
    bench.box.push(b"x")
    assert bench.owner.words == ["filled"]
    bench.box.push(b"x")
    assert bench.owner.words == ["filled"]
    assert bench.box.full


def test_outbox_is_never_full_while_the_socket_accepts_output():
    bench = Bench()
    bench.box.push(bytes(MAX_BYTES * 3))
    bench.box.push(bytes(MAX_BYTES * 30))
    bench.end_turn()
    assert not bench.box.full
    assert bench.owner.words == []


@pytest.mark.parametrize(("left", "full"), [(HIGH_WATER // 2, False), (HIGH_WATER // 2 + 1, True)])
def test_outbox_has_room_again_at_half_the_high_water_mark(left: int, full: bool):
    bench = Bench(appetite=0)
    bench.box.push(b"a")
    bench.box.push(bytes(HIGH_WATER))  # held
    bench.pipe.eat(1 + HIGH_WATER - left)  # the first write, then most of the held bytes
    assert bench.box.backlog() == left
    assert bench.box.full is full
    assert bench.owner.words == (["filled"] if full else ["filled", "has_room"])


def test_outbox_can_become_full_again():
    bench = Bench(appetite=0)
    for _ in range(3):
        bench.box.push(bytes(HIGH_WATER + 1))
        bench.pipe.eat(HIGH_WATER + 1)
        bench.end_turn()
    assert bench.owner.words == ["filled", "has_room"] * 3


@pytest.mark.parametrize(
    ("size", "words"), [(MAX_BYTES, ["filled"]), (MAX_BYTES + 1, ["overflowed"])]
)
def test_output_over_max_bytes_calls_on_overflow(size: int, words: list[str]):
    bench = Bench(appetite=0)
    bench.box.push(bytes(size))
    assert bench.owner.words == words


def test_outbox_over_its_bound_accepts_nothing_more():
    bench = Bench(appetite=0)
    bench.box.push(bytes(MAX_BYTES + 1))
    bench.box.push(b"late")
    assert bench.box.backlog() == MAX_BYTES + 1
    assert bench.owner.words == ["overflowed"]


def test_close_sends_held_output():
    bench = Bench(appetite=1)
    bench.box.push(b"ab")
    bench.box.push(b"cd")
    bench.box.close(send_held=True)
    bench.pipe.eat()
    assert bench.pipe.taken == b"abcd"


def test_close_sends_gathered_output_once():
    bench = Bench()
    bench.box.push(b"a")
    bench.box.push(b"b")
    bench.box.close(send_held=True)
    bench.end_turn()
    assert bench.pipe.writes == [[b"a"], [b"b"]]


def test_close_without_sending_drops_held_output():
    bench = Bench(appetite=1)
    bench.box.push(b"ab")
    bench.box.push(b"cd")
    bench.box.close(send_held=False)
    bench.pipe.eat()
    bench.end_turn()
    assert bench.pipe.taken == b"ab"


@pytest.mark.parametrize("send_held", [True, False])
def test_closed_outbox_accepts_and_reports_nothing(send_held: bool):
    bench = Bench(appetite=0)
    bench.box.push(bytes(HIGH_WATER + 1))
    bench.box.close(send_held=send_held)
    assert not bench.box.full
    bench.box.push(b"late")
    bench.pipe.eat()
    bench.end_turn()
    assert bench.pipe.taken == bytes(HIGH_WATER + 1)
    assert bench.owner.words == ["filled"]


def test_unsent_returns_chunks_with_their_sent_bytes():
    bench = Bench(appetite=3)
    bench.box.push(b"aaaa")
    bench.box.push(b"bbbb")
    bench.box.push(b"cccc")
    assert bench.box.unsent() == [(b"aaaa", 3), (b"bbbb", 0), (b"cccc", 0)]
    bench.pipe.eat(1)  # all of a is gone; b and c are handed over together
    bench.pipe.eat(5)
    assert bench.box.unsent() == [(b"cccc", 1)]
    bench.pipe.eat()
    assert bench.box.unsent() == []


def test_unsent_output_of_a_closing_outbox_is_known_until_sent():
    bench = Bench(appetite=3)
    bench.box.push(b"aaaa")
    bench.box.push(b"bbbb")
    bench.box.close(send_held=True)
    assert bench.box.unsent() == [(b"aaaa", 3), (b"bbbb", 0)]
    bench.pipe.eat(4)
    assert bench.box.unsent() == [(b"bbbb", 3)]


def test_dropped_output_is_not_counted_as_unsent():
    bench = Bench(appetite=3)
    bench.box.push(b"aaaa")
    bench.box.push(b"bbbb")
    bench.box.close(send_held=False)
    assert bench.box.unsent() == []


def test_taken_counts_bytes_that_reached_the_readers_host():
    bench = Bench(appetite=10)
    bench.box.push(bytes(30))
    assert bench.box.taken() == 10
    bench.pipe.in_host = 4
    assert bench.box.taken() == 6


STEPS = st.one_of(
    st.tuples(st.just("push"), st.integers(1, HIGH_WATER + 10)),
    st.tuples(st.just("eat"), st.integers(1, HIGH_WATER)),
    st.tuples(st.just("turn"), st.just(0)),
)


@given(st.lists(STEPS, max_size=60), st.one_of(st.none(), st.integers(0, HIGH_WATER)))
def test_every_byte_is_written_once_and_in_order(
    steps: list[tuple[str, int]], appetite: int | None
):
    bench = Bench(appetite)
    pushed = bytearray()
    for number, (step, size) in enumerate(steps):
        if step == "push" and not bench.box.full:  # as delivery does: a full one is fed nothing
            data = bytes([number % 251]) * size
            pushed += data
            bench.box.push(data)
        elif step == "eat" and bench.pipe.appetite is not None:
            bench.pipe.eat(size)
        else:
            bench.end_turn()
        assert pushed.startswith(bench.pipe.taken)
        assert bench.box.taken() == len(bench.pipe.taken)
        assert bench.box.backlog() == len(pushed) - len(bench.pipe.taken)
        assert sum(len(chunk) - gone for chunk, gone in bench.box.unsent()) == bench.box.backlog()
    bench.pipe.eat()
    bench.end_turn()
    assert bench.pipe.taken == pushed
    assert not bench.box.full
    assert bench.owner.words == ["filled", "has_room"] * (len(bench.owner.words) // 2)
