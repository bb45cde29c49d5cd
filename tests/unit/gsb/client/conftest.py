"""Fixtures of the client's tests: a real bus in a process of its own.

Coroutine tests run twice: on uvloop over TCP, and on asyncio's own loop over a Unix socket.
Tests that start a bus of their own run once, because starting it takes most of their time.
After each test the bus must have no state left.
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
from tests.rig.observer import stats, until
from tests.unit.loops import LOOPS, on_each, run_on

Start = Callable[..., AbstractContextManager[BusProcess]]


@contextmanager
def running(
    *args: str, folder: Path | None = None, port: int = 0, **settings: str
) -> Iterator[BusProcess]:
    """Run a bus with GSB and rqueue. Settings are POLYBUS_* variables without the prefix."""
    env = {f"POLYBUS_{name.upper()}": value for name, value in settings.items()}
    # A short path, because the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as own:
        place = folder or Path(own)
        gsb = (f"gsb=tcp://127.0.0.1:{port}", f"gsb=ipc://{place}/gsb.sock")
        listen = (*gsb, *of_installed("rqueue=tcp://127.0.0.1:0"))
        with serve(*args, listen=listen, folder=place, env=env) as bus:
            yield bus


@pytest.fixture(scope="session")
def bus() -> Iterator[BusProcess]:
    """The bus that all tests share. Each test uses other names."""
    with running("--engine", "memory:") as shared:
        yield shared


@pytest.fixture
def address(bus: BusProcess, request: pytest.FixtureRequest) -> Iterator[str]:
    callspec = getattr(request.node, "callspec", None)
    over_ipc = callspec is not None and callspec.params.get("loop_kind") == "asyncio"
    wanted = "ipc" if over_ipc else "tcp"
    yield next(str(place) for name, place in bus.listeners if place.scheme == wanted)
    until(lambda: stats(bus)["gsb"]["connections"] == 0, "all connections end")
    left = stats(bus)["gsb"]
    assert (left["services"], left["open_calls"], left["serving"]) == (0, 0, 0)


@pytest.fixture
def start() -> Start:
    """Return the function that starts another bus, which the test may stop."""
    return running


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_each(metafunc, ["uvloop"] if "start" in metafunc.fixturenames else LOOPS)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    return run_on(itemgetter("loop_kind"), pyfuncitem)
