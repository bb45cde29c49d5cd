"""A real bus in a child process, for tests and benchmarks.

    with serve() as bus:                       # polybus serve, all on free ports
        connect(bus.address("rqueue").port)
        bus.stop()                             # SIGTERM, returns the exit code
    with rqueue("--max-payload", "65536") as bus: ...

`start` waits for the line `ready`, or raises `StartFailed` with the exit code
and what the child said. Each child lives in a folder of its own: its runtime
sockets, its data folder and its log are there, so any number run side by side
and none finds the bus of the user who runs the tests. The log goes to a file, never
to a pipe: a pipe without a reader would stop the child. `launcher` starts the processes;
a test suite may set its own, for instance one that forks a process with all modules loaded.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, Self

from polybus.model.address import Address

POLYBUS = (sys.executable, "-m", "polybus")
Completed = subprocess.CompletedProcess[str]
# A cold start compiles bytecode and may share the machine with a whole test run.
START_TIMEOUT_S = 60.0
# The bus promises to be gone within 10 s of SIGTERM; the rest is for a busy machine.
STOP_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 60.0


class StartFailed(Exception):
    """The child ended, or said nothing in time. Has its exit code and what it printed."""

    def __init__(self, code: int | None, stdout: str, stderr: str) -> None:
        said = f"stdout:\n{stdout}\nstderr:\n{stderr}"
        super().__init__(f"the bus did not get ready (exit code {code})\n{said}")
        self.code, self.stdout, self.stderr = code, stdout, stderr


class Child(Protocol):
    """A started process: the part of `subprocess.Popen` that `BusProcess` uses."""

    pid: int
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Launcher:
    """Starts `polybus` commands, each as a process of its own."""

    def start(self, command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> Child:
        """Start a bus. Its stdout is a pipe, its stderr goes to `log`."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=env
        )

    def run(self, args: Sequence[str], env: Mapping[str, str], timeout_s: float) -> Completed:
        """Run a `polybus` command to its end."""
        return subprocess.run(
            [*POLYBUS, *args],
            env=env,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )


launcher = Launcher()


class BusProcess:
    """One running child. Leaving the `with` block stops it and removes its folder."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._own_folder = folder is None
        # Short on purpose: the path of a Unix socket has at most 107 bytes.
        self.folder = folder or Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
        self.env = clean_environment(self.folder) | dict(env or {})
        self.log_path = self.folder / "stderr.log"
        self.listeners: list[tuple[str, Address]] = []
        self._said: list[str] = []
        with self.log_path.open("ab") as log:
            self.process = launcher.start(command, self.env, log)
        try:
            self._await_ready(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runtime(self) -> Path:
        return self.folder / "run" / "polybus"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def admin_path(self) -> Path:
        return Path(self.address("admin").path)

    def address(self, dialect: str = "rqueue") -> Address:
        """Where `dialect` listens; the first one, if it has several addresses."""
        for name, address in self.listeners:
            if name == dialect:
                return address
        raise KeyError(f"no listener for {dialect}: {self.listeners}")

    def log(self) -> str:
        """Everything the child wrote on stderr so far."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return self.process.wait(timeout_s)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask it to end (SIGTERM); its exit code."""
        self.process.terminate()
        return self.wait(timeout_s)

    def run(self, *args: str, timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        """A `polybus` command that finds this bus."""
        return run(*args, env=self.env, timeout_s=timeout_s)

    def close(self) -> None:
        """End it if it still runs, and remove its folder if it was made for it."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            error.add_note(f"log of the bus (pid {self.pid}):\n{self.log()[-4000:]}")
        self.close()

    def _await_ready(self, deadline: float) -> None:
        assert self.process.stdout is not None
        for line in _lines(self.process.stdout, deadline):
            self._said.append(line)
            if line == "ready":
                return
            word, _, rest = line.partition(" ")
            if word == "listening":
                dialect, _, address = rest.partition(" ")
                self.listeners.append((dialect, Address.parse(address)))
        raise StartFailed(self._exit_code(), "\n".join(self._said), self.log())

    def _exit_code(self) -> int | None:
        try:
            return self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return None


def serve(
    *args: str,
    listen: Sequence[str] = ("rqueue=tcp://127.0.0.1:0",),
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> BusProcess:
    """`polybus serve` on free ports, with a data folder of its own."""
    flags = [word for one in listen for word in ("--listen", one)]
    return BusProcess(
        [*POLYBUS, "serve", *flags, *args], folder=folder, env=env, timeout_s=timeout_s
    )


def rqueue(
    *args: str,
    port: int = 0,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> BusProcess:
    """`polybus rqueue`: the rqueue server alone, on a free port."""
    return BusProcess(
        [*POLYBUS, "rqueue", "--port", str(port), *args],
        folder=folder,
        env=env,
        timeout_s=timeout_s,
    )


def run(
    *args: str, env: Mapping[str, str] | None = None, timeout_s: float = COMMAND_TIMEOUT_S
) -> Completed:
    """Any `polybus` command to its end, with its exit code and output as text."""
    return launcher.run(args, os.environ if env is None else env, timeout_s)


def clean_environment(folder: Path) -> dict[str, str]:
    """The caller's environment without its bus: every folder the bus uses is inside `folder`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("POLYBUS_")}
    kept.pop("NOTIFY_SOCKET", None)
    runtime = folder / "run"
    runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    return kept | {"XDG_RUNTIME_DIR": str(runtime), "POLYBUS_DATA": str(folder / "data")}


def _lines(stream: IO[bytes], deadline: float) -> Iterator[str]:
    """Lines of a pipe until it ends or the deadline passes; never blocks past it."""
    rest = b""
    while data := _read(stream.fileno(), deadline):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()


def _read(fd: int, deadline: float) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            return b""
    return os.read(fd, 65536)
