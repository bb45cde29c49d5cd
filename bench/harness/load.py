"""Plans for the load generator (bench/load/plan.h tells their form), and running them."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.harness.places import compiled

SOURCES = (
    "load.c",
    "plan.c",
    "party.c",
    "stream.c",
    "frames.c",
    "latency.c",
    "pairs.c",
    "answered.c",
    "numbered.c",
)
# The generator gives up by itself after 15 s without progress; this is for a generator gone wrong.
RUN_TIMEOUT_S = 120.0


class LoadFailed(Exception):
    """A connection broke, or a subscriber did not get exactly the bytes it should have."""


@dataclass(frozen=True)
class Hello:
    """How a client opens: it sends, reads some bytes, sends more, and waits for a known answer.

    When all that has happened, its subscriptions must be in force.
    """

    send: bytes = b""
    skip_bytes: int = 0
    then_send: bytes = b""
    until: bytes = b""


@dataclass(frozen=True)
class Party:
    """One connection: `stream` is one cycle of what it sends, or must receive."""

    port: int
    hello: Hello
    stream: bytes

    def encode(self, role: str, before: "Party | None") -> bytes:
        shared = before is not None and before.stream == self.stream
        stream = b"" if shared else self.stream
        hello = self.hello
        blobs = (hello.send, hello.then_send, hello.until, stream)
        first, *rest = map(len, blobs)
        line = " ".join(map(str, (role, self.port, first, hello.skip_bytes, *rest)))
        return line.encode() + b"\n" + b"".join(blobs)


@dataclass(frozen=True)
class Plan:
    """Everything but the number of cycles, which is chosen by how fast the server is."""

    mode: str
    publishers: tuple[Party, ...]
    subscribers: tuple[Party, ...]
    aside: bytes = b""
    settings: dict[str, str] = field(default_factory=dict)
    beginning: bytes = b""

    def encode(self, cycles: int) -> bytes:
        lines = [f"mode {self.mode}", f"cycles {cycles}"]
        lines += [f"{name} {value}" for name, value in self.settings.items()]
        text = "\n".join(lines).encode() + b"\n"
        if self.aside:
            text += f"aside {len(self.aside)}\n".encode() + self.aside
        if self.beginning:
            text += f"beginning {len(self.beginning)}\n".encode() + self.beginning
        publishers = _encode_parties("publisher", self.publishers)
        return text + publishers + _encode_parties("subscriber", self.subscribers)


def _encode_parties(role: str, parties: Iterable[Party]) -> bytes:
    before: Party | None = None
    out = bytearray()
    for party in parties:
        out += party.encode(role, before)
        before = party
    return bytes(out)


class Generator:
    """One run of the load generator, started; `finish` waits for its outcome."""

    def __init__(self, plan: Plan, cycles: int) -> None:
        with tempfile.TemporaryFile() as text:
            text.write(plan.encode(cycles))
            text.seek(0)
            self._process = subprocess.Popen(
                [compiled("load", *SOURCES)],
                stdin=text,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_connected(self) -> None:
        """For a plan without publishers: returns when all subscriptions are in force."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"connected\n":
            self.finish()

    def stop(self) -> None:
        if self.is_running:
            self._process.kill()
            self._process.wait()

    def finish(self) -> dict[str, Any]:
        try:
            out, complaint = self._process.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            self.stop()
        if self._process.returncode != 0:
            raise LoadFailed(complaint.decode().strip() or f"exit {self._process.returncode}")
        outcome: dict[str, Any] = json.loads(out)
        return outcome


def run(plan: Plan, cycles: int, watching: Callable[[], None] | None = None) -> dict[str, Any]:
    """Runs a plan to its end; `watching` is called meanwhile, and paces itself."""
    generator = Generator(plan, cycles)
    try:
        while watching is not None and generator.is_running:
            watching()
        return generator.finish()
    finally:
        generator.stop()
