"""Our own server, and rqueue's frames, written out again from docs/spec/rqueue.md.

The frames are not taken from polybus itself: a benchmark that checks every byte should not learn
from the code it checks what the bytes are.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.harness.load import Hello
from bench.harness.peer import Running
from bench.harness.places import installed
from bench.harness.processes import listener_pid
from bench.harness.programs import DidNotStart, Program
from bench.harness.results import OURS

PUBLISH, SUBSCRIBE, NOTIFICATION = 0, 1, 7
PROBE_BYTES = 16


def _frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + bytes([kind]) + payload


def _named(topic: bytes) -> bytes:
    return bytes([len(topic)]) + topic


def notification(topic: bytes, content: bytes) -> bytes:
    return _frame(NOTIFICATION, _named(topic) + content)


class RqueueWire:
    aside = b""

    def publish(self, topic: bytes, content: bytes) -> bytes:
        return _frame(PUBLISH, notification(topic, content))

    def deliver(self, topic: bytes, number: int, content: bytes) -> bytes:
        return notification(topic, content)

    def subscriber(self, topics: Sequence[bytes]) -> Hello:
        """When a client has its own message back, all it subscribed to before is in force."""
        probe = b"_probe/" + os.urandom(PROBE_BYTES)
        subscriptions = b"".join(_frame(SUBSCRIBE, _named(topic)) for topic in (*topics, probe))
        return Hello(subscriptions + self.publish(probe, b""), until=notification(probe, b""))

    def publisher(self, subscriptions: Sequence[Sequence[bytes]], publishers: int) -> Hello:
        return Hello()


@dataclass(frozen=True)
class Polybus:
    """`polybus rqueue`, or the server that already listens on `port`."""

    port: int | None = None
    name: str = OURS
    threads: int | None = None  # None: the server's default
    cpus: frozenset[int] = frozenset()  # that it may run on; empty: as the harness

    wire = RqueueWire()
    selects_topics = True

    @contextmanager
    def start(self) -> Iterator[Running]:
        if self.port is not None:
            yield Running(listener_pid(self.port), self.port, self.port, "already running")
            return
        with Program(self._program_name(), self._command()) as program:
            port = _ready_port(program)
            yield Running(program.pid, port, port, "", self.cpus)

    def _program_name(self) -> str:
        return "polybus" if self.threads is None else f"polybus-{self.threads}-threads"

    def _command(self) -> list[str | Path]:
        command: list[str | Path] = [installed("polybus", "make setup"), "rqueue", "--port", "0"]
        if self.threads is not None:
            command += ["--threads", str(self.threads)]
        if self.cpus:
            taskset = installed("taskset", "apt-get install util-linux")
            command = [taskset, "-c", ",".join(map(str, sorted(self.cpus))), *command]
        return command


def _ready_port(program: Program) -> int:
    port: int | None = None
    while (line := program.line()) != "ready":
        found = re.fullmatch(r"listening rqueue tcp://127\.0\.0\.1:(\d+)", line)
        port = int(found[1]) if found else port
    if port is None:
        raise DidNotStart(f"{program.name} named no rqueue port; see {program.log}")
    return port
