"""The limit of calls counts a call from its first byte, also one that sends no request."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.flight as flight
import pytest

from polybus.errors import LimitReached
from polybus.kernel.flight_port import BatchQueue, FlightPort
from polybus.model.arrow import READ_SCHEMA
from polybus.transports.flight.flight_status import to_flight_status
from tests.rig.http2_client import Http2Client, call_headers
from tests.rig.observer import until

MAX_CALLS = 2


class Caller:
    """A caller of a call: the port holds a reference to it until `take_ended` returns it."""


class Handler:
    too_many_calls = to_flight_status(
        LimitReached("max_calls", f"{MAX_CALLS} calls are in progress")
    )

    def actions(self) -> list[tuple[str, str]]:
        return [("known", "an action")]

    def begin_call(self, call: Any) -> Caller:
        return Caller()

    def describe_error(self, error: BaseException) -> tuple[int, str, bytes]:
        return to_flight_status(error)


@pytest.fixture
def port() -> Iterator[tuple[BatchQueue, Any]]:
    queue = BatchQueue(1 << 20, MAX_CALLS)
    made = FlightPort("grpc://127.0.0.1:0", Handler(), queue, READ_SCHEMA, 8, 1 << 20)
    yield queue, made
    made.shutdown()


@contextmanager
def silent_calls(port: int) -> Iterator[Callable[[], object]]:
    """A connection; each time it is asked it begins a put, of which nothing else ever comes."""
    with Http2Client(port) as client:
        yield lambda: client.begin(call_headers("DoPut"))


def is_open(client: Any) -> bool:
    try:
        return [one.type for one in client.list_actions()] == ["known"]
    except flight.FlightError as error:
        return b"limit_reached" not in error.extra_info


def test_calls_without_data_count(port):
    queue, server = port
    with flight.connect(f"grpc://127.0.0.1:{server.port}") as client:
        assert is_open(client)
        with silent_calls(server.port) as begin_one:

            def is_full() -> bool:
                begin_one()  # an earlier one may have been refused during the check
                return not is_open(client)

            until(is_full, "there are as many calls as there may be")
            assert queue.take_refused() > 0
        until(lambda: is_open(client), "they have ended with their connection")


def test_callers_of_ended_calls_are_returned_once(port):
    queue, server = port
    ended: list[Caller] = []
    with flight.connect(f"grpc://127.0.0.1:{server.port}") as client:
        for _ in range(3):
            client.list_actions()

        def are_ended() -> bool:
            ended.extend(queue.take_ended())
            return len(ended) == 3

        until(are_ended, "every call has ended")
    assert queue.take_ended() == []
    callers = [weakref.ref(caller) for caller in ended]
    ended.clear()
    assert [caller() for caller in callers] == [None] * 3
