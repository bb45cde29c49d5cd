"""A D-Bus bus as the benchmark uses it: two connections, a caller's and a service's.

Both introduce themselves as any client does (EXTERNAL, Hello), the service asks for a name, and the
caller calls it by that name. The call carries one array of bytes, the return carries nothing. The
bus adds each sender's unique name at the end of the header, and changes nothing else.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.freud.contract import BODY, METHOD_CALL, NUMBER_BYTES, REQUEST, ROUND_TRIP, SIZE
from bench.freud.dialogues import Counter, Dialogue, Turns, connected, expect, receive_exactly, send
from bench.harness.load import LoadFailed
from bench.peers import dbus_wire as wire
from bench.peers.dbus_wire import Field

SHAPES = frozenset({ROUND_TRIP, METHOD_CALL, REQUEST})
SERVICE = "org.polybus.Bench"
OBJECT = "/org/polybus/Bench"
MEMBER = "Take"
BUS, BUS_OBJECT = "org.freedesktop.DBus", "/org/freedesktop/DBus"
DO_NOT_QUEUE = 4  # a name that is taken is an error, not a wait
OWNER = 1  # the answer: the name is ours
FIRST_SERIAL = 100  # those before it are for introductions
SERIAL_BYTES = 4


def address_field(path: str, interface: str, member: str) -> list[Field]:
    return [(wire.PATH, "o", path), (wire.INTERFACE, "s", interface), (wire.MEMBER, "s", member)]


def authenticate(connection: socket.socket, *requests: bytes) -> None:
    """As who we are; further requests come before BEGIN, and must be agreed to."""
    user = str(os.getuid()).encode().hex().encode()
    connection.sendall(b"\0AUTH EXTERNAL " + user + b"\r\n")
    _expect_line(connection, b"OK ")
    for request in requests:
        connection.sendall(request + b"\r\n")
        _expect_line(connection, b"AGREE_")
    connection.sendall(b"BEGIN\r\n")


def _expect_line(connection: socket.socket, start: bytes) -> None:
    line = b""
    while not line.endswith(b"\r\n"):
        line += receive_exactly(connection, 1)
    if not line.startswith(start):
        raise LoadFailed(f"the bus does not let us in: {line.decode(errors='replace').strip()}")


def answer_body(connection: socket.socket) -> bytes:
    """The body of the next return; signals before it are dropped."""
    while True:
        fixed = receive_exactly(connection, wire.FIXED_BYTES)
        kind, fields, body = wire.sizes(fixed)
        rest = receive_exactly(connection, fields + body)
        if kind == wire.ERROR:
            raise LoadFailed(f"the bus refused: {rest.decode(errors='replace')}")
        if kind == wire.RETURN:
            return rest[fields:]


class Client:
    """A connection with its unique name."""

    def __init__(self, path: str) -> None:
        self.connection = connected(path)
        self._serial = 0
        authenticate(self.connection)
        said = self.ask("Hello")
        self.name = said[4:-1].decode()  # a string: its length in front, a zero behind

    def ask(self, member: str, signature: str = "", *values: Any) -> bytes:
        """Calls the bus itself."""
        self._serial += 1
        fields = [*address_field(BUS_OBJECT, BUS, member), (wire.DESTINATION, "s", BUS)]
        if signature:
            fields.append((wire.SIGNATURE, "g", signature))
        body = wire.marshal(signature, values)
        self.connection.sendall(wire.message(wire.CALL, self._serial, fields, body))
        return answer_body(self.connection)

    def settle(self) -> None:
        """When the bus has answered this, it has sent all signals about what came before."""
        self.ask("GetId")


def _delivered(
    sender: str, kind: int, fields: Sequence[Field], body: bytes, flags: int = 0
) -> bytes:
    return wire.message(kind, 0, [*fields, (wire.SENDER, "s", sender)], body, flags)


def turns(caller: Client, service: Client, in_two_voices: bool) -> Turns:
    """Call, the call delivered, return, the return delivered."""
    asked: list[Field] = [
        *address_field(OBJECT, SERVICE, MEMBER),
        (wire.DESTINATION, "s", SERVICE),
        (wire.SIGNATURE, "g", "ay"),
    ]
    replied: list[Field] = [(wire.REPLY_SERIAL, "u", 0), (wire.DESTINATION, "s", caller.name)]
    body = wire.marshal("ay", (BODY,))
    call = wire.message(wire.CALL, 0, asked, body)
    delivered = _delivered(caller.name, wire.CALL, asked, body)
    reply = wire.message(wire.RETURN, 0, replied, b"", wire.NO_REPLY_EXPECTED)
    returned = _delivered(service.name, wire.RETURN, replied, b"", wire.NO_REPLY_EXPECTED)
    serial = Counter(wire.SERIAL_AT, SERIAL_BYTES, FIRST_SERIAL)
    of_call = Counter(wire.REPLY_SERIAL_AT, SERIAL_BYTES, FIRST_SERIAL)
    calling = send(caller.connection, call, serial, _number_in(call))
    called = expect(service.connection, delivered, serial, _number_in(delivered))
    replying = send(service.connection, reply, serial, of_call)
    answered = expect(caller.connection, returned, serial, of_call)
    if in_two_voices:
        return Turns(((calling, answered), (called, replying)))
    return Turns(((calling, called, replying, answered),))


def _number_in(call: bytes) -> Counter:
    return Counter(len(call) - SIZE, NUMBER_BYTES)


@dataclass(frozen=True)
class RunningBus:
    pid: int
    version: str
    path: str

    @contextmanager
    def dialogue(self, shape: str) -> Iterator[Dialogue]:
        caller, service = Client(self.path), Client(self.path)
        with caller.connection, service.connection:
            asked = service.ask("RequestName", "su", SERVICE, DO_NOT_QUEUE)
            if int.from_bytes(asked, "little") != OWNER:
                raise LoadFailed(f"{SERVICE} is taken")
            for client in (caller, service):
                client.settle()
            yield turns(caller, service, shape != ROUND_TRIP)
