"""Mutated frames for every port of a live bus, from raw sockets.

A `Port` knows how a connection begins and has frames that a decent client sends. A burst is a
connection, its opening bytes, and some frames of which about half are mutated. The bus may
answer, refuse or cut; the fuzzer reads and discards. Every byte depends on the seed alone,
except for the order in which the bus answers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.flight as flight

from tests.rig import freud_client, gsb_peer, rqueue_client, ya_wire
from tests.rig.fuzz.mutation import Mutator
from tests.rig.pirate import zmtp
from tests.rig.relay import Relay

if TYPE_CHECKING:
    from polybus.testing.bus_process import BusProcess

VECTORS = Path(__file__).parents[1] / "vectors"
# A bad frame ends a connection of rqueue, GSB and pirate, so the frames after it are not read.
# These ports get more connections, with fewer frames each. Answers of the admin socket take long.
SHORT_BURST, ADMIN_BURST, LONG_BURST = 8, 16, 64
SHORT_CONNECTIONS, HTTP2_CONNECTIONS = 8, 6
MUTATED_SHARE, IN_ORDER_SHARE = 0.5, 0.1
RESET_SHARE = 0.1
RESET = struct.pack("ii", 1, 0)
MAX_FRAME_BYTES = 65_536
READ_BYTES = 1 << 16
TIMEOUT_S = 5.0
HTTP2_HEAD_BYTES = 9
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Port:
    """A listener, the bytes that open a connection, and valid frames."""

    name: str
    connect: Callable[[], socket.socket]
    opening: bytes
    frames: Sequence[bytes]
    burst: int  # frames per connection
    connections: int = 1  # per round
    # For a stream whose frames make sense in their order alone: all are sent, few are mutated,
    # and none of them in its head.
    head_bytes: int = 0


class PortFuzzer:
    def __init__(self, ports: Sequence[Port], seed: int) -> None:
        self._chance = Random(seed)
        self._ports = [
            (port, Mutator(port.frames, (b"\xff\xff\xff\xff", bytes(8)), MAX_FRAME_BYTES))
            for port in ports
        ]
        self.sent = {port.name: 0 for port in ports}  # mutated frames
        self.unfinished = dict.fromkeys(self.sent, 0)  # those that it still held at the timeout

    def send_bursts(self, frames: int) -> None:
        """Send at least this number of mutated frames, in rounds over all ports."""
        goal = sum(self.sent.values()) + frames
        while sum(self.sent.values()) < goal:
            for port, mutator in self._ports:
                for _ in range(port.connections):
                    self._burst(port, mutator)

    def _burst(self, port: Port, mutator: Mutator) -> None:
        chance = self._chance
        in_order = bool(port.head_bytes)
        frames = port.frames if in_order else chance.choices(port.frames, k=port.burst)
        data, mutated = bytearray(port.opening), 0
        for frame in frames:
            if chance.random() < (IN_ORDER_SHARE if in_order else MUTATED_SHARE):
                head, body = frame[: port.head_bytes], frame[port.head_bytes :]
                changed = mutator.mutate(body, chance)
                # The head has the length.
                frame = head + (changed[: len(body)].ljust(len(body), b"\0") if head else changed)
                mutated += 1
            data += frame
        self.sent[port.name] += mutated
        with port.connect() as sock:
            try:
                sock.sendall(data)
                if chance.random() < RESET_SHARE:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
                sock.shutdown(socket.SHUT_WR)
                # The bus ends the connection after the last frame, so it has read them all.
                while sock.recv(READ_BYTES):
                    pass
            except ConnectionError:
                pass  # the bus reset the connection
            except TimeoutError:
                self.unfinished[port.name] += 1


def open_ports(bus: BusProcess) -> list[Port]:
    """Return all ports of a bus that `whole_bus.serve_all` has started."""

    def tcp(dialect: str) -> Callable[[], socket.socket]:
        address = bus.address(dialect)
        return lambda: socket.create_connection((address.host, address.port), TIMEOUT_S)

    def unix(dialect: str) -> Callable[[], socket.socket]:
        path = bus.address(dialect).path

        def connect() -> socket.socket:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(TIMEOUT_S)
            sock.connect(path)
            return sock

        return connect

    short = SHORT_BURST, SHORT_CONNECTIONS
    return [
        Port("rqueue", tcp("rqueue"), b"", _rqueue_frames(), *short),
        Port("freud", unix("freud"), b"", _freud_frames(), LONG_BURST),
        Port("gsb", tcp("gsb"), gsb_peer.GREETING, _gsb_frames(), *short),
        Port("gsb+ya", tcp("gsb+ya"), ya_wire.hello(), _ya_frames(), *short),
        Port("pirate", tcp("pirate"), zmtp.GREETING + zmtp.ready(), _pirate_frames(), *short),
        Port(
            "native",
            tcp("native"),
            HTTP2_PREFACE,
            _native_frames(bus),
            burst=0,
            connections=HTTP2_CONNECTIONS,
            head_bytes=HTTP2_HEAD_BYTES,
        ),
        Port("admin", unix("admin"), b"", _admin_lines(), ADMIN_BURST),
    ]


def _vectors(dialect: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = json.loads((VECTORS / f"{dialect}.json").read_text())
    return found


def _rqueue_frames() -> list[bytes]:
    own = [
        rqueue_client.subscribe(b"kept"),
        rqueue_client.publish(b"kept", b"x" * 100),
        rqueue_client.publish(b"fuzz", bytes(1000)),
    ]
    return own + [bytes.fromhex(one["frame"]) for one in _vectors("rqueue")["vectors"]]


def _freud_frames() -> list[bytes]:
    own = [
        freud_client.create(b"fuzz"),
        freud_client.subscribe(b"fuzz"),
        freud_client.produce(b"kept", b"x" * 100),
        freud_client.list_topics(),
    ]
    return own + [bytes.fromhex(one["frame"]) for one in _vectors("freud")["vectors"]]


def _gsb_frames() -> list[bytes]:
    return [bytes.fromhex(one["tcp"]) for one in _vectors("gsb")["frames"]]


def _ya_frames() -> list[bytes]:
    return [bytes.fromhex(one["frame"]) for one in _vectors("ya")["frames"]]


def _pirate_frames() -> list[bytes]:
    requests = json.loads((VECTORS / "pirate.json").read_text())["requests"]
    return [zmtp.message(*map(bytes.fromhex, one["frames"])) for one in requests]


def _admin_lines() -> list[bytes]:
    requests: list[dict[str, object]] = [
        {"verb": "stats"},
        {"verb": "connections"},
        {"verb": "alarms"},
        {"verb": "acl_test", "who": "user:1", "do": "produce", "topic": "kept"},
        {"verb": "nothing"},
    ]
    return [json.dumps(one).encode() + b"\n" for one in requests]


def _native_frames(bus: BusProcess) -> list[bytes]:
    """Record the bytes that a Flight client sends, and return its HTTP/2 frames."""
    streams: defaultdict[int, bytes] = defaultdict(bytes)

    def record(piece: bytes) -> bytes:
        streams[threading.get_ident()] += piece  # a relay has one thread per direction
        return piece

    schema = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary())])
    with (
        Relay(bus.address("native").port, change=record) as relay,
        flight.connect(f"grpc://127.0.0.1:{relay.port}") as client,
    ):
        create = flight.Action("topic.create", b'{"topic": "kept", "shards": 2}')
        with contextlib.suppress(flight.FlightError):  # it exists
            list(client.do_action(create))
        writer, _ = client.do_put(flight.FlightDescriptor.for_path("produce", "kept"), schema)
        writer.write_batch(pa.record_batch([["k"], [b"x" * 50]], schema=schema))
        writer.close()
        ticket = flight.Ticket(b'{"topic": "kept", "shard": 0, "start": 0}')
        with contextlib.suppress(flight.FlightError):
            client.do_get(ticket).read_all()
    (sent,) = (one for one in streams.values() if one.startswith(HTTP2_PREFACE))
    return _cut_http2(sent.removeprefix(HTTP2_PREFACE))


def _cut_http2(stream: bytes) -> list[bytes]:
    frames, at = [], 0
    while len(stream) - at >= HTTP2_HEAD_BYTES:
        size = HTTP2_HEAD_BYTES + int.from_bytes(stream[at : at + 3], "big")
        frames.append(stream[at : at + size])
        at += size
    return frames
