"""Clients that do not read are cut; clients on a slow link are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from polybus.transports.flight.slow_consumers import SlowConsumerMonitor


class World:
    """A clock, and one peer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.confirmed: int | None = 0
        self.cut: list[str] = []
        self.under_way: list[tuple[int, str, float]] = []
        self._numbers = count()
        self.pace = SlowConsumerMonitor(
            4.0,
            100,
            lambda: self.now_s,
            lambda: self.under_way,
            lambda _: self.confirmed,
            self.cut.append,
        )

    @contextmanager
    def handing_over(self, peer: str) -> Iterator[None]:
        one = (next(self._numbers), peer, self.now_s)
        self.under_way.append(one)
        yield
        self.under_way.remove(one)

    def pass_time(self, seconds: float, taking: int = 0) -> None:
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            if self.confirmed is not None:
                self.confirmed += taking // 4
            self.pace.tick()


def test_client_that_reads_nothing_is_cut_once():
    world = World()
    with world.handing_over("peer"):
        world.pass_time(3.75)
        assert world.cut == []
        world.pass_time(10)
        assert world.cut == ["peer"]


def test_completed_send_is_forgotten():
    world = World()
    for _ in range(5):
        with world.handing_over("peer"):
            world.pass_time(3.75)
    world.pass_time(20)
    assert world.cut == []


def test_next_send_of_a_call_is_judged_separately():
    world = World()
    for _ in range(5):
        world.under_way[:] = [(7, "peer", world.now_s)]
        world.pass_time(3.75)
    assert world.cut == []


def test_slow_link_above_the_minimum_rate_is_kept():
    world = World()
    with world.handing_over("peer"):
        world.pass_time(60, taking=120)
        assert world.cut == []
        world.pass_time(9, taking=80)
        assert world.cut == ["peer"]


def test_closed_connection_is_ignored():
    world = World()
    world.confirmed = None
    with world.handing_over("peer"):
        world.pass_time(9)
    assert world.cut == ["peer"]
