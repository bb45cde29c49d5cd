"""A user that takes as much of one table as it gets, in a process of its own.

    with Flooder("stages", 4242, bus, 24) as flooder:
        flooder.held, flooder.refusal
    flooder.refused

The process loads all it needs, becomes the user, makes up to `attempts` entries of the table
and reports how many it holds at its first refusal. It keeps them, and tries to get more, until
the block ends; `refused` is the number of its refusals then.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow.flight as flight

from polybus.model.address import Address
from tests.rig import flight_client, http2_client, rqueue_client
from tests.rig.pirate import wire
from tests.rig.pirate.zmq_client import Bare

if TYPE_CHECKING:
    from polybus.testing.bus_process import BusProcess

TIMEOUT_S = 60.0
REFUSED_WAIT_S = 0.5  # an answer to a call that the bus has not admitted comes sooner
LONG_WAIT_MS = 30_000
BURST, BURST_S = 100, 0.2  # new connections at once, and the pause before the next
MAX_KEPT = 500  # the process may have 1024 descriptors


class Refused(Exception):
    """The bus has refused an entry; the text is its reason."""


class Flooder:
    """The parent's side."""

    held: int
    refusal: str
    refused: int

    def __init__(self, table: str, uid: int, bus: BusProcess, attempts: int) -> None:
        addresses = {name: str(address) for name, address in bus.listeners}
        given = json.dumps([table, uid, attempts, addresses])
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
            text=True,
        )
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "the flooder did not start"
        self.held, self.refusal = json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        output, _ = self._child.communicate(timeout=TIMEOUT_S)
        self.refused = int(output or 0)


# --- the child: each yields after one more entry, and raises `Refused`

Addresses = dict[str, Address]
KEPT: list[Any] = []  # entries that must outlive the generator that made them


def _flight(addresses: Addresses) -> Any:
    address = addresses["native"]
    own = [("grpc.use_local_subchannel_pool", 1)]
    return flight.connect(f"grpc://{address.host}:{address.port}", generic_options=own)


def _act(client: Any, name: str, **fields: object) -> Any:
    try:
        return flight_client.act(client, name, **fields)
    except flight.FlightError as error:
        raise Refused(json.loads(error.extra_info)["text"]) from None


def _by_action(name: str, **fields: object) -> Callable[[Addresses], Iterator[None]]:
    """Repeat an action; `{}` in a field becomes the number of the entry."""

    def flood(addresses: Addresses) -> Iterator[None]:
        with _flight(addresses) as client:
            for number in count():
                text = json.dumps(fields).replace("{}", f"{os.getuid()}-{number}")
                _act(client, name, **json.loads(text))
                yield

    return flood


def _flood_waits(addresses: Addresses) -> Iterator[None]:
    ended: SimpleQueue[str] = SimpleQueue()
    position = {"topic": "flooded", "shard": 0, "offset": 0}

    def wait(client: Any) -> None:
        try:
            _act(client, "wait", positions=[position], timeout_ms=LONG_WAIT_MS)
        except Refused as error:
            ended.put(str(error))

    client = _flight(addresses)
    while True:
        Thread(target=wait, args=(client,), daemon=True).start()
        yield from _unless_refused(ended)


def _flood_silent_puts(addresses: Addresses) -> Iterator[None]:
    """Open put streams and send nothing on them."""
    ended: SimpleQueue[str] = SimpleQueue()
    address = addresses["native"]
    client = http2_client.Http2Client(address.port)
    stream = client.socket.makefile("rb")

    def read() -> None:
        while head := stream.read(9):
            body = stream.read(int.from_bytes(head[:3], "big"))
            if head[3] == http2_client.HEADERS and head[4] & http2_client.END_STREAM:
                ended.put(body.decode("latin-1"))

    Thread(target=read, daemon=True).start()
    while True:
        client.begin(http2_client.call_headers("DoPut"))
        yield from _unless_refused(ended)


def _unless_refused(ended: SimpleQueue[str]) -> Iterator[None]:
    """Yield once, unless a call was refused; an admitted one is not answered."""
    try:
        text = ended.get(timeout=REFUSED_WAIT_S)
    except Empty:
        yield
    else:
        raise Refused(text)


def _flood_streams(addresses: Addresses) -> Iterator[None]:
    client = _flight(addresses)
    while True:
        try:
            put = flight_client.Put(client, "produce", "flooded")
            KEPT.append((client, put))
            answer = put.ask(b"x")
        except flight.FlightError as error:
            raise Refused(str(error)) from None
        assert "error" not in answer
        yield


def _flood_clients(addresses: Addresses) -> Iterator[None]:
    address = addresses["pirate"]
    for number in count():
        name = f"{os.getuid()}-{number}".encode()
        with Bare(f"tcp://{address.host}:{address.port}", name) as client:
            answer = client.ask(wire.hello(name, number + 1))
            if answer[0] != "OK":
                raise Refused(str(answer))
        yield


def _flood_connections(addresses: Addresses) -> Iterator[None]:
    while True:
        client = rqueue_client.connect(addresses["rqueue"])
        KEPT.append(client)
        try:
            client.settle()
        except (OSError, EOFError) as error:
            raise Refused(repr(error)) from None
        yield


def _flood_native_connections(addresses: Addresses) -> Iterator[None]:
    while True:
        try:
            KEPT.append(http2_client.Http2Client(addresses["native"].port))
        except OSError as error:
            raise Refused(repr(error)) from None
        yield


def _flood_subscriptions(addresses: Addresses) -> Iterator[None]:
    """Subscribe to one topic per connection: the refusal ends a connection."""
    for number in count():
        client = rqueue_client.connect(addresses["rqueue"])
        KEPT.append(client)
        try:
            client.send(rqueue_client.subscribe(f"{os.getuid()}-{number}".encode()))
            client.settle()
        except (OSError, EOFError) as error:
            raise Refused(repr(error)) from None
        yield


def _flood_admin(addresses: Addresses) -> Iterator[None]:
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(addresses["admin"].path)
        KEPT.append(sock)
        try:
            sock.sendall(b'{"verb": "stats"}\n')
            answer = sock.makefile("rb").readline()
        except OSError as error:
            raise Refused(repr(error)) from None
        if not answer.startswith(b'{"ok"'):
            raise Refused(answer.decode())
        yield


def _idle_at(dialect: str) -> Callable[[Addresses], Iterator[None]]:
    """Connect and send nothing, whether or not the bus closes it."""

    def flood(addresses: Addresses) -> Iterator[None]:
        address = addresses[dialect]
        while True:
            KEPT.append(socket.create_connection((address.host, address.port)))
            yield

    return flood


TABLES: dict[str, Callable[[Addresses], Iterator[None]]] = {
    "waits": _flood_waits,
    "silent puts": _flood_silent_puts,
    "streams": _flood_streams,
    "producers": _by_action("producer.open", producer="{}"),
    "stages": _by_action("stage.new", lease_s=600),
    "groups": _by_action("group.join", topic="flooded", group="{}", consumer="c", dead_ms=60_000),
    "topics": _by_action("topic.create", topic="{}", shards=1),
    "pirate clients": _flood_clients,
    "connections": _flood_connections,
    "native connections": _flood_native_connections,
    "subscribed topics": _flood_subscriptions,
    "admin connections": _flood_admin,
}


def _new_at(dialect: str) -> Callable[[Addresses], Iterator[None]]:
    """Connect all the time without waiting for the bus, and keep the newest connections."""

    def flood(addresses: Addresses) -> Iterator[None]:
        address = addresses[dialect]
        family = socket.AF_UNIX if address.is_unix else socket.AF_INET
        kept: deque[socket.socket] = deque(maxlen=MAX_KEPT)
        for number in count():
            sock = socket.socket(family)
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(address.path if address.is_unix else (address.host, address.port))
            if len(kept) == MAX_KEPT:
                kept[0].close()
            kept.append(sock)
            if number % BURST == 0:
                time.sleep(BURST_S)
            yield

    return flood


IDLE = {f"idle at {one}": _idle_at(one) for one in ("rqueue", "gsb", "pirate", "native")}
NEW = {f"new at {one}": _new_at(one) for one in ("rqueue", "freud", "gsb", "pirate", "native")}


def _main(table: str, uid: int, attempts: int, listeners: dict[str, str]) -> None:
    addresses = {name: Address.parse(text) for name, text in listeners.items()}
    if uid:
        "localhost".encode("idna")  # loads a module that the other user may not be able to read
        os.setgroups(())
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    held, refusal = 0, ""
    entries = (TABLES | IDLE | NEW)[table](addresses)
    try:
        for _ in range(attempts):
            next(entries)
            held += 1
    except Refused as error:
        refusal = str(error)
    sys.stdout.write(json.dumps([held, refusal]) + "\n")
    sys.stdout.flush()
    refused = _persist(table, addresses) if refusal else 0
    while table in NEW and not select.select([sys.stdin], [], [], 0)[0]:
        next(entries)
    sys.stdin.read()
    sys.stdout.write(str(refused))
    sys.stdout.flush()
    os._exit(0)  # without waiting for calls that are still open


def _persist(table: str, addresses: Addresses) -> int:
    """Try to get more entries until the parent ends the block. Returns the refusals."""
    refused, admitted = 1, len(KEPT)
    entries = TABLES[table](addresses)
    while not select.select([sys.stdin], [], [], 0)[0] and len(KEPT) < MAX_KEPT:
        try:
            next(entries)
        except Refused:
            refused += 1
            del KEPT[admitted:]  # ended by the bus
            entries = TABLES[table](addresses)
    return refused


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
