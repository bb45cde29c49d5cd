"""What the tests of the client stand on.

Each runs against two servers, the obvious one of polybus.testing.oracle and the
real one, both in a process of their own: what passes on both is the protocol,
not a habit of one of them. Coroutine tests run on asyncio's loop and on uvloop.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from polybus.testing.process import POLYBUS, BusProcess

SERVERS = {
    "oracle": (sys.executable, "-m", "polybus.testing.oracle.rqueue_server"),
    "polybus": (*POLYBUS, "rqueue"),
}
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

# Below pytest's own: that one interrupts the loop, which may take it for a callback's error.
TEST_TIMEOUT_S = 50.0

Start = Callable[..., BusProcess]


@pytest.fixture(params=SERVERS, scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def shared(kind: str) -> Iterator[BusProcess]:
    with BusProcess([*SERVERS[kind], "--port", "0"]) as bus:
        yield bus


@pytest.fixture
def address(shared: BusProcess) -> str:
    """A server that other tests use too, under other topics."""
    return str(shared.address())


@pytest.fixture
def start(kind: str) -> Iterator[Start]:
    """Starts servers of a test's own, which it may stop."""
    running: list[BusProcess] = []

    def start(*args: str, port: int = 0) -> BusProcess:
        running.append(BusProcess([*SERVERS[kind], "--port", str(port), *args]))
        return running[-1]

    yield start
    for bus in running:
        bus.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    return str(request.node.name)[-250:]


# Starting servers takes most of a test's time: such tests meet each loop, and each server, once.
LOOP_OF = {"oracle": "asyncio", "polybus": "uvloop"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function) and "start" not in metafunc.fixturenames:
        metafunc.fixturenames.append("loop_kind")
        metafunc.parametrize("loop_kind", LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on its loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    params = pyfuncitem.callspec.params
    loop_kind = params.get("loop_kind") or LOOP_OF[str(params["kind"])]
    with asyncio.Runner(loop_factory=LOOPS[str(loop_kind)]) as runner:
        runner.run(_within(TEST_TIMEOUT_S, pyfuncitem.obj(**arguments)))
    return True


async def _within(timeout_s: float, test: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(timeout_s):
        await test
