"""How much of what has come one turn takes from a ROUTER."""

from __future__ import annotations

from typing import Any

import pytest

from polybus.transports.zmq.listener import TAKEN_AT_ONCE, TURN_BYTES, TURN_MESSAGES, take

HUGE = 64 << 20


class Queue:
    """A router with messages of these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def receive(self, most: int, max_frames: int, with_user: bool) -> list[Any]:
        taken, self.sizes = self.sizes[:most], self.sizes[most:]
        return [(7, None, size, []) for size in taken]


@pytest.mark.parametrize("count", [0, 1, TAKEN_AT_ONCE - 1, TAKEN_AT_ONCE + 1, TURN_MESSAGES - 1])
def test_what_is_there_is_taken_whole_and_in_order(count):
    queue = Queue(list(range(count)))
    messages, more = take(queue, False)  # type: ignore[arg-type]
    assert [one[2] for one in messages] == list(range(count))
    assert not more


def test_a_turn_has_an_end_and_the_next_goes_on():
    queue = Queue([10] * (TURN_MESSAGES + 1))
    assert [len(take(queue, True)[0]) for _ in range(2)] == [TURN_MESSAGES, 1]  # type: ignore[arg-type]


def test_nothing_is_left_unseen_when_the_last_ones_fill_a_turn():
    queue = Queue([10] * TURN_MESSAGES)
    assert take(queue, False)[1]  # type: ignore[arg-type]
    assert take(queue, False) == ([], False)  # type: ignore[arg-type]


def test_large_messages_end_a_turn_sooner():
    queue = Queue([HUGE] * 50)
    messages, more = take(queue, False)  # type: ignore[arg-type]
    assert sum(one[2] for one in messages) < TURN_BYTES + TAKEN_AT_ONCE * HUGE
    assert len(messages) == TAKEN_AT_ONCE
    assert more
