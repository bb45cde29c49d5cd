"""Answers stand in for Python's Future: whatever that does, they do, and many at once."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from typing import Any

import pytest

from polybus.kernel import task_future

WAIT_S = 30.0


class Answer(task_future.TaskFuture, Future[Any]):
    pass


KINDS = pytest.mark.parametrize("make", [Answer, Future])
Make = Callable[[], "Future[Any]"]


def cancelled(future: Future[Any]) -> None:
    assert future.cancel()


ENDS: dict[str, Callable[[Future[Any]], object]] = {
    "value": lambda future: future.set_result(7),
    "error": lambda future: future.set_exception(KeyError("x")),
    "cancelled": cancelled,
}


def seen(future: Future[Any]) -> list[object]:
    """All that can be asked of a future without waiting."""
    found: list[object] = [future.cancelled(), future.running(), future.done(), future._state]
    for ask in (future.result, future.exception):
        try:
            found.append(ask(0))
        except BaseException as error:
            found.append((type(error), error.args))
    return [repr(one) for one in found]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_every_state_equals_that_of_a_standard_future(begun: bool, end: str) -> None:
    stories = []
    for make in (Answer, Future[Any]):
        future, called = make(), []
        story: list[object] = [seen(future)]
        if begun:
            story.append(future.set_running_or_notify_cancel())
        story.append(seen(future))
        future.add_done_callback(lambda one, called=called: called.append(one.done()))  # type: ignore[misc]
        if not (begun and end == "cancelled"):
            ENDS[end](future)
        else:
            assert not future.cancel()
        future.add_done_callback(lambda one, called=called: called.append("late"))  # type: ignore[misc]
        stories.append([*story, seen(future), called])
    assert stories[0] == stories[1]


@KINDS
def test_result_can_be_set_only_once(make: Make) -> None:
    for end in ENDS.values():
        future = make()
        end(future)
        with pytest.raises(InvalidStateError):
            future.set_result(1)
        with pytest.raises(InvalidStateError):
            future.set_exception(OSError())


@KINDS
def test_cancelled_task_does_not_start(make: Make) -> None:
    future = make()
    assert future.cancel()
    assert future.cancel()
    assert not future.set_running_or_notify_cancel()
    assert future.cancelled()


@KINDS
def test_running_task_does_not_start_again(make: Make) -> None:
    future = make()
    assert future.set_running_or_notify_cancel()
    with pytest.raises(RuntimeError):
        future.set_running_or_notify_cancel()


@KINDS
@pytest.mark.parametrize("end", ENDS)
def test_completion_wakes_all_waiting_threads(make: Make, end: str) -> None:
    future, asleep = make(), threading.Barrier(9)

    def sleep() -> object:
        asleep.wait(WAIT_S)
        try:
            return future.result(WAIT_S)
        except (KeyError, CancelledError) as error:
            return type(error)

    with ThreadPoolExecutor(8) as pool:
        sleepers = [pool.submit(sleep) for _ in range(8)]
        asleep.wait(WAIT_S)
        ENDS[end](future)
        found = {one.result(WAIT_S) for one in sleepers}
    assert found == {{"value": 7, "error": KeyError, "cancelled": CancelledError}[end]}


@KINDS
def test_wait_after_a_timeout_succeeds(make: Make) -> None:
    future = make()
    for ask in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            ask(0.001)
    future.set_result(1)
    assert future.result(0) == 1


@KINDS
def test_failing_callback_does_not_stop_the_others(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    future, called = make(), []

    def fail(_: Future[Any]) -> None:
        raise ValueError("a callback's own")

    future.add_done_callback(fail)
    future.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        future.set_result(1)
        future.add_done_callback(fail)
    assert called == [future]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("end", ENDS)
def test_concurrent_futures_wait_accepts_it(end: str) -> None:
    early, late = Answer(), Answer()
    ENDS[end](early)
    early.cancelled() and early.set_running_or_notify_cancel()
    assert wait([early, late], return_when=FIRST_COMPLETED) == ({early}, {late})
    assert wait([early, late], timeout=0.001).not_done == {late}
    with ThreadPoolExecutor(2) as pool:
        both = pool.submit(wait, [early, late])
        each = pool.submit(lambda: list(as_completed([early, late])))
        ENDS[end](late)
        late.cancelled() and late.set_running_or_notify_cancel()
        assert both.result(WAIT_S).done == {early, late}
        assert sorted(map(id, each.result(WAIT_S))) == sorted([id(early), id(late)])


def test_asyncio_can_await_it() -> None:
    async def ask() -> object:
        answer = Answer()
        threading.Thread(target=answer.set_result, args=(5,)).start()
        return await asyncio.wrap_future(answer)

    assert asyncio.run(ask()) == 5


def test_run_keeps_results_until_they_are_published() -> None:
    def add(books: list[object], subject: int, now_ns: int) -> int:
        if subject < 0:
            raise KeyError(subject)
        books.append(subject)
        return subject + now_ns

    group = [Answer(add, subject, 3) for subject in (1, -2, 3, 4)]
    assert group[2].cancel()
    books: list[object] = []
    begun = task_future.run_tasks(group, books, 100, KeyError)
    assert begun == [group[0], group[1], group[3]]
    assert books == [1, 4]
    assert not any(one.done() for one in begun)
    assert not group[0].cancel()
    task_future.resolve_all(begun)
    assert group[0].result(0) == 101
    assert isinstance(group[1].exception(0), KeyError)
    assert group[2].cancelled()
    assert group[3].result(0) == 104
    assert [one.size for one in group] == [3] * 4
    assert {one.task for one in group} == {None}  # what it holds is let go


def test_error_stops_the_run_and_it_can_be_run_again() -> None:
    faults = [OSError("disk")]

    def work(_books: object, subject: int, _now_ns: int) -> int:
        if faults and subject == 2:
            raise faults.pop()
        return subject

    group = [Answer(work, subject) for subject in (1, 2, 3)]
    with pytest.raises(OSError, match="disk"):
        task_future.run_tasks(group, None, 0, KeyError)
    assert not any(one.done() for one in group)
    task_future.resolve_all(task_future.run_tasks(group, None, 0, KeyError))
    assert [one.result(0) for one in group] == [1, 2, 3]


def test_publishing_skips_finished_futures() -> None:
    answer = Answer()
    answer.set_result(1)
    task_future.resolve_all([answer])
    assert answer.result(0) == 1


def test_other_objects_are_rejected() -> None:
    for bad in ([Future()], [None]):
        with pytest.raises((TypeError, AttributeError)):
            task_future.resolve_all(bad)  # type: ignore[misc]


def test_no_callback_is_lost_between_threads() -> None:
    """Add callbacks while futures are resolved and the garbage collector runs."""
    called: list[int] = []
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(50):
            group = [Answer(lambda _b, subject, _n: subject, at) for at in range(40)]
            begun = task_future.run_tasks(group, None, 0, KeyError)
            teller = threading.Thread(target=task_future.resolve_all, args=(begun,))
            teller.start()
            for one in reversed(group):
                one.add_done_callback(lambda done: called.append(done.result(0)))
            teller.join(WAIT_S)
    finally:
        gc.set_threshold(*before)
    assert sorted(called) == sorted(list(range(40)) * 50)


def test_exception_does_not_keep_its_future_alive() -> None:
    """No cycle: it goes at once, without the collector."""
    answer = Answer()
    answer.set_exception(KeyError("x"))
    gone: list[bool] = []
    gc.disable()
    try:
        with pytest.raises(KeyError):
            answer.result(0)
        weakref.finalize(answer, gone.append, True)
        del answer
        assert gone
    finally:
        gc.enable()
