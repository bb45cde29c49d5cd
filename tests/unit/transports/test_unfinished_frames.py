"""The monitor of unfinished frames, on connections that are stand-ins for real ones.

tests/faults/test_freud_detached.py has it on a live bus.
"""

from __future__ import annotations

from typing import Any

from polybus.model.unfinished_frame import UnfinishedFrame
from polybus.transports.unfinished_frames import UnfinishedFrames

FRAME = UnfinishedFrame(3, "it stopped")


class HeldConnection:
    def __init__(self) -> None:
        self.takes = 0
        self.awaits_more = True
        self.frame: UnfinishedFrame | None = FRAME

    def describe_unfinished(self) -> UnfinishedFrame | None:
        return self.frame


class Monitor:
    def __init__(self) -> None:
        self.reported: list[tuple[str, Any, UnfinishedFrame]] = []
        self.connections: set[Any] = set()
        self.monitor = UnfinishedFrames(5.0, lambda *found: self.reported.append(found))
        self.monitor.add("freud", self.connections)
        self.now_s = 100.0

    def open(self) -> HeldConnection:
        one = HeldConnection()
        self.connections.add(one)
        return one

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            self.monitor.tick(self.now_s)


def test_unfinished_frame_is_reported_once_and_the_next_one_again():
    monitor = Monitor()
    one = monitor.open()
    monitor.pass_time(5)
    assert monitor.reported == []
    monitor.pass_time(60)
    assert monitor.reported == [("freud", one, FRAME)]
    one.takes += 1
    monitor.pass_time(60)
    assert len(monitor.reported) == 2


def test_connections_of_a_removed_dialler_are_not_watched():
    monitor = Monitor()
    others: set[Any] = set()  # empty, so equal to the watched set until that has a connection
    monitor.monitor.add("gsb", others)
    monitor.monitor.remove(others)
    monitor.open()
    others.add(HeldConnection())
    monitor.pass_time(60)
    assert [dialect for dialect, _, _ in monitor.reported] == ["freud"]


def test_frames_that_end_in_time_are_not_reported():
    monitor = Monitor()
    one = monitor.open()
    for _ in range(10):
        monitor.pass_time(4)
        one.takes += 1
    for _ in range(10):
        monitor.pass_time(4)
        one.awaits_more = not one.awaits_more
    assert monitor.reported == []


def test_bytes_that_wait_for_the_bus_are_not_reported():
    monitor = Monitor()
    one = monitor.open()
    one.frame = None
    monitor.pass_time(60)
    assert monitor.reported == []
    one.frame = FRAME
    monitor.pass_time(1)
    assert len(monitor.reported) == 1


def test_closed_connections_are_forgotten():
    monitor = Monitor()
    monitor.open()
    monitor.pass_time(2)
    monitor.connections.clear()
    monitor.pass_time(2)
    assert monitor.monitor._watched == {}
