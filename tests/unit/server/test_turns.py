"""Whose turn it is, and for how long."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from polybus.server.switch_interval import LONG_S, SHORT_S, SwitchInterval


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def test_turns_are_short_while_the_loop_is_wanted_and_long_while_it_is_not() -> None:
    brought = 0
    turns = SwitchInterval(lambda: brought)
    found = [sys.getswitchinterval()]
    for more in (0, 3, 1, 0, 0, 1):
        brought += more
        turns.tick()
        found.append(sys.getswitchinterval())
    assert found == pytest.approx([SHORT_S, LONG_S, SHORT_S, SHORT_S, LONG_S, LONG_S, SHORT_S])


def test_who_notes_that_the_loop_is_wanted_makes_turns_short_at_once() -> None:
    turns = SwitchInterval(lambda: 0)
    turns.tick()
    assert [turns.note_reads(0), sys.getswitchinterval()] == pytest.approx([0, LONG_S])
    assert [turns.note_reads(1), sys.getswitchinterval()] == pytest.approx([1, SHORT_S])
