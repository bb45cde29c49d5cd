"""A bus at once: forked from a process that has loaded all of it.

Hundreds of tests have a bus of their own, and to load an interpreter with it takes ten times
as long as to start it. So one process loads what `polybus serve` and `polybus rqueue` load,
and forks when it is asked to; the child does what the command does with these arguments, in
this environment and with these files, down to how an interpreter ends. So do commands that
a test gives to its bus (`BusProcess.run`).

    warm.use()                                   # from here on, `start` is warm where it can be
    with serve() as bus: ...                     # polybus.testing.bus_process
    with warm.cold(): ...                        # but not here: it is the start that is tested

Whatever makes another interpreter, or other code in it, is started in the ordinary way: a
command of its own, variables but those of the bus.

How the two processes talk is in `forking`.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from polybus.testing import bus_process
from polybus.testing.bus_process import POLYBUS, Child, Completed, Launcher
from tests.rig.bus_fork_server import MAX_REQUEST_BYTES

BUSES = ("serve", "rqueue")
FORKING = "tests.rig.bus_fork_server"
# What a bus reads when it starts, or never (a session of Spark leaves some in our environment).
# All else may be read as code is loaded.
ANY = ("POLYBUS_", "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "PYTEST_", "SPARK_", "PYSPARK_")


class Forked:
    """A child of the process that forks; of `subprocess.Popen` what tests use."""

    def __init__(self, pid: int, talk: socket.socket) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = None
        self.returncode: int | None = None
        self._talk = talk

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(["polybus"], timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._talk.settimeout(timeout)
            try:
                said = self._talk.recv(MAX_REQUEST_BYTES)
            except (TimeoutError, BlockingIOError):
                return None
            if not said:
                raise RuntimeError("the process that forks has ended")
            self.returncode = json.loads(said)
            self._talk.close()
        return self.returncode


class Warm:
    """The process that forks."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._variables = _others(env)
        self._talk, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", FORKING, str(theirs.fileno())],
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fits(self, env: Mapping[str, str]) -> bool:
        return _others(env) == self._variables

    def start(self, args: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Forked:
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
            for one in (stdout, stderr):
                one.seek(0)
            return Completed(args, code, stdout.read(), stderr.read())

    def _fork(self, args: Sequence[str], env: Mapping[str, str], out: int, err: int) -> Forked:
        request = json.dumps([str(Path.cwd()), list(args), dict(env)]).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._talk, [request], [theirs.fileno(), out, err])
        return Forked(json.loads(ours.recv(MAX_REQUEST_BYTES)), ours)

    def close(self) -> None:
        """Whoever was forked goes on."""
        self._talk.close()
        self._process.wait()


def _others(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(ANY)}


_environment: dict[str, str] | None = None
_is_cold = False


def use() -> None:
    """Buses and commands that this process starts are forked from now on."""
    global _environment
    _environment = dict(os.environ)
    bus_process.launcher = WarmLauncher()


@contextmanager
def cold() -> Iterator[None]:
    """Each bus and command is a program of its own, in here."""
    global _is_cold
    before, _is_cold = _is_cold, True
    try:
        yield
    finally:
        _is_cold = before


@cache
def _warm() -> Warm | None:
    if _environment is None:
        return None
    one = Warm(_environment)
    atexit.register(one.close)
    return one


def _fitting(env: Mapping[str, str]) -> Warm | None:
    warm = None if _is_cold else _warm()
    return warm if warm is not None and warm.fits(env) else None


class WarmLauncher(Launcher):
    """Forks buses and commands where it can; starts the others as processes."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Child:
        is_bus = tuple(command[:3]) == POLYBUS and len(command) > 3 and command[3] in BUSES
        if is_bus and (warm := _fitting(env)):
            return warm.start(command[3:], env, log)
        return super().start(command, env, log)

    def run(self, args: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Completed:
        if warm := _fitting(env):
            return warm.run(args, env, timeout_s)
        return super().run(args, env, timeout_s)
