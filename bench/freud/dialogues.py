"""Dialogues for the client in C (bench/load/dialogue.h tells their form), and running them.

A dialogue is written for sockets that are connected already and introduced: the code that made
it knows the ids and names that the server gave out, and can therefore tell every byte of every
answer beforehand. It is good for one run, since counters go on where they are.
"""

import json
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from bench.harness.load import RUN_TIMEOUT_S, LoadFailed
from bench.harness.places import compiled

SOURCES = ("dialogue.c", "script.c", "turns.c", "flow.c", "party.c")
STALL_S = 15  # no progress for so long is a fault; real pauses are far below
WARMUP_TURNS = 200  # the first of a measurement, not counted


def connected(path: str) -> socket.socket:
    """A blocking connection to a Unix socket, which fails instead of hanging."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise LoadFailed(f"cannot connect to {path}: {error.strerror}") from error
    return connection


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """While introducing ourselves: the next bytes, all of them."""
    data = b""
    while len(data) < size:
        try:
            chunk = connection.recv(size - len(data))
        except BlockingIOError as error:
            raise LoadFailed(f"no answer for {STALL_S} s") from error
        if not chunk:
            raise LoadFailed("the server closed a connection")
        data += chunk
    return data


@dataclass(frozen=True)
class Counter:
    """An integer in little-endian order, in a piece of bytes, that grows by one each time."""

    offset: int
    width: int
    first: int = 0


Counters = tuple[Counter, ...]


@dataclass(frozen=True)
class Step:
    """Sends these bytes, or expects them."""

    verb: str
    connection: socket.socket
    data: bytes
    counters: Counters = ()

    def encode(self) -> bytes:
        head = f"{self.verb} {self.connection.fileno()} {len(self.data)}"
        return f"{head} {_counters(self.counters)}\n".encode() + self.data


def send(connection: socket.socket, data: bytes, *counters: Counter) -> Step:
    return Step("send", connection, data, counters)


def expect(connection: socket.socket, data: bytes, *counters: Counter) -> Step:
    return Step("expect", connection, data, counters)


def _counters(counters: Counters) -> str:
    numbers = [number for one in counters for number in (one.offset, one.width, one.first)]
    return " ".join(map(str, (len(counters), *numbers)))


class Dialogue(Protocol):
    def encode(self, count: int) -> bytes:
        """As the client reads it, for so many turns or messages."""

    def connections(self) -> Iterable[socket.socket]:
        """Those that the client uses."""


@dataclass(frozen=True)
class Turns:
    """One turn after another; each voice is a process with steps of its own (turns.c)."""

    voices: tuple[tuple[Step, ...], ...]

    def encode(self, count: int) -> bytes:
        text = f"mode turns\ncount {count}\nwarmup {WARMUP_TURNS}\n".encode()
        for voice in self.voices:
            text += b"voice\n" + b"".join(step.encode() for step in voice)
        return text

    def connections(self) -> Iterable[socket.socket]:
        return {step.connection for voice in self.voices for step in voice}


@dataclass(frozen=True)
class Channel:
    """One connection's cycle of requests, and of their answers; counters are in each answer."""

    connection: socket.socket
    requests: tuple[bytes, ...]  # of equal size, and so the answers
    answers: tuple[bytes, ...]
    counters: Counters = ()

    def encode(self) -> bytes:
        blobs = b"".join(self.requests), b"".join(self.answers)
        numbers = (self.connection.fileno(), len(self.requests), *map(len, blobs))
        line = f"channel {' '.join(map(str, numbers))} {_counters(self.counters)}\n"
        return line.encode() + b"".join(blobs)


@dataclass(frozen=True)
class Flow:
    """Pipelined: `mode` is burst or flow (flow.c tells what `ahead` means for each)."""

    mode: str
    ahead: int
    producer: Channel
    reader: Channel

    def encode(self, count: int) -> bytes:
        text = f"mode {self.mode}\ncount {count}\nahead {self.ahead}\n"
        return text.encode() + self.producer.encode() + self.reader.encode()

    def connections(self) -> Iterable[socket.socket]:
        return {self.producer.connection, self.reader.connection}


def run(dialogue: Dialogue, count: int) -> dict[str, Any]:
    """Runs a dialogue to its end, and returns what the client says of it."""
    with tempfile.TemporaryFile() as text:
        text.write(dialogue.encode(count))
        text.seek(0)
        try:
            done = subprocess.run(
                [compiled("dialogue", *SOURCES)],
                stdin=text,
                capture_output=True,
                pass_fds=[connection.fileno() for connection in dialogue.connections()],
                start_new_session=True,
                timeout=RUN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LoadFailed(f"the client was not done in {RUN_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        raise LoadFailed(done.stderr.decode().strip() or f"exit {done.returncode}")
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome
