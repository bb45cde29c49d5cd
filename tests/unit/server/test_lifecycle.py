"""The timer of the bus continues after a step that fails."""

from __future__ import annotations

import asyncio

import uvloop

from polybus.server import lifecycle
from polybus.server.lifecycle import Ticker


def test_idle_ticker_pauses_longer_until_it_is_not_idle(monkeypatch):
    monkeypatch.setattr(lifecycle, "TICK_S", 7.0)
    monkeypatch.setattr(lifecycle, "IDLE_TICK_S", 0.001)
    idle = [True, True, False]

    async def main() -> float:
        loop = asyncio.get_running_loop()
        ticked = asyncio.Event()
        step = lambda: None if idle else ticked.set()  # noqa: E731
        ticker = Ticker((step,), lambda failure: None, lambda: idle.pop(0))
        ticker.start()
        await ticked.wait()  # after the short pauses of this test
        assert ticker._handle is not None
        pause_s = ticker._handle.when() - loop.time()
        ticker.stop()
        return pause_s

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        assert runner.run(main()) > 1.0


def test_failing_step_stops_neither_others_nor_the_timer(monkeypatch):
    monkeypatch.setattr(lifecycle, "TICK_S", 0.001)
    failures: list[Exception] = []
    rounds = 0

    def broken() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        nonlocal rounds
        enough = asyncio.Event()

        def counting() -> None:
            nonlocal rounds
            rounds += 1
            if rounds == 5:
                enough.set()

        ticker = Ticker((broken, counting), failures.append)
        ticker.start()
        await enough.wait()
        ticker.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert rounds == 5
    assert [type(failure) for failure in failures] == [ZeroDivisionError] * 5
