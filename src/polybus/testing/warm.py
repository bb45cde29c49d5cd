"""A bus at once: forked from a process that has loaded all of it.

Hundreds of tests have a bus of their own, and to load an interpreter with it takes ten times
as long as to start it. So one process loads what `polybus serve` and `polybus rqueue` load,
and forks when it is asked to; the child does what the command does with these arguments, in
this environment and with these files, down to how an interpreter ends.

    warm.use()                                   # from here on, `start` is warm where it can be
    child = start([*POLYBUS, "serve"], env, log)
    with warm.cold(): ...                        # but not here: it is the start that is tested

Whatever makes another interpreter, or other code in it, is started in the ordinary way: a
command of its own, variables but those of the bus, sabotage.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO

from polybus.testing.forking import MAX_REQUEST_BYTES

POLYBUS = (sys.executable, "-m", "polybus")
COMMANDS = ("serve", "rqueue")
FORKING = "polybus.testing.forking"
# What a bus reads when it starts, or never. All else, and sabotage, may be read as code is loaded.
ANY = ("POLYBUS_", "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "PYTEST_")
SABOTAGE = "POLYBUS_SABOTAGE"


class Forked:
    """A child of the process that forks; of `subprocess.Popen` what tests use."""

    def __init__(self, pid: int, talk: socket.socket, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
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

    def fits(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        is_bus = tuple(command[:3]) == POLYBUS and len(command) > 3 and command[3] in COMMANDS
        return is_bus and not env.get(SABOTAGE) and _others(env) == self._variables

    def start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Forked:
        request = json.dumps([str(Path.cwd()), list(command[3:]), dict(env)]).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = os.pipe()
        with theirs:
            try:
                files = [theirs.fileno(), writing, log.fileno()]
                socket.send_fds(self._talk, [request], files)
            finally:
                os.close(writing)
        pid = json.loads(ours.recv(MAX_REQUEST_BYTES))
        return Forked(pid, ours, os.fdopen(reading, "rb", buffering=0))

    def close(self) -> None:
        """Whoever was forked goes on."""
        self._talk.close()
        self._process.wait()


def _others(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(ANY)}


_environment: dict[str, str] | None = None
_is_cold = False


def use() -> None:
    """Buses that this process starts are forked from now on."""
    global _environment
    _environment = dict(os.environ)


@contextmanager
def cold() -> Iterator[None]:
    """Each bus is a program of its own, in here."""
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


def start(
    command: Sequence[str], env: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes] | Forked:
    """Its stdout is a pipe, its stderr goes to `log`."""
    warm = None if _is_cold else _warm()
    if warm is not None and warm.fits(command, env):
        return warm.start(command, env, log)
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env
    )
