"""Programs that a benchmark starts: on loopback, watched, and stopped by their own pid.

A program is a context manager: whatever ends the block (success, failure, Ctrl-C) stops it. Should
the harness itself be killed outright, the kernel sends the program SIGTERM (PR_SET_PDEATHSIG).
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.harness.places import output_folder

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


USAGE_ERROR = 2  # exit code


class DidNotStart(Exception):
    """A program ended, or stayed silent, before it was ready; the text names its log."""


class Refused(DidNotStart):
    """A program ended with the exit code of a usage error: it does not take its arguments."""


def free_port() -> int:
    """A free port, for programs that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Program:
    """One running program; its log is build/bench/NAME.log."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = output_folder() / f"{name}.log"
        with self.log.open("wb") as log:
            # A session of its own, so that Ctrl-C reaches us alone and we stop it in order.
            self._process = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        self._said = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks it to end, then makes it end."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def line(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The next line of its standard output."""
        deadline_s = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        while b"\n" not in self._said:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
                raise DidNotStart(
                    f"{self.name} said nothing within {timeout_s:g} s; see {self.log}"
                )
            chunk = os.read(handle, 4096)
            if not chunk:
                refused = self._process.wait(STOP_TIMEOUT_S) == USAGE_ERROR
                kind = Refused if refused else DidNotStart
                raise kind(f"{self.name} ended before it was ready: {self._last_words()}")
            self._said += chunk
        first, self._said = self._said.split(b"\n", 1)
        return first.decode()

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"{lines[-1]} ({self.log})" if lines else f"it said nothing in {self.log}"

    def wait_listening(self, port: int) -> None:
        """Returns when a connection to the port succeeds."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(POLL_S)
        raise DidNotStart(f"{self.name} does not listen on port {port}: {self._last_words()}")
