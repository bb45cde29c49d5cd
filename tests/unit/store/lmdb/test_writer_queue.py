"""The queue of the writer: when it waits for a group, and when it stops waiting."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from polybus.store.lmdb.writer_queue import ENOUGH_BYTES, WriterQueue

TIMEOUT_S = 30.0


class Taker:
    """A consumer thread that takes all queued items, group by group."""

    def __init__(self, queue: WriterQueue[int], timeout_s: float | None = None) -> None:
        self.groups: list[list[int]] = []
        self.took = Event()
        self._queue, self._timeout_s = queue, timeout_s
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._queue.wait(self._timeout_s)
        group = []
        while (item := self._queue.pop()) is not None:
            group.append(item)
        self.groups.append(group)
        self.took.set()

    def done(self) -> list[list[int]]:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.groups


def test_single_item_is_taken_at_once():
    queue: WriterQueue[int] = WriterQueue()
    taker = Taker(queue)
    queue.put(1)
    assert taker.done() == [[1]]


def test_queued_items_are_taken_without_waiting():
    queue: WriterQueue[int] = WriterQueue()
    for item in range(3):
        queue.put(item)
    assert Taker(queue).done() == [[0, 1, 2]]


def test_wait_ends_at_its_timeout():
    assert Taker(WriterQueue(), timeout_s=0.01).done() == [[]]


def test_wait_expects_as_many_items_as_were_resolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polybus.store.lmdb.writer_queue.POLL_S", TIMEOUT_S)
    queue: WriterQueue[int] = WriterQueue()
    queue.put(0)
    queue.expect(2)  # their producers may submit again, in addition to the queued item
    taker = Taker(queue)
    queue.put(1)
    assert not taker.took.is_set()
    queue.put(2)
    assert taker.done() == [[0, 1, 2]]


def test_wait_for_expected_items_is_bounded():
    queue: WriterQueue[int] = WriterQueue()
    queue.expect(1000)
    queue.put(1)
    assert Taker(queue).done() == [[1]]


def test_urgent_item_ends_the_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polybus.store.lmdb.writer_queue.POLL_S", TIMEOUT_S)
    queue: WriterQueue[int] = WriterQueue()
    queue.expect(1000)
    queue.put(1)
    taker = Taker(queue)
    queue.put(2, urgent=True)
    assert taker.done() == [[1, 2]]


def test_no_item_is_lost_between_many_producers_and_one_consumer():
    queue: WriterQueue[int] = WriterQueue()
    threads = [
        Thread(target=lambda at=at: [queue.put(at * 1000 + n) for n in range(1000)])
        for at in range(4)
    ]
    for thread in threads:
        thread.start()
    found: list[int] = []
    while len(found) < 4000:
        queue.wait(TIMEOUT_S)
        count = len(found)
        while (item := queue.pop()) is not None:
            found.append(item)
        queue.expect(len(found) - count)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(found) == list(range(4000))
    for at in range(4):
        assert [one for one in found if one // 1000 == at] == list(
            range(at * 1000, at * 1000 + 1000)
        )


@pytest.mark.parametrize("sizes", [[ENOUGH_BYTES], [ENOUGH_BYTES // 2, ENOUGH_BYTES // 2]])
def test_wait_ends_when_enough_bytes_are_queued(monkeypatch: pytest.MonkeyPatch, sizes: list[int]):
    monkeypatch.setattr("polybus.store.lmdb.writer_queue.POLL_S", TIMEOUT_S)
    queue: WriterQueue[int] = WriterQueue()
    queue.expect(9)
    taker = Taker(queue)
    for size in sizes:
        queue.put(1, size)
    assert taker.done() == [[1] * len(sizes)]
    queue.release_bytes(sum(sizes))
    queue.expect(1)
    queue.put(2, 1)
    assert Taker(queue).done() == [[2]]
