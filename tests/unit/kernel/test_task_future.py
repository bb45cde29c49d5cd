"""TaskFuture behaves as Python's Future, alone and in batches."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import (
    ALL_COMPLETED,
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
from tests.rig.observer import until

WAIT_S = 30.0


class CompiledFuture(task_future.TaskFuture, Future[Any]):
    pass


KINDS = pytest.mark.parametrize("make", [CompiledFuture, Future])
Make = Callable[[], "Future[Any]"]


def cancel(future: Future[Any]) -> None:
    assert future.cancel()


ENDS: dict[str, Callable[[Future[Any]], object]] = {
    "value": lambda future: future.set_result(7),
    "error": lambda future: future.set_exception(KeyError("x")),
    "cancelled": cancel,
}


def observe(future: Future[Any]) -> list[object]:
    """Return the state of a future, without waiting."""
    state: list[object] = [future.cancelled(), future.running(), future.done()]
    for ask in (future.result, future.exception):
        try:
            state.append(ask(0))
        except BaseException as error:
            state.append((type(error), error.args))
    return [repr(value) for value in state]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_states_equal_those_of_a_stock_future(started: bool, end: str) -> None:
    histories = []
    for make in (CompiledFuture, Future[Any]):
        future, called = make(), []
        history: list[object] = [observe(future)]
        if started:
            history.append(future.set_running_or_notify_cancel())
        history.append(observe(future))
        future.add_done_callback(lambda one, called=called: called.append(one.done()))  # type: ignore[misc]
        if not (started and end == "cancelled"):
            ENDS[end](future)
        else:
            assert not future.cancel()
        future.add_done_callback(lambda one, called=called: called.append("late"))  # type: ignore[misc]
        histories.append([*history, observe(future), called])
    assert histories[0] == histories[1]


@KINDS
def test_future_is_resolved_once(make: Make) -> None:
    for end in ENDS.values():
        future = make()
        end(future)
        with pytest.raises(InvalidStateError):
            future.set_result(1)
        with pytest.raises(InvalidStateError):
            future.set_exception(OSError())


@KINDS
def test_cancelled_future_cannot_start(make: Make) -> None:
    future = make()
    assert future.cancel()
    assert future.cancel()
    assert not future.set_running_or_notify_cancel()
    assert future.cancelled()


@KINDS
def test_running_future_cannot_start_again(make: Make) -> None:
    future = make()
    assert future.set_running_or_notify_cancel()
    with pytest.raises(RuntimeError):
        future.set_running_or_notify_cancel()


@KINDS
@pytest.mark.parametrize("end", ENDS)
def test_all_blocked_threads_wake(make: Make, end: str) -> None:
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
def test_result_can_be_awaited_again_after_a_timeout(make: Make) -> None:
    future = make()
    for ask in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            ask(0.001)
    future.set_result(1)
    assert future.result(0) == 1


@KINDS
def test_failing_callback_is_logged_and_others_run(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    future, called = make(), []

    def fail(_: Future[Any]) -> None:
        raise ValueError("error of a callback")

    future.add_done_callback(fail)
    future.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        future.set_result(1)
        future.add_done_callback(fail)
    assert called == [future]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("end", ENDS)
def test_wait_and_as_completed_accept_it(end: str) -> None:
    early, late = CompiledFuture(), CompiledFuture()
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


def test_event_loop_can_await_it() -> None:
    async def ask() -> object:
        future = CompiledFuture()
        threading.Thread(target=future.set_result, args=(5,)).start()
        return await asyncio.wrap_future(future)

    assert asyncio.run(ask()) == 5


def test_results_of_tasks_are_hidden_until_resolve_all() -> None:
    def add(state: list[object], subject: int, now_ns: int) -> int:
        if subject < 0:
            raise KeyError(subject)
        state.append(subject)
        return subject + now_ns

    group = [CompiledFuture(add, subject, 3) for subject in (1, -2, 3, 4)]
    assert group[2].cancel()
    state: list[object] = []
    started = task_future.run_tasks(group, state, 100, KeyError)
    assert started == [group[0], group[1], group[3]]
    assert state == [1, 4]
    assert not any(one.done() for one in started)
    assert not group[0].cancel()
    task_future.resolve_all(started)
    assert group[0].result(0) == 101
    assert isinstance(group[1].exception(0), KeyError)
    assert group[2].cancelled()
    assert group[3].result(0) == 104
    assert [one.size for one in group] == [3] * 4
    assert {one.task for one in group} == {None}  # a done future holds no task


def test_tasks_can_run_again_after_an_unexpected_error() -> None:
    faults = [OSError("disk")]

    def work(_state: object, subject: int, _now_ns: int) -> int:
        if faults and subject == 2:
            raise faults.pop()
        return subject

    group = [CompiledFuture(work, subject) for subject in (1, 2, 3)]
    with pytest.raises(OSError, match="disk"):
        task_future.run_tasks(group, None, 0, KeyError)
    assert not any(one.done() for one in group)
    task_future.resolve_all(task_future.run_tasks(group, None, 0, KeyError))
    assert [one.result(0) for one in group] == [1, 2, 3]


def test_resolve_all_skips_done_futures() -> None:
    future = CompiledFuture()
    future.set_result(1)
    task_future.resolve_all([future])
    assert future.result(0) == 1


def test_other_objects_are_refused() -> None:
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
            group = [CompiledFuture(lambda _s, subject, _n: subject, at) for at in range(40)]
            started = task_future.run_tasks(group, None, 0, KeyError)
            resolver = threading.Thread(target=task_future.resolve_all, args=(started,))
            resolver.start()
            for one in reversed(group):
                one.add_done_callback(lambda done: called.append(done.result(0)))
            resolver.join(WAIT_S)
    finally:
        gc.set_threshold(*before)
    assert sorted(called) == sorted(list(range(40)) * 50)


def test_error_does_not_keep_its_future_alive() -> None:
    """There is no reference cycle, so the future is freed without the collector."""
    future = CompiledFuture()
    future.set_exception(KeyError("x"))
    freed: list[bool] = []
    gc.disable()
    try:
        with pytest.raises(KeyError):
            future.result(0)
        weakref.finalize(future, freed.append, True)
        del future
        assert freed
    finally:
        gc.enable()


def futures(count: int) -> list[CompiledFuture]:
    return [CompiledFuture() for _ in range(count)]


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    return thread, results


@pytest.mark.parametrize("error", [None, KeyError("x")])
@pytest.mark.parametrize("is_running", [False, True])
def test_finish_all_gives_each_future_the_same_result(
    error: Exception | None, is_running: bool
) -> None:
    group = futures(3)
    called: list[Any] = []
    for future in group:
        if is_running:
            assert future.set_running_or_notify_cancel()
        future.add_done_callback(called.append)
    task_future.finish_all(group, None if error else 7, error)
    assert called == group
    assert all(future.done() and not future.running() for future in group)
    assert [future.exception(0) for future in group] == [error] * 3
    if error is None:
        assert [future.result(0) for future in group] == [7] * 3
    with pytest.raises(InvalidStateError):
        task_future.finish_all(group, 8, None)


@pytest.mark.parametrize("error", [None, KeyError("x")])
@pytest.mark.parametrize("when", [ALL_COMPLETED, FIRST_COMPLETED])
def test_wait_for_batches_that_finish_one_after_the_other(
    error: Exception | None, when: str
) -> None:
    first, second = futures(3), futures(3)
    thread, results = in_thread(lambda: wait([*first, *second], WAIT_S, when))
    until(lambda: all(future._waiters for future in [*first, *second]), "the wait")
    task_future.finish_all(first, None if error else 7, error)
    task_future.finish_all(second, 7, None)
    thread.join(WAIT_S)
    done: Any = results[0]
    # The first of a batch ends a wait for the first, before the rest of its batch is resolved.
    assert done.done & set(first)
    assert when == FIRST_COMPLETED or done.done == {*first, *second}


def test_as_completed_yields_each_future_of_several_batches() -> None:
    first, second = futures(3), futures(2)
    thread, results = in_thread(lambda: list(as_completed([*first, *second])))
    until(lambda: all(future._waiters for future in [*first, *second]), "the wait")
    task_future.finish_all(second, 7, None)
    task_future.finish_all(first, 7, None)
    thread.join(WAIT_S)
    order: Any = results[0]
    assert sorted(map(id, order)) == sorted(map(id, [*first, *second]))


def test_fields_of_a_stock_future_appear_while_others_resolve_it() -> None:
    """The constructor of Future runs at the first `wait`, possibly while the result is set."""
    for _ in range(300):
        group = futures(4)
        thread, results = in_thread(lambda group=group: wait(group, WAIT_S))  # type: ignore[misc]
        task_future.finish_all(group, 7, None)
        thread.join(WAIT_S)
        done: Any = results[0]
        assert done.done == set(group)
