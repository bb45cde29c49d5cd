"""Fixtures of the client tests: a real bus in its own process.

Coroutine tests run on asyncio's loop and on uvloop; those that start a bus of
their own, which takes most of their time, on one of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from pathlib import Path

import pytest

from polybus.testing.bus_process import BusProcess, serve
from tests.rig.installed_dialects import of_installed
from tests.unit.loops import LOOPS, on_each, run_on

Start = Callable[..., AbstractContextManager[BusProcess]]


@contextmanager
def running(folder: Path | None = None, **settings: str) -> Iterator[BusProcess]:
    """A bus with Freud and rqueue; settings are POLYBUS_* variables without the prefix."""
    env = {f"POLYBUS_{name.upper()}": value for name, value in settings.items()}
    # Short on purpose: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as own:
        place = folder or Path(own)
        listen = (
            f"freud=unix:{place}/freud.sock",
            *of_installed("rqueue=tcp://127.0.0.1:0"),
        )
        with serve(listen=listen, folder=place, env=env) as bus:
            yield bus


@pytest.fixture(scope="session")
def bus() -> Iterator[BusProcess]:
    """A bus that other tests use too, under other topics."""
    with running() as one:
        yield one


@pytest.fixture
def address(bus: BusProcess) -> str:
    return str(bus.address("freud"))


@pytest.fixture
def start() -> Start:
    """Starts a bus of the test's own, which it may stop."""
    return running


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    return str(request.node.name)[-250:].replace(",", ";").lstrip("_")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_each(metafunc, ["uvloop"] if "start" in metafunc.fixturenames else LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_on(itemgetter("loop_kind"), pyfuncitem)
