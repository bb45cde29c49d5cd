"""The raw echo in C: no topics, no messages, two requests and answers of Freud's sizes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.freud.contract import NUMBER_BYTES, ROUND_TRIP, SIZE, SOCKET_FOLDER
from bench.freud.dialogues import Counter, Dialogue, Step, Turns, connected, expect, send
from bench.harness.places import compiled
from bench.harness.programs import Program
from bench.harness.workloads import FILLER
from bench.peers.freud_wire import get, got, produce, produced

ECHO = "raw echo"
# A request and its answer, in bytes: Produce, then Get.
EXCHANGES = (
    (len(produce(b"bench/000000", bytes(SIZE))), len(produced())),
    (len(get(bytes(16))), len(got(bytes(SIZE)))),
)


def _echoed(request: bytes, size: int) -> bytes:
    return (request * (size // len(request) + 1))[:size]


def _counters(request_bytes: int, answer_bytes: int) -> tuple[Counter, ...]:
    """The request's number, which begins it, is in the answer as often as the request."""
    last = answer_bytes - NUMBER_BYTES
    return tuple(Counter(at, NUMBER_BYTES) for at in range(0, last + 1, request_bytes))


@dataclass(frozen=True)
class RunningEcho:
    pid: int
    version: str
    path: str

    @contextmanager
    def dialogue(self, shape: str) -> Iterator[Dialogue]:
        with connected(self.path) as connection:
            steps: list[Step] = []
            for asked, answered in EXCHANGES:
                request = bytes(NUMBER_BYTES) + FILLER[: asked - NUMBER_BYTES]
                steps.append(send(connection, request, Counter(0, NUMBER_BYTES)))
                answer = _echoed(request, answered)
                steps.append(expect(connection, answer, *_counters(asked, answered)))
            yield Turns((tuple(steps),))


class Echo:
    name = ECHO
    shapes = frozenset({ROUND_TRIP})

    @contextmanager
    def start(self) -> Iterator[RunningEcho]:
        sizes = [str(size) for exchange in EXCHANGES for size in exchange]
        with tempfile.TemporaryDirectory(prefix="pb-", dir=SOCKET_FOLDER) as folder:
            path = f"{folder}/echo.sock"
            with Program("echo", [compiled("echo", "echo.c"), path, *sizes]) as program:
                program.line()  # ready
                yield RunningEcho(program.pid, "", path)
