"""Coroutine tests on asyncio's own loop and on uvloop: two hooks for a conftest."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
# Below pytest's own: that one interrupts the loop, which may take it for a callback's error.
TEST_TIMEOUT_S = 50.0


def on_each(metafunc: pytest.Metafunc, loops: Iterable[str]) -> None:
    """Make one test of a coroutine test for each of these loops (pytest_generate_tests)."""
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_kind")
        metafunc.parametrize("loop_kind", loops)


def run_on(loop_kind: Callable[[dict[str, Any]], str], item: pytest.Function) -> bool | None:
    """Run a coroutine test on the loop that its parameters name (pytest_pyfunc_call)."""
    if not inspect.iscoroutinefunction(item.obj):
        return None
    names = inspect.signature(item.obj).parameters
    arguments = {name: item.funcargs[name] for name in names}
    with asyncio.Runner(loop_factory=LOOPS[loop_kind(item.callspec.params)]) as runner:
        runner.run(_within(TEST_TIMEOUT_S, item.obj(**arguments)))
    return True


async def _within(timeout_s: float, test: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(timeout_s):
        await test
