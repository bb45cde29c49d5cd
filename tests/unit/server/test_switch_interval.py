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


def test_switch_interval_is_short_while_connections_send() -> None:
    brought = 0
    turns = SwitchInterval(lambda: brought)
    found = [sys.getswitchinterval()]
    for more in (0, 3, 1, 0, 0, 1):
        brought += more
        turns.tick()
        found.append(sys.getswitchinterval())
    assert found == pytest.approx([SHORT_S, LONG_S, SHORT_S, SHORT_S, LONG_S, LONG_S, SHORT_S])


def test_noted_reads_shorten_the_switch_interval_at_once() -> None:
    turns = SwitchInterval(lambda: 0)
    turns.tick()
    assert [turns.note_reads(0), sys.getswitchinterval()] == pytest.approx([0, LONG_S])
    assert [turns.note_reads(1), sys.getswitchinterval()] == pytest.approx([1, SHORT_S])
