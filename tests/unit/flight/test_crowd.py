"""Calls are counted from their first byte on: also those that never say what they want."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pyarrow.flight as flight
import pytest

from polybus.errors import LimitReached
from polybus.kernel.flight_port import BatchQueue, FlightPort
from polybus.model.arrow import READ_SCHEMA
from polybus.transports.flight.flight_status import to_flight_status
from tests.rig.observer import until

MAX_CALLS = 2
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, END_OF_HEADERS = 4, 1, 4
PUT = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/arrow.flight.protocol.FlightService/DoPut",
    ":authority": "here",
    "te": "trailers",
    "content-type": "application/grpc",
}


class Handler:
    refused = 0

    def actions(self) -> list[tuple[str, str]]:
        return [("known", "an action")]

    def begin_call(self, call: Any) -> str:
        return "caller"

    def end_call(self, caller: str) -> None: ...

    def on_too_many_calls(self) -> Exception:
        self.refused += 1
        return LimitReached("max_calls", f"{MAX_CALLS} calls are in progress")

    def describe_error(self, error: BaseException) -> tuple[int, str, bytes]:
        return to_flight_status(error)


@pytest.fixture
def port() -> Iterator[tuple[Handler, Any]]:
    handler = Handler()
    made = FlightPort(
        "grpc://127.0.0.1:0", handler, BatchQueue(1 << 20, MAX_CALLS), READ_SCHEMA, 8, 1 << 20
    )
    yield handler, made
    made.shutdown()


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    head = len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + body


def header(name: str, value: str) -> bytes:
    """HPACK: a literal that is not indexed."""
    return b"\0" + b"".join(bytes((len(text),)) + text.encode() for text in (name, value))


@contextmanager
def silent_calls(port: int) -> Iterator[Callable[[], None]]:
    """A connection; each time it is asked it begins a put, of which nothing else ever comes."""
    fields = b"".join(header(*one) for one in PUT.items())
    streams = count(1, 2)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(PREFACE + frame(SETTINGS, 0, 0))
        yield lambda: sock.sendall(frame(HEADERS, END_OF_HEADERS, next(streams), fields))


def is_open(client: Any) -> bool:
    try:
        return [one.type for one in client.list_actions()] == ["known"]
    except flight.FlightError as error:
        return b"limit_reached" not in error.extra_info


def test_calls_without_data_count(port):
    handler, server = port
    with flight.connect(f"grpc://127.0.0.1:{server.port}") as client:
        assert is_open(client)
        with silent_calls(server.port) as begin_one:

            def is_full() -> bool:
                begin_one()  # one that came while we asked may have been refused itself
                return not is_open(client)

            until(is_full, "there are as many calls as there may be")
            assert handler.refused
        until(lambda: is_open(client), "they have ended with their connection")
