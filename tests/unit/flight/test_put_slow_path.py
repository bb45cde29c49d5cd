"""The slow path keeps the order of a stream until its last batch is taken."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Semaphore

import pytest

from polybus.transports.flight.put_intake import PutSlowPath
from tests.rig.observer import until


class World:
    def __init__(self) -> None:
        self.taken: SimpleQueue[str] = SimpleQueue()
        self.go = Semaphore(0)
        self.slow_path: PutSlowPath[str] = PutSlowPath(self._take)

    def _take(self, one: str) -> None:
        self.taken.put(one)
        assert self.go.acquire(timeout=5)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.go.release(10)
    made.slow_path.close(5.0)


def test_stream_stays_on_the_slow_path_until_its_last_batch(world):
    assert not world.slow_path.has_batches(1)
    for one in ("a", "b"):
        world.slow_path.add(1, one)
    assert world.taken.get(timeout=5) == "a"
    world.go.release()
    assert world.taken.get(timeout=5) == "b"
    assert world.slow_path.has_batches(1)  # "b" is being taken
    assert not world.slow_path.has_batches(2)
    world.go.release()
    until(lambda: not world.slow_path.has_batches(1), "the stream has left")


def test_close_processes_pending_batches(world):
    for one in ("a", "b", "c"):
        world.slow_path.add(1, one)
    world.go.release(3)
    world.slow_path.close(5.0)
    assert [world.taken.get_nowait() for _ in range(3)] == ["a", "b", "c"]
