"""An rqueue client on plain sockets, written from the spec alone.

It shares no code with the codec, so that one mistake cannot hide in both. It blocks, has a
deadline on every call, and can send invalid frames.

    with connect(bus.address()) as client:
        client.send(subscribe(b"news"))
        client.settle()                        # the subscription is in force
        client.send(publish(b"news", b"hello"))
        assert client.messages(1) == [(b"news", b"hello")]
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
from typing import Protocol

from tests.rig.closing import Closing

TIMEOUT_S = 20.0  # only ever reached when something is wrong
READ_BYTES = 1 << 20

PUBLISH, SUBSCRIBE, REMOVE, DEREGISTER, NOTIFICATION, PART = 0, 1, 2, 5, 7, 8

Frame = tuple[int, bytes]  # type, payload


class Place(Protocol):
    """Where a server listens; `polybus.model.address.Address` is one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def path(self) -> str: ...


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IB", len(payload), kind) + payload


def with_topic(topic: bytes, rest: bytes = b"") -> bytes:
    return struct.pack("B", len(topic)) + topic + rest


def notification(topic: bytes, content: bytes = b"") -> bytes:
    return frame(NOTIFICATION, with_topic(topic, content))


def part(topic: bytes, message_id: bytes, index: int, count: int, chunk: bytes = b"") -> bytes:
    return frame(PART, with_topic(topic, struct.pack(">16sHH", message_id, index, count) + chunk))


def publish(topic: bytes, content: bytes = b"") -> bytes:
    return frame(PUBLISH, notification(topic, content))


def publish_part(
    topic: bytes, message_id: bytes, index: int, count: int, chunk: bytes = b""
) -> bytes:
    return frame(PUBLISH, part(topic, message_id, index, count, chunk))


def subscribe(topic: bytes) -> bytes:
    return frame(SUBSCRIBE, with_topic(topic))


def remove(topic: bytes) -> bytes:
    return frame(REMOVE, with_topic(topic))


def deregister() -> bytes:
    return frame(DEREGISTER)


def connect(
    place: Place,
    *,
    tls: ssl.SSLContext | None = None,
    receive_buffer: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Client:
    """A connection; a small `receive_buffer` makes a reader that is soon full."""
    sock = socket.socket(socket.AF_UNIX if place.path else socket.AF_INET)
    sock.settimeout(timeout_s)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        if not place.path:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(place.path or (place.host, place.port))
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=place.host)
    except BaseException:
        sock.close()
        raise
    return Client(sock)


class Client(Closing):
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = bytearray()

    @property
    def name(self) -> str:
        """This connection's peer name in the server's log."""
        host, port = self.sock.getsockname()[:2]
        return f"{host}:{port}"

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def frames(self, count: int) -> list[Frame]:
        """Return exactly the next `count` frames. Raises if the connection ends before."""
        found: list[Frame] = []
        while len(found) < count:
            found += self._take(count - len(found))
            if len(found) < count:
                self._fill()
        return found

    def messages(self, count: int) -> list[tuple[bytes, bytes]]:
        """The next `count` NOTIFICATIONs as (topic, content)."""
        return [message(one) for one in self.frames(count)]

    def raw(self, count: int) -> bytes:
        """Return exactly the next `count` bytes, for streams too long to parse frame by frame."""
        while len(self._held) < count:
            self._fill()
        data = bytes(self._held[:count])
        del self._held[:count]
        return data

    @property
    def rest(self) -> bytes:
        """Received bytes of an incomplete frame."""
        return bytes(self._held)

    def to_the_end(self) -> list[Frame]:
        """Read until the server closes. Returns the complete frames."""
        try:
            while data := self.sock.recv(READ_BYTES):
                self._held += data
        except ConnectionError:
            pass
        return self._take()

    def settle(self) -> list[Frame]:
        """Wait for an echo on a private topic; all earlier frames have taken effect then.

        Returns the frames that arrived before the echo.
        """
        topic = b"_probe/" + os.urandom(16)
        self.send(subscribe(topic), publish(topic), remove(topic))
        between: list[Frame] = []
        while (one := self.frames(1)[0]) != (NOTIFICATION, with_topic(topic)):
            between.append(one)
        return between

    def reset(self) -> None:
        """End the connection with an RST instead of a FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    def _fill(self) -> None:
        data = self.sock.recv(READ_BYTES)
        if not data:
            raise EOFError("the server closed the connection")
        self._held += data

    def _take(self, limit: int | None = None) -> list[Frame]:
        found: list[Frame] = []
        at = 0
        while limit is None or len(found) < limit:
            if len(self._held) - at < 5:
                break
            length, kind = struct.unpack_from(">IB", self._held, at)
            if len(self._held) - at - 5 < length:
                break
            found.append((kind, bytes(self._held[at + 5 : at + 5 + length])))
            at += 5 + length
        del self._held[:at]
        return found


def message(one: Frame) -> tuple[bytes, bytes]:
    kind, payload = one
    if kind != NOTIFICATION:
        raise ValueError(f"frame of type {kind} where a NOTIFICATION should be")
    size = payload[0]
    return payload[1 : 1 + size], payload[1 + size :]
