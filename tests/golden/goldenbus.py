"""A bus process on a copy of a golden folder.

Golden tests must survive every rename inside the package, so this module uses only the
command line, the public `polybus.native` client and Arrow Flight.

All native calls carry the token of one key. Producers belong to the identity that opened
them, and a uid would differ between machines.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.flight as flight

from polybus import native

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.glob("v[0-9]*") if path.is_dir())

KEY = "golden"
TOKEN = "golden-token-0123456789"
READ_CALLS = f"allow key:{KEY} subscribe gsb.calls"  # a rule; else admins alone read the log
STOP_TIMEOUT_S = 20.0
COMMAND_TIMEOUT_S = 60.0
LISTEN = (
    "native=grpc://127.0.0.1:0",
    "pirate=tcp://127.0.0.1:0",
    "gsb=tcp://127.0.0.1:0",
    "rqueue=tcp://127.0.0.1:0",
)
PRODUCE_SCHEMA = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary())])


def copied(source: Path, target: Path) -> Path:
    """Copy a golden folder. The copy is writable whatever modes the checkout has."""
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return target


class GoldenBus:
    """`polybus serve` on a data folder, with a runtime folder of its own."""

    def __init__(
        self,
        data: Path | None,
        *args: str,
        listen: Sequence[str] = LISTEN,
        env: Mapping[str, str] | None = None,
    ) -> None:
        # The path of a Unix socket has at most 107 bytes, so the folder is not in tmp_path.
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.token_file = self.folder / "token"
        self.token_file.write_text(TOKEN)
        tokens = self.folder / "tokens"
        tokens.touch(mode=0o600)
        tokens.write_text(f"{KEY} {TOKEN}\n")
        own = {"XDG_RUNTIME_DIR": str(self.folder), "POLYBUS_NATIVE_TOKENS": str(tokens)}
        self.env = _without_bus(os.environ) | own | dict(env or {})
        self.log_path = self.folder / "log"
        self._args = list(args)
        if data is not None:
            self._args += ["--data", str(data)]
        for one in (*listen, f"freud=unix:{self.folder}/freud.sock"):
            self._args += ["--listen", one]
        self.addresses: dict[str, str] = {}
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polybus", "serve", *self._args],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "ready":
                return
            if word == "listening":
                dialect, _, address = rest.partition(" ")
                self.addresses[dialect] = address
        raise AssertionError(f"the bus did not start:\n{self.log()}")

    @property
    def url(self) -> str:
        plain = self.addresses["native"].replace("grpc://", "polybus://")
        return f"{plain}?token_file={self.token_file}"

    def client(self) -> native.Client:
        return native.Client(self.url)

    def flight(self) -> RawPort:
        return RawPort(self.addresses["native"])

    def run(self, *args: str, code: int | None = 0, stdin: str = "") -> str:
        """Run a `polybus` command against this bus. Returns its stdout."""
        done = command(*args, env=self.env | {"POLYBUS_URL": self.url}, stdin=stdin)
        assert code is None or done.returncode == code, f"{args}: {done.stdout}{done.stderr}"
        return done.stdout

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self) -> int:
        """End the bus with SIGTERM. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"log of the bus:\n{self.log()[-4000:]}")
        self.close()


def command(
    *args: str, env: Mapping[str, str], stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a `polybus` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "polybus", *args],
        env=dict(env),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )


def plain_environment() -> dict[str, str]:
    return _without_bus(os.environ)


def _without_bus(environ: Mapping[str, str]) -> dict[str, str]:
    dropped = ("POLYBUS_", "NOTIFY_SOCKET")
    return {name: value for name, value in environ.items() if not name.startswith(dropped)}


class RawPort:
    """The native port by Arrow Flight alone, so that a test can choose stamps."""

    def __init__(self, location: str) -> None:
        self._client = flight.connect(
            location, generic_options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._options = flight.FlightCallOptions(
            headers=[(b"authorization", f"Bearer {TOKEN}".encode())]
        )

    def produce(
        self, topic: str, bodies: Sequence[bytes], keys: Sequence[str | None], stamp: Mapping
    ) -> dict[str, Any]:
        """Send one stamped batch. Returns the answer of the bus."""
        batch = pa.record_batch(
            [pa.array(keys, pa.utf8()), pa.array(bodies, pa.binary())], schema=PRODUCE_SCHEMA
        )
        path = flight.FlightDescriptor.for_path("produce", topic)
        writer, reader = self._client.do_put(path, PRODUCE_SCHEMA, self._options)
        with writer:
            writer.write_with_metadata(batch, json.dumps(stamp).encode())
            answer: dict[str, Any] = json.loads(reader.read().to_pybytes())
            writer.done_writing()
            return answer

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def wait_until(is_done: Any, what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)
