"""A Freud client on plain sockets, written from the spec alone.

It shares no code with the codec, so that one mistake cannot hide in both. It blocks, has a
deadline on every call, and can send invalid frames.

    with connect(bus.address("freud")) as client:
        client.send(create(b"news"), subscribe(b"news"))
        ok, subscribed = client.answers(2)
        client.send(produce(b"news", b"hello"), get(subscribed.payload))
        assert client.answers(2)[1] == Answer(OK, b"hello")
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple, Protocol

from tests.rig.closing import Closing

TIMEOUT_S = 20.0  # only ever reached when something is wrong
READ_BYTES = 1 << 20

CREATE, DELETE, SUBSCRIBE, UNSUBSCRIBE, PRODUCE, GET, LIST, COUNT, GET_RECORD = range(9)
OK, NOTHING_HAPPENED, NO, DOESNT_EXIST, MALFORMED, SERVER_ERROR = range(6)

FOR_EVER = -1
NOTICE = b"\0FREUD\0DELETED\0"
NOTICE_FLAG = 1
FORGED_SUBSCRIBER = bytes(range(16))  # an id that the server never gave


class Answer(NamedTuple):
    code: int
    payload: bytes = b""


class Record(NamedTuple):
    """The payload of an Ok to Get Record."""

    id: int
    timestamp_ns: int
    flags: int
    body: bytes


class Place(Protocol):
    """Where a server listens; `polybus.model.address.Address` is one."""

    @property
    def path(self) -> str: ...


# --- requests ----------------------------------------------------------------


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack("<II", kind, len(payload)) + payload


def named(name: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("<I", len(name)) + name + rest


def create(name: bytes) -> bytes:
    return frame(CREATE, named(name))


def delete(name: bytes) -> bytes:
    return frame(DELETE, named(name))


def subscribe(name: bytes) -> bytes:
    return frame(SUBSCRIBE, named(name))


def unsubscribe(subscriber: bytes) -> bytes:
    return frame(UNSUBSCRIBE, subscriber)


def produce(name: bytes, body: bytes = b"") -> bytes:
    return frame(PRODUCE, named(name, body))


def get(subscriber: bytes, seconds: int = 0) -> bytes:
    return frame(GET, subscriber + struct.pack("<i", seconds))


def get_record(subscriber: bytes, seconds: int = 0) -> bytes:
    return frame(GET_RECORD, subscriber + struct.pack("<i", seconds))


def list_topics() -> bytes:
    return frame(LIST)


def count(name: bytes) -> bytes:
    return frame(COUNT, named(name))


# --- answers -----------------------------------------------------------------


def answers_in(data: bytes | bytearray) -> tuple[list[Answer], int]:
    """The whole answers, and how many bytes they take."""
    found: list[Answer] = []
    at = 0
    while len(data) - at >= 8:
        code, length = struct.unpack_from("<II", data, at)
        if len(data) - at - 8 < length:
            break
        found.append(Answer(code, bytes(data[at + 8 : at + 8 + length])))
        at += 8 + length
    return found, at


def number(answer: Answer) -> int:
    """The id that a Produce was given, or the count that was asked for."""
    assert answer.code == OK, answer
    assert len(answer.payload) in (4, 8), answer
    return int.from_bytes(answer.payload, "little")


def record(answer: Answer) -> Record:
    assert answer.code == OK, answer
    message_id, timestamp_ns, flags = struct.unpack_from("<QQI", answer.payload)
    return Record(message_id, timestamp_ns, flags, answer.payload[20:])


def names(answer: Answer) -> list[bytes]:
    """Return the topics in an answer to List Topics."""
    assert answer.code == OK, answer
    (left,) = struct.unpack_from("<I", answer.payload)
    found, at = [], 4
    for _ in range(left):
        (size,) = struct.unpack_from("<I", answer.payload, at)
        found.append(answer.payload[at + 4 : at + 4 + size])
        at += 4 + size
    assert at == len(answer.payload), answer
    return found


# --- the client --------------------------------------------------------------


def connect(
    place: Place, *, receive_buffer: int | None = None, timeout_s: float = TIMEOUT_S
) -> Client:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        sock.connect(place.path)
    except BaseException:
        sock.close()
        raise
    return Client(sock)


class Client(Closing):
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = bytearray()
        self._whole: list[Answer] = []

    def send(self, *requests: bytes) -> None:
        self.sock.sendall(b"".join(requests))

    def answers(self, count: int) -> list[Answer]:
        """Return exactly the next `count` answers. Raises EOFError if the stream ends before."""
        while len(self._whole) < count:
            data = self.sock.recv(READ_BYTES)
            if not data:
                raise EOFError(f"closed with {len(self._whole)} of {count} answers")
            self._take(data)
        found, self._whole = self._whole[:count], self._whole[count:]
        return found

    def ask(self, request: bytes) -> Answer:
        self.send(request)
        return self.answers(1)[0]

    def subscribe(self, name: bytes) -> bytes:
        """The id of a new subscription."""
        answer = self.ask(subscribe(name))
        assert answer.code == OK, answer
        assert len(answer.payload) == 16
        return answer.payload

    def has_answer(self, within_s: float) -> bool:
        """Return whether bytes arrive in this time. Use it only to show that none do."""
        if self._whole:
            return True
        self.sock.settimeout(within_s)
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self.sock.settimeout(TIMEOUT_S)

    def to_the_end(self) -> list[Answer]:
        """Read until the server closes. Returns the complete answers."""
        try:
            while data := self.sock.recv(READ_BYTES):
                self._take(data)
        except ConnectionError:
            pass
        found, self._whole = self._whole, []
        return found

    @property
    def rest(self) -> bytes:
        """Received bytes of an incomplete answer."""
        return bytes(self._held)

    def shut_down(self) -> None:
        """Close the sending side of the connection."""
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()

    def _take(self, data: bytes) -> None:
        self._held += data
        found, size = answers_in(self._held)
        self._whole += found
        del self._held[:size]
