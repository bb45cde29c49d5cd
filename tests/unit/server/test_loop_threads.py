"""Between the loop and other threads."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import partial

import pytest

from polybus.errors import Denied, Unavailable
from polybus.server import loop_threads
from polybus.server.loop_threads import CompletionQueue, LoopCaller, WorkerPool


def test_function_runs_on_the_loop_and_returns_its_result():
    async def live() -> None:
        on_loop = LoopCaller(asyncio.get_running_loop())
        main = threading.get_ident()
        assert await asyncio.to_thread(on_loop, threading.get_ident) == main
        assert await asyncio.to_thread(on_loop, max, 3, 5) == 5

        def refuse() -> None:
            raise Denied("no")

        with pytest.raises(Denied, match="no"):
            await asyncio.to_thread(on_loop, refuse)

    asyncio.run(live())


def test_call_that_timed_out_is_not_executed(monkeypatch):
    monkeypatch.setattr(loop_threads, "ANSWER_TIMEOUT_S", 0.01)
    loop = asyncio.new_event_loop()
    ran: list[int] = []
    with pytest.raises(Unavailable):
        LoopCaller(loop)(ran.append, 1)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    assert ran == []


def test_call_to_an_ended_loop():
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(Unavailable, match="stopping"):
        LoopCaller(loop)(print)
    CompletionQueue(loop).call(lambda: None)


def test_steps_run_in_order_and_results_arrive_on_the_loop():
    async def live() -> list[object]:
        completions = CompletionQueue(asyncio.get_running_loop())
        readers = WorkerPool(completions)
        found: list[object] = []
        done = asyncio.Event()
        for number in range(100):
            completions.call(partial(found.append, number))
        readers(lambda: 1 // 0, lambda outcome: found.append(type(outcome.exception())))
        await asyncio.sleep(0)

        def on_done(outcome: Future[int]) -> None:
            found.append(outcome.result())
            done.set()

        readers(threading.get_ident, on_done)
        await done.wait()
        readers.close()
        return found

    found = asyncio.run(live())
    assert found[:100] == list(range(100))
    assert ZeroDivisionError in found
    assert threading.get_ident() not in found
