"""Bad input on the native port gets an error with a code, and nothing is half-written.

The tests use plain Arrow Flight. After each test the bus must still serve, with no fault
in its log or counters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from polybus.testing.bus_process import BusProcess, serve
from tests.rig.flight_client import act, bodies, code_of, connect, produce, put_codes, read, refused
from tests.rig.observer import check_unharmed

SHORT = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary())])
MIB = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[BusProcess]:
    flags = ("--log-format", "json")
    with serve(*flags, listen=("native=grpc://127.0.0.1:0",)) as bus:
        yield bus


@pytest.fixture
def bus(running) -> Iterator[BusProcess]:
    yield running
    check_unharmed(running)


@pytest.fixture
def client(bus) -> Iterator[flight.FlightClient]:
    with connect(bus) as connected:
        yield connected


@pytest.fixture
def topic(client, request) -> Iterator[str]:
    """A topic with one message, which must be the only one afterwards."""
    name = f"topic {abs(hash(request.node.name))}"
    act(client, "topic.create", topic=name, shards=1)
    produce(client, name, b"whole")
    yield name
    produce(client, name, b"after")
    assert bodies(client, topic=name) == [b"whole", b"after"]


def put_nothing(client, descriptor: flight.FlightDescriptor, schema: pa.Schema) -> None:
    writer, reader = client.do_put(descriptor, schema)
    writer.done_writing()
    reader.read()
    writer.close()


def refused_put(client, schema: pa.Schema, *path: str | bytes) -> str:
    """The code that a stream ends with, before it has answered anything."""
    with pytest.raises(flight.FlightError) as caught:
        put_nothing(client, flight.FlightDescriptor.for_path(*path), schema)
    return code_of(caught.value)


# --- streams


WRONG_SCHEMAS = {
    "no body": [("shard_key", pa.utf8())],
    "no key": [("body", pa.binary())],
    "large body": [("shard_key", pa.utf8()), ("body", pa.large_binary())],
    "large key": [("shard_key", pa.large_utf8()), ("body", pa.binary())],
    "view": [("shard_key", pa.string_view()), ("body", pa.binary())],
    "text body": [("shard_key", pa.utf8()), ("body", pa.utf8())],
    "fixed": [("shard_key", pa.utf8()), ("body", pa.binary(4))],
    "dictionary": [("shard_key", pa.dictionary(pa.int32(), pa.utf8())), ("body", pa.binary())],
    "time": [("shard_key", pa.utf8()), ("body", pa.binary()), ("insertion_ms", pa.int32())],
    "stamp": [
        ("shard_key", pa.utf8()),
        ("body", pa.binary()),
        ("insertion_ms", pa.timestamp("ms")),
    ],
    "headers": [
        ("shard_key", pa.utf8()),
        ("body", pa.binary()),
        ("headers", pa.map_(pa.utf8(), pa.utf8())),
    ],
    "more": [("shard_key", pa.utf8()), ("body", pa.binary()), ("x", pa.int64())],
    "twice": [("shard_key", pa.utf8()), ("body", pa.binary()), ("body", pa.binary())],
    "nothing": [],
}


@pytest.mark.parametrize("fields", WRONG_SCHEMAS.values(), ids=WRONG_SCHEMAS)
def test_stream_with_a_wrong_schema_is_refused(client, topic, fields):
    schema = pa.schema(fields)
    assert refused_put(client, schema, "produce", topic) == "malformed_request"
    stage = act(client, "stage.new")["stage"]
    assert refused_put(client, schema, "stage", stage, topic) == "malformed_request"


@pytest.mark.parametrize(
    "path",
    [
        ["produce"],
        ["produce", "a", "b"],
        ["stage", "a"],
        ["stage", "a", "b", "c"],
        ["read", "t"],
        ["", ""],
    ],
)
def test_unknown_path_is_refused(client, path):
    assert refused_put(client, SHORT, *path) == "malformed_request"


def test_put_by_command_is_refused(client):
    descriptor = flight.FlightDescriptor.for_command(b"produce t")
    with pytest.raises(flight.FlightError) as caught:
        put_nothing(client, descriptor, SHORT)
    assert code_of(caught.value) == "malformed_request"


@pytest.mark.parametrize("path", [(b"produce", b"\xff\xfe"), (b"\xff", b"t")])
def test_path_that_is_not_utf8_is_refused_by_grpc(client, path):
    """Protocol Buffers refuse it, so the error has no code of polybus."""
    with pytest.raises(flight.FlightError):
        put_nothing(client, flight.FlightDescriptor.for_path(*path), SHORT)


@pytest.mark.parametrize("name", ["", "_own", "a,b", "a*", "a\n", "x" * 256])
def test_invalid_topic_name_is_refused(client, name):
    assert refused_put(client, SHORT, "produce", name) == "invalid_topic"
    assert refused(client, "topic.create", topic=name) == "invalid_topic"
    assert name not in {one["topic"] for one in act(client, "topic.list")["topics"]}


def batch(*messages: bytes | None, keys: list[str | None] | None = None) -> pa.RecordBatch:
    columns = [pa.array(keys or [None] * len(messages), pa.utf8()), pa.array(messages, pa.binary())]
    return pa.record_batch(columns, schema=SHORT)


def broken_offsets() -> pa.RecordBatch:
    """The first message ends after the end of the data; Arrow itself checks only the last one."""
    offsets = pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x7f\3\0\0\0")
    body = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"abc")])
    return pa.RecordBatch.from_arrays([pa.nulls(2, pa.utf8()), body], schema=SHORT)


def no_text() -> pa.RecordBatch:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0")
    key = pa.Array.from_buffers(pa.utf8(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    return pa.RecordBatch.from_arrays([key, pa.array([b"x"])], schema=SHORT)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (lambda: batch(b"a", None), "malformed_request"),
        (lambda: batch(), "malformed_request"),
        (broken_offsets, "malformed_request"),
        (no_text, "malformed_request"),
        (lambda: batch(*([b"x" * MIB] * 129)), "too_large"),
    ],
    ids=["null body", "no rows", "offsets", "key", "too large"],
)
def test_refused_batch_does_not_end_the_stream(client, made, code):
    act(client, "topic.create", topic=f"wrong {code} {id(made)}", shards=3)
    name = f"wrong {code} {id(made)}"
    assert put_codes(client, ["produce", name], [batch(b"1"), made(), batch(b"2")]) == [
        None, code, None,
    ]  # fmt: skip
    assert bodies(client, topic=name) == [b"1", b"2"]


STAMPS = [
    b"{",
    b"[]",
    b"1",
    b"null",
    b"{}",
    b"\xff",
    "{}".encode("utf-16"),
    b"[" * 3000,
    b'{"a":' * 800 + b"1" + b"}" * 800,
    b" " * 5000,
    b'{"producer": "p", "epoch": 1}',
    b'{"producer": 7, "epoch": 1, "counter": 1}',
    b'{"producer": "p", "epoch": 0, "counter": 1}',
    b'{"producer": "p", "epoch": true, "counter": 1}',
    b'{"producer": "p", "epoch": 1, "counter": 1.0}',
    b'{"producer": "p", "epoch": 1, "counter": -1}',
    b'{"producer": "p", "epoch": 1, "counter": 9223372036854775808}',
    b'{"producer": "p", "epoch": 1, "counter": ' + b"9" * 4000 + b"}",
    b'{"producer": "p", "epoch": NaN, "counter": 1}',
    b'{"producer": "\\ud800", "epoch": 1, "counter": 1}',
    b'{"producer": "", "epoch": 1, "counter": 1}',
    b'{"producer": "' + b"p" * 300 + b'", "epoch": 1, "counter": 1}',
    b'{"producer": "p", "epoch": 1, "counter": 1, "digest": "x"}',
]


def test_invalid_stamp_is_refused(client, topic):
    writer, reader = client.do_put(flight.FlightDescriptor.for_path("produce", topic), SHORT)
    for stamp in STAMPS:
        writer.write_with_metadata(batch(b"x"), stamp)
        answer = json.loads(reader.read().to_pybytes())
        assert answer["error"]["code"] == "malformed_request", stamp[:60]
    writer.write_with_metadata(batch(b"x"), b'{"producer": "p?", "epoch": 1, "counter": 1}')
    assert json.loads(reader.read().to_pybytes())["error"]["code"] == "unknown_producer"
    writer.write_metadata(b"{}")  # and no batch
    assert json.loads(reader.read().to_pybytes())["error"]["code"] == "malformed_request"
    writer.close()


def test_staged_batch_with_a_stamp_is_refused(client, topic):
    act(client, "producer.open", producer=topic)
    stage = act(client, "stage.new")["stage"]
    stamp = {"producer": topic, "epoch": 1, "counter": 1}
    assert put_codes(client, ["stage", stage, topic], [batch(b"x")], stamp) == ["malformed_request"]
    assert put_codes(client, ["stage", "no such", topic], [batch(b"x")]) == ["stage_gone"]
    assert act(client, "stage.publish", stages=[stage])["spans"] == []


# --- actions


BODIES = [
    b"{",
    b"[]",
    b'"x"',
    b"7",
    b"\xff\xfe",
    "{}".encode("utf-16"),
    b'{"topic": }',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"1" * 10_000,
    b" " * (5 * MIB),
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_body_that_is_not_a_json_object_is_refused(client, body):
    for name in ("topic.info", "wait", "stats"):
        with pytest.raises(flight.FlightError) as caught:
            list(client.do_action(flight.Action(name, body)))
        assert code_of(caught.value) == "malformed_request"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("nonsense", {}),
        ("", {}),
        ("topic", {}),
        ("TOPIC.LIST", {}),
        ("x" * 100_000, {}),
        ("topic.info", {}),
        ("topic.info", {"topic": 7}),
        ("topic.info", {"topic": None}),
        ("topic.info", {"topic": "t", "more": 1}),
        ("topic.info", {"topic": ["t"]}),
        ("topic.info", {"topic": "\ud800"}),
        ("topic.create", {"topic": "t", "shards": -1}),
        ("topic.create", {"topic": "t", "shards": 2.0}),
        ("topic.create", {"topic": "t", "shards": True}),
        ("topic.create", {"topic": "t", "shards": 4097}),
        ("topic.create", {"topic": "t", "shards": 2**64}),
        ("topic.create", {"topic": "t", "settings": []}),
        ("topic.create", {"topic": "t", "settings": {"creator": {"uid": 0}}}),
        ("topic.create", {"topic": "t", "settings": {"keep": ["all"]}}),
        ("topic.create", {"topic": "t", "settings": {"max_bytes": -1}}),
        ("topic.list", {"pattern": 3}),
        ("topic.trim", {"topic": "there", "before": {"x": 1}}),
        ("topic.trim", {"topic": "there", "before": {"-1": 1}}),
        ("topic.trim", {"topic": "there", "before": {"0": -1}}),
        ("topic.trim", {"topic": "there", "before": {"0": "1"}}),
        ("topic.trim", {"topic": "there", "before": [1]}),
        ("find", {"topic": "there", "timestamp_ns": -1}),
        ("find", {"topic": "there", "timestamp_ns": 1, "shard": "some"}),
        ("find", {"topic": "there", "timestamp_ns": 1, "shard": -1}),
        ("find", {"topic": "there", "timestamp_ns": 1, "shard": {}}),
        ("wait", {"positions": {}}),
        ("wait", {"positions": [1]}),
        ("wait", {"positions": [{}]}),
        ("wait", {"positions": [{"topic": "there", "shard": 0}]}),
        ("wait", {"positions": [{"topic": "there", "shard": 9, "offset": 0}]}),
        ("wait", {"positions": [{"topic": "there", "shard": "all", "offset": 0}]}),
        ("wait", {"positions": [{"topic": "there", "shard": 0, "offset": -1}]}),
        ("wait", {"positions": [{"topic": 5, "shard": 0, "offset": 0}]}),
        ("wait", {"positions": [], "timeout_ms": "x"}),
        ("producer.open", {"producer": "p" * 256}),
        ("producer.open", {"producer": "\ud800"}),
        ("producer.open", {"dense": 1}),
        ("producer.open", {"kept_results": 0}),
        ("producer.open", {"kept_results": 1025}),
        ("producer.close", {"producer": "p"}),
        ("stage.new", {"lease_s": 0}),
        ("stage.new", {"lease_s": float("nan")}),
        ("stage.new", {"lease_s": float("inf")}),
        ("stage.new", {"lease_s": 10**9}),
        ("stage.publish", {"stages": "x"}),
        ("stage.publish", {"stages": [7]}),
        ("stage.publish", {"stages": [], "stamp": {"producer": "p"}}),
        ("acl.add", {"rule": 7}),
        ("acl.test", {"who": "anonymous", "action": "produce"}),
    ],
    ids=str,
)
def test_malformed_request_is_refused(client, name, fields):
    if not act(client, "topic.list", pattern="there")["topics"]:
        act(client, "topic.create", topic="there", shards=1)
    assert refused(client, name, **fields) == "malformed_request"
    assert act(client, "topic.list", pattern="t")["topics"] == []


def test_unknown_shard_is_refused(client, topic):
    assert refused(client, "topic.trim", topic=topic, before={"5": 1}) == "usage"
    assert refused(client, "find", topic=topic, shard=5, timestamp_ns=1) == "usage"


def test_wait_for_too_many_shards_is_refused(client, topic):
    places = [{"topic": topic, "shard": 0, "offset": 0}] * 16_385
    assert refused(client, "wait", positions=places) == "limit_reached"
    assert refused(client, "wait", positions=[]) == "limit_reached"


# --- tickets


TICKETS = [
    b"",
    b"{",
    b"topic",
    b"[]",
    b"\xff",
    b"[" * 60_000,
    b" " * 100_000,
    b'{"topic": 7}',
    b'{"topic": "there", "from": -1}',
    b'{"topic": "there", "from": "x"}',
    b'{"topic": "there", "to": 1.5}',
    b'{"topic": "there", "shard": "none"}',
    b'{"topic": "there", "shard": 99}',
    b'{"topic": "there", "max_rows": -1}',
    b'{"topic": "there", "wait_ms": 1e9}',
    b'{"topic": "there", "more": 1}',
]


@pytest.mark.parametrize("ticket", TICKETS, ids=range(len(TICKETS)))
def test_malformed_ticket_is_refused(client, ticket):
    if not act(client, "topic.list", pattern="there")["topics"]:
        act(client, "topic.create", topic="there", shards=1)
    with pytest.raises(flight.FlightError) as caught:
        client.do_get(flight.Ticket(ticket)).read_all()
    assert code_of(caught.value) == "malformed_request"


def test_missing_topic_does_not_exist(client):
    with pytest.raises(flight.FlightError) as caught:
        read(client, topic="missing")
    assert code_of(caught.value) == "does_not_exist"
    for name in ("topic.info", "topic.drop", "topic.stats", "bounds"):
        assert refused(client, name, topic="missing") == "does_not_exist"
    assert act(client, "topic.list", pattern="missing*")["topics"] == []


@pytest.mark.parametrize("name", ["x" * 100_000, "\N{GRINNING FACE}" * 5000])
def test_error_with_a_long_text_keeps_its_code(client, name):
    """Clients of gRPC take no status of that size."""
    assert refused(client, "topic.info", topic=name) == "does_not_exist"


def test_unsupported_flight_calls_are_refused(client):
    with pytest.raises((flight.FlightError, NotImplementedError)):
        client.get_flight_info(flight.FlightDescriptor.for_path("t"))
    with pytest.raises((flight.FlightError, NotImplementedError)):
        list(client.list_flights())
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("t"))
    writer.done_writing()
    with pytest.raises((flight.FlightError, NotImplementedError)):
        reader.read_chunk()
