"""Message futures behave as futures: alone, in sets, and on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, as_completed, wait
from functools import partial
from threading import Condition, Thread
from typing import Any

import pytest

from polybus.dialects.fdq.client.message_future import MessageFuture, resolve_all
from polybus.errors import Fenced
from polybus.native import Produced
from tests.rig.observer import until

DONE = Produced(1, 3, False)
PATIENCE_S = 30


def some(count: int = 3) -> tuple[Condition, list[MessageFuture]]:
    condition = Condition()
    return condition, [MessageFuture(condition) for _ in range(count)]


def test_state_before_and_after_resolution() -> None:
    condition, receipts = some()
    first = receipts[0]
    assert isinstance(first, Future)
    assert (first.done(), first.running(), first.cancelled()) == (False, True, False)
    with pytest.raises(TimeoutError):
        first.result(0)
    with pytest.raises(TimeoutError):
        first.exception(0)
    resolve_all(condition, receipts, DONE, None)
    assert all(one.done() and not one.running() for one in receipts)
    assert [one.result() for one in receipts] == [DONE] * 3
    assert first.exception() is None


def test_error_is_raised_for_each_future() -> None:
    condition, receipts = some()
    resolve_all(condition, receipts, None, Fenced("taken over"))
    for one in receipts:
        assert isinstance(one.exception(), Fenced)
        with pytest.raises(Fenced, match="taken over"):
            one.result()


def test_future_cannot_be_cancelled() -> None:
    condition, (one,) = some(1)
    assert not one.cancel()
    resolve_all(condition, [one], DONE, None)
    assert one.result() is DONE


def test_callbacks_run_once_even_if_added_late() -> None:
    condition, receipts = some(2)
    called: list[Any] = []
    receipts[0].add_done_callback(called.append)
    receipts[1].add_done_callback(called.append)
    receipts[1].add_done_callback(called.append)
    resolve_all(condition, receipts, DONE, None)
    receipts[0].add_done_callback(called.append)
    assert called == [receipts[0], receipts[1], receipts[1], receipts[0]]


def test_failing_callback_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    condition, receipts = some(2)
    called: list[Any] = []
    receipts[0].add_done_callback(lambda _: 1 / 0)
    receipts[1].add_done_callback(called.append)
    resolve_all(condition, receipts, DONE, None)
    assert called == [receipts[1]]
    assert "ZeroDivisionError" in caplog.text


def in_thread(work: Callable[[], object]) -> tuple[Thread, list[object]]:
    found: list[object] = []
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("error", [None, Fenced("x")])
@pytest.mark.parametrize("when", [ALL_COMPLETED, FIRST_COMPLETED])
def test_wait_for_several_futures(error: Exception | None, when: str) -> None:
    one, other = some(), some()
    everything = [*one[1], *other[1]]
    thread, found = in_thread(lambda: wait(everything, PATIENCE_S, when))
    until(lambda: all(receipt._waiters for receipt in everything), "the wait")
    resolve_all(*one, None if error else DONE, error)
    resolve_all(*other, DONE, None)
    thread.join(PATIENCE_S)
    (answer,) = found
    assert isinstance(answer, tuple)
    done = answer[0]
    assert done >= set(one[1])
    assert when == FIRST_COMPLETED or done == set(everything)


def test_as_completed_yields_each_future() -> None:
    one, other = some(), some(2)
    by_receipt: dict[Future[Produced], int] = {
        receipt: at for at, receipt in enumerate([*one[1], *other[1]])
    }
    thread, found = in_thread(lambda: [by_receipt[r] for r in as_completed(by_receipt)])
    until(lambda: all(receipt._waiters for receipt in one[1] + other[1]), "the wait")
    resolve_all(*other, DONE, None)
    resolve_all(*one, DONE, None)
    thread.join(PATIENCE_S)
    (order,) = found
    assert isinstance(order, list)
    assert sorted(order) == [0, 1, 2, 3, 4]


def test_waiter_of_one_future_wakes_with_its_result() -> None:
    """They share a condition: a waiter that wakes for another future must continue to wait."""
    condition, receipts = some(50)
    waiting = [in_thread(partial(one.result, PATIENCE_S)) for one in receipts]
    resolve_all(condition, receipts, DONE, None)
    for thread, found in waiting:
        thread.join(PATIENCE_S)
        assert found == [DONE]


def test_future_on_an_event_loop() -> None:
    condition, receipts = some(2)

    async def main() -> list[Produced]:
        futures = [asyncio.wrap_future(one) for one in receipts]
        dropped = asyncio.wrap_future(receipts[0])
        dropped.cancel()
        Thread(target=resolve_all, args=(condition, receipts, DONE, None)).start()
        return await asyncio.gather(*futures)

    assert asyncio.run(main()) == [DONE, DONE]
