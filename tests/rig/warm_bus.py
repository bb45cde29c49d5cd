"""Buses and commands that start at once: forked from a process that has loaded them.

Hundreds of tests have a bus of their own, and loading an interpreter with it takes ten times
as long as starting it. A fork server loads the modules of buses and commands (`warm_modules`).
Its children run the command with the same arguments, environment and files as a new process, and
end as an interpreter ends. Commands of a test (`BusProcess.run`) start the same way.

    warm_bus.use()                  # polybus.testing.bus_process now forks where it can
    with serve() as bus: ...
    with warm_bus.cold(): ...       # but not here: the start itself is tested

A command that needs another interpreter, or other variables than those of the bus, is started
as a process of its own.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import IO, NoReturn

from polybus.testing import bus_process
from polybus.testing.bus_process import POLYBUS, Child, Completed, Launcher
from tests.rig.fork_server import ForkedProcess, ForkServer

BUSES = ("serve", "rqueue")
LOADED = (__name__, "tests.rig.warm_modules")
# Variables that a bus reads when it starts, or never (a Spark session leaves some behind). Any
# other variable may be read while code is loaded, so it must be that of the server.
READ_AT_START = ("POLYBUS_", "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "PYTEST_", "SPARK_", "PYSPARK_")


class WarmServer:
    """The fork server of buses and commands."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._variables = _others(env)
        self._server = ForkServer(LOADED, env, children_survive=True)

    def fits(self, env: Mapping[str, str]) -> bool:
        return _others(env) == self._variables

    def start(self, args: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> ForkedProcess:
        reading, writing = os.pipe()
        try:
            child = self._fork(args, env, writing, log.fileno())
        finally:
            os.close(writing)
        child.stdout = os.fdopen(reading, "rb", buffering=0)
        return child

    def run(self, args: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Completed:
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            child = self._fork(args, env, stdout.fileno(), stderr.fileno())
            try:
                code = child.wait(timeout_s)
            finally:
                child.kill()
                child.wait()
            stdout.seek(0)
            stderr.seek(0)
            return Completed(args, code, stdout.read(), stderr.read())

    def _fork(
        self, args: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> ForkedProcess:
        return self._server.fork(
            f"{__name__}:run_command", [list(args)], env=env, stdout=stdout, stderr=stderr
        )

    def close(self) -> None:
        """End the server; forked buses go on."""
        self._server.close()


def run_command(args: list[str]) -> NoReturn:
    """Run a `polybus` command in the forked child.

    The child then ends as an interpreter does, except that the kernel frees its memory: clearing
    all modules takes longer than most commands. Processes that start cold clear theirs.
    """
    sys.argv = ["polybus", *args]
    code: int = importlib.import_module("polybus.cli.main").run(args)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _others(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(READ_AT_START)}


_environment: dict[str, str] | None = None
_is_cold = False


def use() -> None:
    """Fork the buses and commands that this process starts from now on."""
    global _environment
    _environment = dict(os.environ)
    bus_process.launcher = WarmLauncher()


@contextmanager
def cold() -> Iterator[None]:
    """Start each bus and command as a process of its own, in this block."""
    global _is_cold
    before, _is_cold = _is_cold, True
    try:
        yield
    finally:
        _is_cold = before


@cache
def _server() -> WarmServer | None:
    if _environment is None:
        return None
    server = WarmServer(_environment)
    atexit.register(server.close)
    return server


def _fitting(env: Mapping[str, str]) -> WarmServer | None:
    server = None if _is_cold else _server()
    return server if server is not None and server.fits(env) else None


class WarmLauncher(Launcher):
    """Forks buses and commands where it can; starts the others as processes."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Child:
        is_bus = tuple(command[:3]) == POLYBUS and len(command) > 3 and command[3] in BUSES
        if is_bus and (server := _fitting(env)):
            return server.start(command[3:], env, log)
        return super().start(command, env, log)

    def run(self, args: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Completed:
        if server := _fitting(env):
            return server.run(args, env, timeout_s)
        return super().run(args, env, timeout_s)
