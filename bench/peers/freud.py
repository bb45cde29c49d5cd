"""Our own server with Freud on a Unix socket, and what is said to it.

Every dialogue has topics of its own, whose names are of one length, so that ids start at 0 and
sizes are known beforehand.
"""

import itertools
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.freud.contract import (
    BODY,
    BURST,
    FLOW,
    METHOD_CALL,
    NUMBER_BYTES,
    REQUEST,
    ROUND_TRIP,
    SIZE,
    SOCKET_FOLDER,
)
from bench.freud.dialogues import (
    Channel,
    Counter,
    Dialogue,
    Flow,
    Turns,
    connected,
    expect,
    receive_exactly,
    send,
)
from bench.harness.load import LoadFailed
from bench.harness.places import installed
from bench.harness.programs import Program
from bench.harness.results import OURS
from bench.harness.workloads import content
from bench.peers.freud_wire import (
    CREATE,
    DELETE,
    HEADER_BYTES,
    MESSAGE_ID,
    NUMBER,
    OK,
    SUBSCRIBE,
    UNSUBSCRIBE,
    frame,
    get,
    got,
    named,
    number_in,
    produce,
    produced,
)

CYCLE_MESSAGES = 2048  # 256 KiB of content, as in the other benchmarks
# Of one burst: 12.5 MiB, far below the quota of bytes, and far more than the sockets hold.
BURST_MESSAGES = 100_000
# How far the producer may be ahead of the reader: 8 MiB, so that neither waits for the other.
AHEAD_MESSAGES = 65_536


class Admin:
    """A connection for what is not measured: it makes topics, and removes them again."""

    def __init__(self, path: str) -> None:
        self._connection = connected(path)
        self._numbers = itertools.count()

    def close(self) -> None:
        self._connection.close()

    def ask(self, number: int, payload: bytes) -> bytes:
        self._connection.sendall(frame(number, payload))
        header = receive_exactly(self._connection, HEADER_BYTES)
        code, size = struct.unpack("<II", header)
        answer = receive_exactly(self._connection, size)
        if code != OK:
            raise LoadFailed(f"request {number} was answered {code} {answer.decode()}")
        return answer

    @contextmanager
    def topic(self) -> Iterator[tuple[bytes, bytes]]:
        """A new topic with one subscriber: its name, and the subscriber's id."""
        name = b"bench/%06d" % next(self._numbers)
        self.ask(CREATE, named(name))
        subscriber = self.ask(SUBSCRIBE, named(name))
        yield name, subscriber
        self.ask(UNSUBSCRIBE, subscriber)
        self.ask(DELETE, named(name))


Topic = tuple[bytes, bytes]


def round_trip(connection: socket.socket, topic: Topic) -> Turns:
    """Produce, its answer, Get, its answer: all on one connection."""
    name, subscriber = topic
    message = produce(name, BODY)
    steps = (
        send(connection, message, number_in(message)),
        expect(connection, produced(), MESSAGE_ID),
        send(connection, get(subscriber)),
        expect(connection, got(BODY), NUMBER),
    )
    return Turns((steps,))


def request(caller: socket.socket, service: socket.socket, calls: Topic, replies: Topic) -> Turns:
    """The service's first Get waits already; each later one goes out with the reply before it."""
    service.sendall(get(calls[1]))
    asked, reply = produce(calls[0], BODY), produce(replies[0], BODY)
    answer = Counter(len(produced()) + HEADER_BYTES, NUMBER_BYTES)
    asking = (
        send(caller, asked + get(replies[1]), number_in(asked)),
        expect(caller, produced() + got(BODY), MESSAGE_ID, answer),
    )
    serving = (
        expect(service, got(BODY), NUMBER),
        send(service, reply + get(calls[1]), number_in(reply)),
        expect(service, produced(), MESSAGE_ID),
    )
    return Turns((asking, serving))


def pipelined(shape: str, producer: socket.socket, reader: socket.socket, topic: Topic) -> Flow:
    """One Get for each message, sent long before the message is there or long after."""
    name, subscriber = topic
    bodies = [content(b"%08d" % number, SIZE) for number in range(CYCLE_MESSAGES)]
    return Flow(
        shape,
        BURST_MESSAGES if shape == BURST else AHEAD_MESSAGES,
        Channel(
            producer,
            tuple(produce(name, body) for body in bodies),
            (produced(),) * CYCLE_MESSAGES,
            (MESSAGE_ID,),
        ),
        Channel(reader, (get(subscriber),) * CYCLE_MESSAGES, tuple(map(got, bodies))),
    )


@dataclass(frozen=True)
class RunningFreud:
    pid: int
    version: str
    path: str
    admin: Admin

    @contextmanager
    def dialogue(self, shape: str) -> Iterator[Dialogue]:
        with ExitStack() as stack:
            topic = stack.enter_context(self.admin.topic())
            first = stack.enter_context(connected(self.path))
            second = stack.enter_context(connected(self.path))
            if shape in (ROUND_TRIP, METHOD_CALL):
                yield round_trip(first, topic)
            elif shape == REQUEST:
                yield request(first, second, topic, stack.enter_context(self.admin.topic()))
            else:
                yield pipelined(shape, first, second, topic)


class Freud:
    """`polybus serve` with Freud alone, its runtime and data folders in a temporary one."""

    name = OURS
    shapes = frozenset({ROUND_TRIP, METHOD_CALL, REQUEST, BURST, FLOW})

    @contextmanager
    def start(self) -> Iterator[RunningFreud]:
        binary = installed("polybus", "make setup")
        with tempfile.TemporaryDirectory(prefix="pb-", dir=SOCKET_FOLDER) as folder:
            (Path(folder) / "run").mkdir(mode=0o700)
            path = f"{folder}/freud.sock"
            arguments: list[str | Path] = [
                *("env", f"XDG_RUNTIME_DIR={folder}/run", f"POLYBUS_DATA={folder}/data"),
                *(binary, "serve", "--listen", f"freud=unix:{path}"),
            ]
            with Program(self.name, arguments) as program:
                while program.line() != "ready":
                    pass
                admin = Admin(path)
                try:
                    yield RunningFreud(program.pid, "", path, admin)
                finally:
                    admin.close()
