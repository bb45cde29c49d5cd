"""Bytes on their way to the disk: bounded, in turn, and given back."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from polybus.errors import StoreClosed, TooLarge
from polybus.native.port.produce_stream import UncommittedBudget
from tests.rig.observer import until


def test_bytes_are_reserved_and_released():
    budget, first = UncommittedBudget(10), Future()
    assert budget.submit(7, lambda: first) is first
    assert budget.used == 7
    first.set_result(None)
    assert budget.used == 0
    failed: Future[None] = Future()
    budget.submit(10, lambda: failed)
    failed.set_exception(ValueError())
    assert budget.used == 0


def test_failed_submit_releases_its_bytes():
    budget = UncommittedBudget(10)
    with pytest.raises(ZeroDivisionError):
        budget.submit(7, lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert budget.used == 0


def test_batch_over_the_limit_is_refused():
    with pytest.raises(TooLarge):
        UncommittedBudget(10).submit(11, Future)


def test_waiting_batches_are_served_in_order():
    budget, held, order = UncommittedBudget(10), Future(), []
    budget.submit(8, lambda: held)

    def hand_over(name: str) -> Future[None]:
        order.append(name)
        return Future()

    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(budget.submit, 9, lambda: hand_over("large"))
        until(lambda: len(budget._queue) == 1, "it waits")
        small = pool.submit(budget.submit, 1, lambda: hand_over("small"))
        until(lambda: len(budget._queue) == 2, "this one, too, though there would be room")
        assert order == []
        held.set_result(None)
        large.result(10)
        small.result(10)
    assert order == ["large", "small"]
    assert budget.used == 10


def test_close_ends_all_waits_of_the_budget():
    budget = UncommittedBudget(10)
    budget.submit(10, Future)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(budget.submit, 1, Future)
        until(lambda: len(budget._queue) == 1, "it waits")
        budget.close()
        with pytest.raises(StoreClosed):
            waiting.result(10)
