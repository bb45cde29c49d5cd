"""Put streams over real gRPC, with outcomes in the test's hand."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from polybus.errors import (
    LimitReached,
    MalformedRequest,
    OutOfSequence,
    StoreClosed,
    TooLarge,
)
from polybus.kernel.flight_port import BatchQueue, FlightPort, answer_batches
from polybus.model.arrow import READ_SCHEMA
from polybus.transports.flight.flight_status import to_flight_status
from polybus.transports.flight.put_intake import PutIntake, PutTarget, read_json
from tests.rig.observer import until
from tests.rig.relay import Relay

SCHEMA = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary())])
MAX_BATCH_BYTES = 50_000
ZSTD = b"\x28\xb5\x2f\xfd"  # the magic number of a frame


@dataclass
class Handler:
    """The handler of the port. Every batch is pending in `handed` until the test resolves it."""

    handed: list[tuple[bytes, Future[Any]]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    closed: int = 0
    too_many_calls = to_flight_status(LimitReached("max_calls", "too many"))
    refused: Exception | None = None
    ready: Event = field(default_factory=Event)  # the dropped topic exists again
    made: Event = field(default_factory=Event)  # the thread that creates it is done
    order: list[int] = field(default_factory=list)  # counters, as they were handed over

    def begin_call(self, call: Any) -> str:
        return "caller"

    def open_put(self, call: Any, path: list[bytes], schema: pa.Schema) -> PutTarget:
        if self.refused is not None:
            raise self.refused
        is_ready = self.ready.is_set if path[-1] == b"gone" else lambda: True
        return PutTarget(partial(self.hand_over, path[-1]), tell, is_ready)

    def hand_over(self, topic: bytes, block: Any, stamp: Any, delivery: Any) -> Future[Any]:
        if topic == b"gone":
            assert self.made.wait(5)
        if stamp is not None and stamp.counter == 99:
            raise OutOfSequence("a gap")
        if stamp is not None:
            self.order.append(stamp.counter)
        outcome: Future[Any] = Future()
        self.handed.append((bytes(block.data), outcome))
        return outcome

    def close_put(self, owner: PutTarget) -> None:
        self.closed += 1

    def on_malformed(self, text: str, is_too_large: bool) -> Exception:
        return TooLarge(text) if is_too_large else MalformedRequest(text)

    def describe_error(self, error: BaseException) -> tuple[int, str, bytes]:
        return to_flight_status(error)

    def settle(self, index: int, result: object = None) -> None:
        self.wait(index)
        self.handed[index][1].set_result(result)

    def wait(self, index: int) -> None:
        until(lambda: len(self.handed) > index, f"batch {index} is handed over")


def tell(counter: int | None, done: Any) -> bytes:
    return json.dumps({"counter": counter, "done": done}).encode()


class World:
    def __init__(self, max_batches: int = 8, max_bytes: int = 1 << 20) -> None:
        self.handler, self.queue = Handler(), BatchQueue()
        location = "grpc://127.0.0.1:0"
        self.port = FlightPort(
            location, self.handler, self.queue, READ_SCHEMA, max_batches, max_bytes
        )
        errors = self.handler.errors
        self.intake = PutIntake(self.queue, MAX_BATCH_BYTES, lambda: 0, errors.append)
        self.client = flight.connect(f"grpc://127.0.0.1:{self.port.port}")

    def put(self, client: Any = None, topic: str = "orders") -> tuple[Any, Any]:
        descriptor = flight.FlightDescriptor.for_path("produce", topic)
        writer, reader = (client or self.client).do_put(descriptor, SCHEMA)
        return writer, reader

    def close(self) -> None:
        """Close the port, also after a failed test, whose streams are still open."""
        self.handler.made.set()
        for _, outcome in self.handler.handed:
            if not outcome.done():
                outcome.set_result(None)
        self.client.close()
        # It waits for open streams, of which a failed test may have left some.
        Thread(target=self.port.shutdown, daemon=True).start()
        self.queue.close()
        assert self.intake.join(5)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def batch(body: bytes = b"x") -> pa.RecordBatch:
    return pa.record_batch([pa.nulls(1, pa.utf8()), pa.array([body])], schema=SCHEMA)


def stamp(counter: int) -> bytes:
    return json.dumps({"producer": "p", "epoch": 1, "counter": counter}).encode()


def answer(reader: Any) -> dict[str, Any]:
    return json.loads(reader.read().to_pybytes())


def test_waiting_stream_does_not_block_other_streams(world):
    """And its own batches stay in their order, also when the topic is there in between."""
    writer, reader = world.put(topic="gone")
    for counter in (1, 2):
        writer.write_with_metadata(batch(), stamp(counter))
    other, heard = world.put()
    for index in (0, 1):
        other.write_with_metadata(batch(), stamp(7))
        world.handler.settle(index, "other")
        assert answer(heard) == {"counter": 7, "done": "other"}
        if not world.handler.ready.is_set():
            world.handler.ready.set()
            writer.write_with_metadata(batch(), stamp(3))
    world.handler.made.set()
    for index in (2, 3, 4):
        world.handler.settle(index, index - 1)
    assert world.handler.order == [7, 7, 1, 2, 3]
    assert [answer(reader) for _ in range(3)] == [{"counter": n, "done": n} for n in (1, 2, 3)]
    for one in (writer, other):
        one.close()


def test_empty_messages_do_not_end_a_stream(world):
    writer, reader = world.put()
    for _ in range(20):
        writer.write_metadata(b"")
    writer.write_with_metadata(batch(), stamp(1))
    writer.write_metadata(b"")
    world.handler.settle(0, "a")
    assert answer(reader) == {"counter": 1, "done": "a"}
    writer.close()


def test_answers_are_in_order_of_batches(world):
    writer, reader = world.put()
    for counter in (1, 2, 99):
        writer.write_with_metadata(batch(), stamp(counter))
    world.handler.settle(1, "b")
    world.handler.settle(0, "a")
    assert [answer(reader) for _ in range(3)] == [
        {"counter": 1, "done": "a"},
        {"counter": 2, "done": "b"},
        {"counter": 99, "error": {"code": "out_of_sequence", "text": "a gap"}},
    ]
    assert [type(one) for one in world.handler.errors] == [OutOfSequence]  # it is counted
    writer.close()
    until(lambda: world.handler.closed == 1, "the stream is closed")
    assert world.queue.wait_settled(0)


def test_internal_error_is_reported_and_logged(world):
    writer, reader = world.put()
    writer.write_batch(batch())
    until(lambda: world.handler.handed, "it is handed over")
    world.handler.handed[0][1].set_exception(ZeroDivisionError())
    assert answer(reader)["error"]["code"] == "internal"
    assert [type(one) for one in world.handler.errors] == [ZeroDivisionError]
    writer.close()


@pytest.mark.parametrize(("max_batches", "max_bytes"), [(1, 1 << 20), (100, 15)])
def test_batches_in_flight_are_bounded(max_batches, max_bytes):
    world = World(max_batches, max_bytes)
    writer, reader = world.put()
    other, other_reader = world.put()
    for body in (b"a" * 10, b"b" * 10, b"c" * 10_000):  # the last is larger than all of it: alone
        writer.write_batch(batch(body))
    until(lambda: len(world.handler.handed) == 1, "one is handed over")
    other.write_batch(batch(b"other"))  # another stream has a window of its own
    until(lambda: len(world.handler.handed) == 2, "and one of the other")
    assert b"other" in world.handler.handed[1][0]
    world.handler.settle(0)
    assert answer(reader) == {"counter": None, "done": None}
    for index in (2, 3):
        world.handler.wait(index)
        assert len(world.handler.handed) == index + 1
        world.handler.settle(index)
        answer(reader)
    world.handler.settle(1)
    answer(other_reader)
    writer.close()
    other.close()
    world.close()


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ((batch(b"x" * 60_000), b""), "too_large"),
        ((batch(), b"{"), "malformed_request"),
        ((batch(), b'{"producer": "p"}'), "malformed_request"),
        ((batch().slice(0, 0), b""), "malformed_request"),
    ],
)
def test_invalid_batch_is_answered_and_the_next_is_accepted(world, sent, code):
    writer, reader = world.put()
    writer.write_with_metadata(*sent)
    assert answer(reader)["error"]["code"] == code
    writer.write_batch(batch())
    world.handler.settle(0, "fine")
    assert answer(reader)["done"] == "fine"
    writer.close()


def test_metadata_without_a_batch_is_refused(world):
    writer, reader = world.put()
    writer.write_metadata(b"{}")
    assert answer(reader)["error"] == {
        "code": "malformed_request",
        "text": "stamp must have exactly the keys producer, epoch and counter",
    }
    writer.write_metadata(stamp(1))
    assert answer(reader)["error"]["text"] == "metadata without a batch"
    writer.close()


def test_disconnected_client_blocks_no_other(world):
    with Relay(world.port.port) as relay:
        writer, _ = world.put(flight.connect(f"grpc://127.0.0.1:{relay.port}"))
        for _ in range(5):
            writer.write_batch(batch())
        world.handler.wait(4)
        relay.cut()
    for index in range(5):
        world.handler.settle(index)
    until(lambda: world.handler.closed == 1, "the stream is closed")
    assert world.queue.wait_settled(0)
    assert world.handler.errors == []


@pytest.fixture
def narrow() -> Iterator[tuple[BatchQueue, Any]]:
    """A queue for 100 kB without an intake thread, and a client of its port."""
    queue = BatchQueue(100_000)
    port = FlightPort("grpc://127.0.0.1:0", Handler(), queue, READ_SCHEMA, 64, 1 << 20)
    client = flight.connect(f"grpc://127.0.0.1:{port.port}")
    yield queue, client
    client.close()
    port.shutdown()


def fill_up(queue: BatchQueue, client: Any) -> list[tuple[Any, Any]]:
    """Four streams of three batches each, of 40 kB; so much has come as there is room for."""
    descriptor = flight.FlightDescriptor.for_path("produce", "orders")
    streams = [client.do_put(descriptor, SCHEMA) for _ in range(4)]
    for writer, _ in streams:
        for _ in range(3):
            writer.write_batch(batch(bytes(40_000)))
        writer.done_writing()
    time.sleep(0.3)
    return streams


def test_batch_queue_is_bounded_over_all_streams(narrow):
    queue, client = narrow
    streams = fill_up(queue, client)
    taken = 0
    while taken < 12:
        arrivals = queue.pop_all()
        assert sum(size for *_, size in arrivals) <= 100_000
        answer_batches([(pending, b"{}") for _, pending, _, _ in arrivals])
        taken += len(arrivals)
    for writer, reader in streams:
        assert [answer(reader) for _ in range(3)] == [{}, {}, {}]
        writer.close()


def test_stream_waiting_for_the_queue_is_refused_on_stop(narrow):
    queue, client = narrow
    streams = fill_up(queue, client)
    queue.stop(*stopping())
    queue.wake()
    arrivals = queue.pop_all()
    assert len(arrivals) <= 2
    answer_batches([(pending, b"{}") for _, pending, _, _ in arrivals])
    for writer, _ in streams:
        with pytest.raises(flight.FlightUnavailableError, match="stopping"):
            writer.close()


def test_bytes_that_are_not_messages_count(world):
    """Two messages of 30 kB whose offsets say on their way that both are empty."""
    sent = struct.pack("<ii", 30_000, 60_000)
    two = pa.record_batch([pa.nulls(2, pa.utf8()), pa.array([bytes(30_000)] * 2)], schema=SCHEMA)
    with Relay(world.port.port, change=lambda piece: piece.replace(sent, bytes(8))) as relay:
        writer, reader = world.put(flight.connect(f"grpc://127.0.0.1:{relay.port}"))
        writer.write_batch(two)
        assert answer(reader)["error"]["code"] == "too_large"
        writer.close()


def test_invalid_arrow_data_is_refused_with_a_code(world):
    """Arrow takes some of them for a fault in reading."""
    options = flight.FlightCallOptions(
        write_options=pa.ipc.IpcWriteOptions(compression="zstd"), timeout=30
    )
    descriptor = flight.FlightDescriptor.for_path("produce", "orders")
    with Relay(world.port.port, change=lambda piece: piece.replace(ZSTD, bytes(4))) as relay:
        client = flight.connect(f"grpc://127.0.0.1:{relay.port}")
        writer, reader = client.do_put(descriptor, SCHEMA, options)
        writer.write_batch(batch(bytes(10_000)))
        assert reader.read() is None
        with pytest.raises(flight.FlightError, match="not Arrow data") as caught:
            writer.close()
    assert json.loads(caught.value.extra_info)["code"] == "malformed_request"


def test_stopping_port_accepts_no_batches(world):
    writer, reader = world.put()
    writer.write_batch(batch())
    until(lambda: world.handler.handed, "it is handed over")
    world.queue.stop(*stopping())
    writer.write_batch(batch())
    assert not world.queue.wait_settled(0)
    world.handler.settle(0)
    assert answer(reader) == {"counter": None, "done": None}
    assert world.queue.wait_settled(10)
    assert reader.read() is None
    with pytest.raises(flight.FlightUnavailableError, match="stopping"):
        writer.close()


def stopping() -> tuple[int, bytes, bytes]:
    code, text, extra = to_flight_status(StoreClosed("the bus is stopping"))
    return code, text.encode(), extra


def test_refused_stream_fails_with_its_code(world):
    world.handler.refused = MalformedRequest("not so")
    writer, reader = world.put()
    assert reader.read() is None
    with pytest.raises(flight.FlightError, match="not so") as caught:
        writer.close()
    assert json.loads(caught.value.extra_info)["code"] == "malformed_request"
    assert world.handler.closed == 0


def test_invalid_address_is_refused():
    world = World()
    with pytest.raises(OSError, match="Cannot parse"):
        FlightPort(
            f"grpc://127.0.0.1:{world.port.port}x", Handler(), BatchQueue(), READ_SCHEMA, 1, 1
        )
    world.close()


@pytest.mark.parametrize(
    "raw",
    [b"{", b"[]", b"\xff", b"[" * 10**5, b"1" * 5000, b" " * 200, '{"a": 1}'.encode("utf-16")],
)
def test_invalid_json_object_is_refused(raw):
    with pytest.raises(MalformedRequest, match=r"^it "):
        read_json(raw, 10**6 if len(raw) != 200 else 100, "it")


def test_json():
    assert read_json(b"", 10, "it") == {}
    assert read_json('{"ä": 1}'.encode(), 10, "it") == {"ä": 1}
