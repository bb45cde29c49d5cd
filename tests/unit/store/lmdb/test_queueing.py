"""The queue in front of the writer: groups are waited for, and nobody for ever."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from polybus.store.lmdb.writer_queue import ENOUGH_BYTES, WriterQueue

TIMEOUT_S = 30.0


class Taker:
    """A thread that takes what there is, group by group."""

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


def test_a_lone_item_is_taken_at_once():
    queue: WriterQueue[int] = WriterQueue()
    taker = Taker(queue)
    queue.put(1)
    assert taker.done() == [[1]]


def test_what_is_there_already_is_taken_without_waiting():
    queue: WriterQueue[int] = WriterQueue()
    for item in range(3):
        queue.put(item)
    assert Taker(queue).done() == [[0, 1, 2]]


def test_nothing_comes_until_time_is_up():
    assert Taker(WriterQueue(), timeout_s=0.01).done() == [[]]


def test_as_many_as_were_answered_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polybus.store.lmdb.writer_queue.POLL_S", TIMEOUT_S)
    queue: WriterQueue[int] = WriterQueue()
    queue.put(0)
    queue.expect(2)  # they may come again, beside the one that waits
    taker = Taker(queue)
    queue.put(1)
    assert not taker.took.is_set()
    queue.put(2)
    assert taker.done() == [[0, 1, 2]]


def test_those_who_do_not_come_again_are_not_waited_for_ever():
    queue: WriterQueue[int] = WriterQueue()
    queue.expect(1000)
    queue.put(1)
    assert Taker(queue).done() == [[1]]


def test_what_is_urgent_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polybus.store.lmdb.writer_queue.POLL_S", TIMEOUT_S)
    queue: WriterQueue[int] = WriterQueue()
    queue.expect(1000)
    queue.put(1)
    taker = Taker(queue)
    queue.put(2, urgent=True)
    assert taker.done() == [[1, 2]]


def test_nothing_is_lost_between_many_who_put_and_one_who_takes():
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
def test_nobody_is_waited_for_once_there_are_bytes_enough(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
):
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
