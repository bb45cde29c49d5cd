"""Signals, the timer, and the end.

    SIGTERM, SIGINT   stop: drain, then exit 0; a second one ends the process at once
    SIGHUP            reload rules, keys, tokens and certificates

A stop takes less than 10 s. If the loop hangs, a thread ends the process after HARD_STOP_S.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from typing import Any

TICK_S = 0.25
# Without a connection nothing times out, and ticks are most of what an idle bus costs.
IDLE_TICK_S = 1.0
# Callers count on 10 s; draining has its own, shorter limit within.
HARD_STOP_S = 8.5
STUCK_EXIT_CODE = 1


class Lifecycle:
    """Waits for signals on behalf of the bus."""

    def __init__(
        self,
        reload: Callable[[], Awaitable[None]],
        log: Any,
        flush: Callable[[], None],
    ) -> None:
        self._reload = reload
        self._log = log
        self._flush = flush
        self._stopping = asyncio.Event()
        self._reloads = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._start_reload)

    async def until_stopped(self) -> None:
        await self._stopping.wait()

    def _stop(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            self._log.warning("stopping at once", signal=number.name)
            self._exit(128 + number)
        self._log.info("stopping", signal=number.name)
        timer = threading.Timer(HARD_STOP_S, self._exit, (STUCK_EXIT_CODE,))
        timer.daemon = True
        timer.start()
        self._stopping.set()

    def _exit(self, code: int) -> None:
        self._flush()
        os._exit(code)

    def _start_reload(self) -> None:
        async def reload() -> None:
            async with self._reloads:  # a second SIGHUP reloads after the first
                await self._reload()

        task = asyncio.get_running_loop().create_task(reload())
        self._tasks.add(task)  # the loop keeps only a weak reference
        task.add_done_callback(self._tasks.discard)


class Ticker:
    """Calls each step four times a second, or once a second while `is_idle` returns True.

    A step that fails is reported, and called again.
    """

    def __init__(
        self,
        steps: tuple[Callable[[], None], ...],
        failed: Callable[[Exception], None],
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._steps = steps
        self._failed = failed
        self._is_idle = is_idle
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        pause_s = IDLE_TICK_S if self._is_idle() else TICK_S
        self._handle = asyncio.get_running_loop().call_later(pause_s, self._tick)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _tick(self) -> None:
        self.start()
        for step in self._steps:
            try:
                step()
            except Exception as error:
                self._failed(error)
