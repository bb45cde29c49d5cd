"""Fixtures of the client tests.

Each test runs against two servers, the plain one of tests.rig.oracle and the real one, both
in a process of their own, so that no test depends on details of one server. Coroutine tests
run on asyncio's loop and on uvloop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from polybus.testing.bus_process import POLYBUS, BusProcess
from tests.unit.loops import LOOPS, on_each, run_on

SERVERS = {
    "oracle": (sys.executable, "-m", "tests.rig.oracle.rqueue_server"),
    "polybus": (*POLYBUS, "rqueue"),
}

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
    """Start servers of a test's own, which it may stop."""
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
    if "start" not in metafunc.fixturenames:
        on_each(metafunc, LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_on(lambda its: its.get("loop_kind") or LOOP_OF[its["kind"]], pyfuncitem)
