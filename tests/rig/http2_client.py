"""A raw HTTP/2 client for attacks on the native port: its frames may be anything.

It speaks prior-knowledge HTTP/2 and never waits for an answer. `drain` reads and discards the
server's frames, so that the server is never blocked in writing. With TLS use `skip_received`
instead, because two threads must not use one TLS socket.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
from itertools import count
from threading import Thread
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
CANCEL = (8).to_bytes(4, "big")
MAX_CONCURRENT_STREAMS = 3  # of SETTINGS
MAX_FRAME_BYTES = 16_384
SERVICE = "/arrow.flight.protocol.FlightService/"


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    head = len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + body


def header(name: str, value: str) -> bytes:
    """HPACK: a literal that is not indexed."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


def call_headers(method: str, **more: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": SERVICE + method,
        ":authority": "here",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    fields |= {name.replace("_", "-"): value for name, value in more.items()}
    return b"".join(header(*one) for one in fields.items())


def grpc_message(data: bytes, *, is_gzipped: bool = False) -> bytes:
    """Return a gRPC message: a flag, the length and the data."""
    data = gzip.compress(data) if is_gzipped else data
    return bytes((is_gzipped,)) + len(data).to_bytes(4, "big") + data


class Http2Client:
    """One connection. Every method that sends raises OSError once the server has cut it."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.streams = count(1, 2)
        self.socket = socket.create_connection(("127.0.0.1", port))
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.settings = self._read_settings()
        self.socket.sendall(frame(SETTINGS, ACK, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def drain(self) -> None:
        """Discard the server's frames on a thread of its own, until the connection ends."""

        def read() -> None:
            with contextlib.suppress(OSError):
                while self.socket.recv(1 << 16):
                    pass

        Thread(target=read, daemon=True).start()

    def skip_received(self) -> None:
        """Discard the frames that have come. Raises OSError at the end of the connection."""
        timeout = self.socket.gettimeout()
        self.socket.settimeout(0)
        try:
            while self.socket.recv(1 << 16):
                pass
        except (BlockingIOError, ssl.SSLWantReadError):
            self.socket.settimeout(timeout)
            return
        raise ConnectionResetError("the server has closed the connection")

    def begin(self, headers: bytes, *messages: bytes, ends: bool = False) -> int:
        """Open a stream and send messages on it. Returns its number."""
        stream = next(self.streams)
        self.socket.sendall(self.opening(stream, headers, *messages, ends=ends))
        return stream

    def opening(self, stream: int, headers: bytes, *messages: bytes, ends: bool = False) -> bytes:
        frames = [frame(HEADERS, END_HEADERS, stream, headers)]
        for message in messages:
            for at in range(0, len(message), MAX_FRAME_BYTES):
                frames.append(frame(DATA, 0, stream, message[at : at + MAX_FRAME_BYTES]))
        if ends:
            frames.append(frame(DATA, END_STREAM, stream))
        return b"".join(frames)

    def open_burst(self, size: int, headers: bytes) -> None:
        """Open streams and send nothing else on them."""
        streams = [next(self.streams) for _ in range(size)]
        self.socket.sendall(b"".join(self.opening(stream, headers) for stream in streams))

    def reset_burst(self, size: int, headers: bytes, *messages: bytes, ends: bool = False) -> None:
        """Open streams and cancel each at once."""
        burst = []
        for _ in range(size):
            stream = next(self.streams)
            burst.append(self.opening(stream, headers, *messages, ends=ends))
            burst.append(frame(RST_STREAM, 0, stream, CANCEL))
        self.socket.sendall(b"".join(burst))

    def read_until_end_of_stream(self) -> None:
        """Read until the server has ended a stream or the connection."""
        with contextlib.suppress(OSError):
            while True:
                head = self._receive(9)
                self._receive(int.from_bytes(head[:3], "big"))
                if head[3] == RST_STREAM or (head[3] in (DATA, HEADERS) and head[4] & END_STREAM):
                    return

    def _read_settings(self) -> dict[int, int]:
        """Return the SETTINGS of the server, its first frame."""
        head = self._receive(9)
        body = self._receive(int.from_bytes(head[:3], "big"))
        pairs = [body[at : at + 6] for at in range(0, len(body), 6)]
        return {int.from_bytes(one[:2], "big"): int.from_bytes(one[2:], "big") for one in pairs}

    def _receive(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            part = self.socket.recv(size - len(received))
            if not part:
                raise ConnectionResetError("the server has closed the connection")
            received += part
        return received
