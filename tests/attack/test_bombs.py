"""Small messages that unpack to large ones, and headers that lie: refused before they are decoded.

Three compressed batches of 29 kB once took 2.7 GB, and the bus with them. The port adds up the
sizes that a message declares, and refuses it or waits, before Arrow allocates them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from polybus.testing.bus_process import BusProcess
from tests.attack.bystander import Bystander
from tests.attack.peak_meter import MIB, PeakMeter
from tests.attack.whole_bus import check_served, serve_all
from tests.rig.flight_client import SHORT, act, bodies, code_of, connect, produce
from tests.rig.http2_client import Http2Client, call_headers, grpc_message
from tests.rig.observer import check_unharmed, count, until
from tests.rig.soak_runs import SoakRun

LONG_S = 60.0
SENDERS = 3
ZSTD = flight.FlightCallOptions(write_options=pa.ipc.IpcWriteOptions(compression="zstd"))
LZ4 = flight.FlightCallOptions(write_options=pa.ipc.IpcWriteOptions(compression="lz4"))


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serve_all() as running:
        check_served(running)  # every part has its memory before the measurement
        with connect(running) as client:
            produce(client, "t", b"first")
        yield running
        with connect(running) as client:
            produce(client, "t", b"last")
        check_unharmed(running)


def zeroes(size: int) -> pa.RecordBatch:
    """A batch with one message of zeroes."""
    return pa.record_batch([pa.nulls(1, pa.utf8()), pa.array([bytes(size)])], schema=SHORT)


def put(bus: BusProcess, batch: pa.RecordBatch, options: Any = None, repeat: int = 1) -> list[str]:
    """Send a batch on a new connection. Returns the codes of the answers, or that of the end."""
    with connect(bus) as client:
        codes: list[str] = []
        try:
            descriptor = flight.FlightDescriptor.for_path("produce", "t")
            writer, reader = client.do_put(descriptor, batch.schema, options)
            for _ in range(repeat):
                writer.write_batch(batch)
                raw = reader.read()
                if raw is None:
                    break
                answer = json.loads(raw.to_pybytes())
                codes.append(answer["error"]["code"] if "error" in answer else "stored")
            writer.close()
        except flight.FlightError as error:
            codes.append(code_of(error))
        return codes


@pytest.mark.sabotage("unpacked-unbounded", expects="MiB above an idle bus")
@pytest.mark.parametrize("options", [ZSTD, LZ4], ids=["zstd", "lz4"])
def test_compressed_bombs_are_refused(bus, options):
    bomb = zeroes(900 * MIB)
    with PeakMeter(bus) as peak, ThreadPoolExecutor(3) as pool:
        codes = list(pool.map(lambda _: put(bus, bomb, options), range(3)))
    peak.check_memory()
    assert codes == [["too_large"]] * 3
    until(lambda: count(bus, "refused", "native_too_large") == 3, "the refusals are counted")


def test_compressed_batches_in_flight_are_bounded(bus):
    """Each batch fits, all together do not: they wait for each other."""
    batch = zeroes(24 * MIB)
    with PeakMeter(bus) as peak, ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda _: put(bus, batch, ZSTD, 2), range(16)))
    assert codes == [["stored", "stored"]] * 16
    peak.check_memory()


def test_ordinary_compressed_batches_are_stored(bus):
    for options in (ZSTD, LZ4):
        assert put(bus, zeroes(1 * MIB), options) == ["stored"]
    with connect(bus) as client:
        assert list(map(len, bodies(client, topic="t"))) == [5, MIB, MIB]


# --- hand-made messages


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes((number & 0x7F | 0x80,))
        number >>= 7
    return out + bytes((number,))


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


DESCRIPTOR = b"\x08\x01" + field(3, b"produce") + field(3, b"t")


def ipc_parts(message: bytes) -> tuple[bytes, bytes]:
    """Split an encapsulated IPC message into its header and its body."""
    size = int.from_bytes(message[4:8], "little")
    return message[8 : 8 + size], message[8 + size :]


def flight_data(message: bytes, *, descriptor: bytes = b"") -> bytes:
    header, body = ipc_parts(message)
    first = field(1, descriptor) if descriptor else b""
    return first + field(2, header) + (field(1000, body) if body else b"")


def send_raw(bus: BusProcess, *messages: bytes, **headers: str) -> None:
    """Put these messages by hand and wait until the bus has closed the connection or answered."""
    with Http2Client(bus.address("native").port) as client:
        sent = [grpc_message(one) for one in messages]
        client.begin(call_headers("DoPut", **headers), *sent, ends=True)
        client.read_until_end_of_stream()


def message_of(kind: str, batch: pa.RecordBatch, **options: Any) -> bytes:
    """Return the first message of a kind in the IPC stream of a batch."""
    sink = pa.BufferOutputStream()
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batch.schema, options=written) as writer:
        writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return next(one.serialize().to_pybytes() for one in messages if one.type == kind)


def lying_sizes() -> Iterator[bytes]:
    """Compressed batches whose declared sizes are not those of the data."""
    batch = pa.record_batch([pa.nulls(4, pa.utf8()), pa.array([b"x" * 5000] * 4)], schema=SHORT)
    plain = message_of("record batch", batch, compression="zstd")
    header, body = ipc_parts(plain)
    at = len(plain) - len(body) + body.index((20_000).to_bytes(8, "little"))
    for size in (0, 1, 19_999, 20_001, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1):
        lie = bytearray(plain)
        lie[at : at + 8] = size.to_bytes(8, "little")
        yield bytes(lie)
    for cut in range(8, len(header), 8):  # a header that ends too early
        yield plain[:4] + cut.to_bytes(4, "little") + header[:cut] + body


def test_lying_sizes_are_refused(bus):
    schema = flight_data(SHORT.serialize().to_pybytes(), descriptor=DESCRIPTOR)
    lies = list(lying_sizes())
    with PeakMeter(bus) as peak:
        for lie in lies:
            send_raw(bus, schema, flight_data(lie))
    peak.check_memory()
    until(
        lambda: (
            (
                count(bus, "refused", "native_malformed_request")
                + count(bus, "refused", "native_too_large")
            )
            >= len(lies) - 1
        ),
        "each is refused and counted",
    )
    with connect(bus) as client:
        assert bodies(client, topic="t") == [b"first"]


def test_gzip_of_grpc_is_refused(bus):
    """gRPC would unpack a message without an end before anyone sees it."""
    schema = flight_data(SHORT.serialize().to_pybytes(), descriptor=DESCRIPTOR)
    bomb = grpc_message(field(3, bytes(300 * MIB)), is_gzipped=True)
    with PeakMeter(bus) as peak, Http2Client(bus.address("native").port) as client:
        headers = call_headers("DoPut", grpc_encoding="gzip")
        client.begin(headers, grpc_message(schema), bomb, ends=True)
        client.read_until_end_of_stream()
    peak.check_memory()


def test_message_of_any_size_is_not_collected(bus):
    """The length of a message says four gigabytes; gRPC refuses it by its length."""
    with PeakMeter(bus) as peak, Http2Client(bus.address("native").port) as client:
        client.begin(call_headers("DoPut"), b"\0\xff\xff\xff\xff" + bytes(64 * 1024), ends=True)
        client.read_until_end_of_stream()
    peak.check_memory()


def hostile_schemas() -> dict[str, pa.Schema]:
    nested = pa.int32()
    for _ in range(40):
        nested = pa.struct([("a", nested)])
    return {
        "a huge name": pa.schema([("x" * (8 * MIB), pa.utf8()), ("body", pa.binary())]),
        "many columns": pa.schema([(f"c{n}", pa.int32()) for n in range(20_000)]),
        "nested": pa.schema([("shard_key", pa.utf8()), ("body", nested)]),
        "many nested": pa.schema(
            [("body", pa.struct([(f"c{n}", pa.int32()) for n in range(20_000)]))]
        ),
        "dictionary": pa.schema(
            [("shard_key", pa.dictionary(pa.int32(), pa.utf8())), ("body", pa.binary())]
        ),
        "dictionary of structs": pa.schema(
            [("body", pa.dictionary(pa.int32(), pa.struct([("x" * MIB, pa.int32())])))]
        ),
    }


@pytest.mark.parametrize("name", hostile_schemas())
def test_hostile_schemas_are_refused(bus, name):
    schema = hostile_schemas()[name]
    batch = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)
    with PeakMeter(bus) as peak:
        assert put(bus, batch) == ["malformed_request"]
    peak.check_memory()
    assert count(bus, "refused", "native_malformed_request") == 1


@pytest.mark.parametrize("good", [b"shard_key", b"ntry"], ids=["column", "nested"])
def test_names_that_are_not_utf8_are_refused(bus, good):
    headers = pa.struct([("entry", pa.map_(pa.utf8(), pa.binary()))])
    schema = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary()), ("headers", headers)])
    raw = schema.serialize().to_pybytes()
    assert good in raw
    raw = raw.replace(good, b"\xff" * len(good))
    send_raw(bus, flight_data(raw, descriptor=DESCRIPTOR))
    until(lambda: count(bus, "refused", "native_malformed_request") == 1, "refused")


def test_dictionary_without_a_column_is_refused(bus):
    """Its schema is accepted, so the dictionary itself must be refused."""
    values = pa.array(["x" * 1000] * 3).dictionary_encode()
    dictionary = message_of("dictionary", pa.record_batch([values], names=["shard_key"]))
    schema = flight_data(SHORT.serialize().to_pybytes(), descriptor=DESCRIPTOR)
    send_raw(bus, schema, flight_data(dictionary))
    until(lambda: count(bus, "refused", "native_malformed_request") == 1, "refused")


def test_first_message_with_a_batch_is_refused(bus):
    raw = message_of("record batch", zeroes(900 * MIB), compression="zstd")
    with PeakMeter(bus) as peak:
        send_raw(bus, flight_data(raw, descriptor=DESCRIPTOR))
    peak.check_memory()
    with connect(bus) as client:
        assert act(client, "bounds", topic="t")["next_id"] == 2


def test_header_that_two_parsers_read_differently_is_refused(bus):
    """A tag beyond 32 bits is another field for a parser that keeps all bits, and the header for
    one that drops them."""
    header, body = ipc_parts(message_of("record batch", zeroes(400 * MIB), compression="zstd"))
    plain, _ = ipc_parts(message_of("record batch", zeroes(10)))
    hidden = varint((1 << 35) | 2 << 3 | 2) + varint(len(header)) + header
    schema = flight_data(SHORT.serialize().to_pybytes(), descriptor=DESCRIPTOR)
    for second in (hidden, field(2, header), field(7, header)):
        with PeakMeter(bus) as peak:
            send_raw(bus, schema, field(2, plain) + second + field(1000, body))
        peak.check_memory()


# --- for a minute


@pytest.mark.soak
def test_bombs_for_a_minute(bus):
    """Compressed bombs, lying sizes and bombs without a schema, from several senders at a time."""
    run = SoakRun("attack/test_bombs.py", 0)
    schema = flight_data(SHORT.serialize().to_pybytes(), descriptor=DESCRIPTOR)
    packed = [
        flight_data(message_of("record batch", zeroes(900 * MIB), compression=name))
        for name in ("zstd", "lz4")
    ]
    attacks: list[tuple[bytes, ...]] = [(schema, bomb) for bomb in packed]
    attacks += [(schema, flight_data(lie)) for lie in lying_sizes()]
    attacks += [(field(1, DESCRIPTOR) + packed[0],)]
    end_s = time.monotonic() + LONG_S

    def attack(sender: int) -> int:
        sent = 0
        while time.monotonic() < end_s:
            send_raw(bus, *attacks[(sender + sent) % len(attacks)])
            sent += 1
        return sent

    with Bystander(bus) as bystander, PeakMeter(bus) as peak, ThreadPoolExecutor(SENDERS) as pool:
        attempts = sum(pool.map(attack, range(SENDERS)))
    with connect(bus) as client:
        successes = len(bodies(client, topic="t")) - 1
    run.record(attempts=attempts, successes=successes, **peak.figures(), **bystander.figures())
    assert successes == 0
    peak.check_memory()
