"""The native port as any Arrow Flight client sees it: from docs/spec/native.md, without ours."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from polybus.testing.bus_process import BusProcess, serve

SCHEMA = pa.schema(
    [
        ("shard_key", pa.utf8()),
        ("body", pa.binary()),
        ("insertion_ms", pa.int64()),
        ("headers", pa.map_(pa.utf8(), pa.binary())),
    ]
)
SHORT = pa.schema([("shard_key", pa.utf8()), ("body", pa.binary())])


@pytest.fixture(scope="module")
def bus() -> Iterator[BusProcess]:
    with serve(listen=("native=grpc://127.0.0.1:0", "rqueue=tcp://127.0.0.1:0")) as running:
        yield running


@pytest.fixture
def client(bus) -> Iterator[flight.FlightClient]:
    address = bus.address("native")
    with flight.connect(f"grpc://{address.host}:{address.port}") as connected:
        yield connected


@pytest.fixture
def topic(client, request) -> str:
    """A topic of one shard, named after the test."""
    name = request.node.name[5:200].replace("*", "")
    act(client, "topic.create", topic=name, shards=1)
    return name


def act(client, name: str, **fields):
    (result,) = client.do_action(flight.Action(name, json.dumps(fields).encode()))
    return json.loads(result.body.to_pybytes())


def refused(client, name: str, **fields) -> str:
    """The code of the error that an action ends with."""
    with pytest.raises(flight.FlightError) as caught:
        act(client, name, **fields)
    return code_of(caught.value)


def code_of(error: flight.FlightError) -> str:
    details = json.loads(error.extra_info)
    assert set(details) == {"code", "text"}
    assert details["text"]
    return details["code"]


class Put:
    """One long stream."""

    def __init__(self, client, *path: str, schema: pa.Schema = SHORT) -> None:
        self._schema = schema
        descriptor = flight.FlightDescriptor.for_path(*path)
        self.writer, self.reader = client.do_put(descriptor, schema)

    def send(self, bodies, keys=None, stamp=None) -> None:
        keys = keys or [None] * len(bodies)
        batch = pa.record_batch(
            [pa.array(keys, pa.utf8()), pa.array(bodies, pa.binary())], schema=self._schema
        )
        self.write(batch, stamp)

    def write(self, batch, stamp=None) -> None:
        if stamp is None:
            self.writer.write_batch(batch)
        else:
            self.writer.write_with_metadata(batch, json.dumps(stamp).encode())

    def answer(self):
        return json.loads(self.reader.read().to_pybytes())

    def close(self) -> None:
        self.writer.done_writing()
        assert self.reader.read() is None
        self.writer.close()


def produce(client, topic: str, *bodies: bytes, **kept):
    put = Put(client, "produce", topic)
    put.send(list(bodies), **kept)
    answer = put.answer()
    put.close()
    return answer


def read(client, **ticket) -> pa.Table:
    return client.do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()


def bodies(client, **ticket) -> list[bytes]:
    return read(client, **ticket).column("body").to_pylist()


# --- producing


def test_batches_are_answered_in_order(client, topic):
    put = Put(client, "produce", topic)
    for number in range(100):
        put.send([b"%d" % number, b"+"])
    answers = [put.answer() for _ in range(100)]
    put.close()
    assert answers == [
        {"counter": None, "first_id": 2 * n + 1, "last_id": 2 * n + 2, "duplicate": False}
        for n in range(100)
    ]
    assert bodies(client, topic=topic)[::2] == [b"%d" % number for number in range(100)]


def test_read_returns_all_columns(client, topic):
    headers = [[("a", b"1"), ("a", b"2")], None]
    batch = pa.record_batch([["k", None], [b"x", b""], [7, None], headers], schema=SCHEMA)
    put = Put(client, "produce", topic, schema=SCHEMA)
    put.write(batch)
    assert put.answer()["last_id"] == 2
    put.close()
    found = read(client, topic=topic)
    assert found.schema.names == [
        "id", "shard", "offset", "timestamp_ns", "insertion_ms", "shard_key", "body", "headers",
    ]  # fmt: skip
    kinds = [pa.int64(), pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.utf8(), pa.binary()]
    assert found.schema.types[:7] == kinds
    first, second = found.to_pylist()
    assert (first["id"], first["shard"], first["offset"]) == (1, 0, 0)
    assert (first["shard_key"], first["body"], first["insertion_ms"]) == ("k", b"x", 7)
    assert first["headers"] == headers[0]
    assert (second["shard_key"], second["body"], second["headers"]) == (None, b"", None)
    assert abs(second["insertion_ms"] - second["timestamp_ns"] // 10**6) < 10**6


def test_producing_creates_the_topic(client):
    assert produce(client, "made by producing", b"x")["first_id"] == 1
    info = act(client, "topic.info", topic="made by producing")
    assert info["shards"] == 16
    assert info["next_id"] == 2


def test_key_always_goes_to_the_same_shard(client):
    act(client, "topic.create", topic="keyed", shards=5)
    keys = [f"k{number % 20}" for number in range(200)]
    produce(client, "keyed", *(b"%d" % n for n in range(200)), keys=keys)
    found = read(client, topic="keyed").to_pylist()
    assert sorted(int(row["body"]) for row in found) == list(range(200))
    shards = {key: {row["shard"] for row in found if row["shard_key"] == key} for key in keys}
    assert all(len(one) == 1 for one in shards.values())
    assert len(set.union(*shards.values())) > 1
    for number in range(5):
        offsets = [row["offset"] for row in found if row["shard"] == number]
        assert offsets == list(range(len(offsets)))


# --- stamps


def test_stamps_repeats_gaps_and_fencing(client, topic):
    opened = act(client, "producer.open", producer=topic)
    assert opened == {"producer": topic, "epoch": 1, "last_counter": 0}

    def stamp(counter, epoch=1):
        return {"producer": topic, "epoch": epoch, "counter": counter}

    put = Put(client, "produce", topic)
    put.send([b"a"], stamp=stamp(1))
    put.send([b"b", b"c"], stamp=stamp(2))
    assert put.answer() == {"counter": 1, "first_id": 1, "last_id": 1, "duplicate": False}
    assert put.answer() == {"counter": 2, "first_id": 2, "last_id": 3, "duplicate": False}
    put.send([b"b", b"c"], stamp=stamp(2))
    assert put.answer() == {"counter": 2, "first_id": 2, "last_id": 3, "duplicate": True}
    put.send([b"e"], stamp=stamp(4))
    assert put.answer()["error"]["code"] == "out_of_sequence"
    put.send([b"d"], stamp=stamp(3))  # a refusal has used up nothing, and ends nothing
    assert put.answer()["first_id"] == 4
    assert act(client, "producer.open", producer=topic) == {
        "producer": topic,
        "epoch": 2,
        "last_counter": 3,
    }
    put.send([b"x"], stamp=stamp(4))
    assert put.answer()["error"]["code"] == "fenced"
    put.send([b"d"], stamp=stamp(3, epoch=2))
    assert put.answer() == {"counter": 3, "first_id": 4, "last_id": 4, "duplicate": True}
    put.close()
    assert bodies(client, topic=topic) == [b"a", b"b", b"c", b"d"]


def test_producer_with_gaps_and_few_kept_results(client, topic):
    opened = act(client, "producer.open", dense=False, kept_results=1)
    name = opened["producer"]
    put = Put(client, "produce", topic)
    for counter in (5, 9):
        put.send([b"%d" % counter], stamp={"producer": name, "epoch": 1, "counter": counter})
        assert put.answer()["duplicate"] is False
    put.send([b"5"], stamp={"producer": name, "epoch": 1, "counter": 5})
    assert put.answer()["error"]["code"] == "stale"
    put.close()


def test_closed_producer_is_deleted(client, topic):
    act(client, "producer.open", producer=topic)
    assert refused(client, "producer.close", producer=topic, epoch=9) == "fenced"
    assert act(client, "producer.close", producer=topic, epoch=1) == {}
    assert refused(client, "producer.close", producer=topic, epoch=1) == "unknown_producer"
    stamp = {"producer": topic, "epoch": 1, "counter": 1}
    assert produce(client, topic, b"x", stamp=stamp)["error"]["code"] == "unknown_producer"
    assert act(client, "producer.open", producer=topic)["epoch"] == 1


# --- reading


def test_ranges_of_ids_and_of_offsets(client):
    act(client, "topic.create", topic="ranges", shards=2)
    for number in range(10):
        produce(client, "ranges", b"%d" % number)  # without a key: one shard after the other
    everything = read(client, topic="ranges", shard="all")
    assert everything.column("id").to_pylist() == list(range(1, 11))
    some = read(client, topic="ranges", **{"from": 3, "to": 6})
    assert some.column("id").to_pylist() == [3, 4, 5]
    shard = read(client, topic="ranges", shard=1, **{"from": 1, "to": 3})
    assert shard.column("offset").to_pylist() == [1, 2]
    assert set(shard.column("shard").to_pylist()) == {1}
    assert read(client, topic="ranges", **{"from": 11}).num_rows == 0
    assert read(client, topic="ranges", **{"from": 500}).num_rows == 0
    assert read(client, topic="ranges", **{"from": 5, "to": 5}).num_rows == 0


def test_bounds_in_rows_and_bytes(client, topic):
    produce(client, topic, *([b"x" * 100] * 50))
    assert read(client, topic=topic, max_rows=7).num_rows == 7
    assert 1 <= read(client, topic=topic, max_bytes=1000).num_rows <= 11
    assert read(client, topic=topic, max_bytes=1).num_rows == 1
    assert read(client, topic=topic, max_rows=1000, max_bytes=10**6).num_rows == 50


def test_read_of_some_columns(client, topic):
    produce(client, topic, b"x", b"y", keys=["k", None])
    found = read(client, topic=topic, columns=["body", "offset", "body"])
    assert found.to_pydict() == {"offset": [0, 1], "body": [b"x", b"y"]}
    assert found.schema.names == ["offset", "body"]
    assert read(client, topic=topic, columns=["shard_key"]).to_pydict() == {
        "shard_key": ["k", None]
    }


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (["bodies"], "got 'bodies'"),
        ([], "got none"),
        ("body", "a list"),
        ([1], "a list"),
    ],
)
def test_unknown_columns_are_refused(client, topic, columns, why):
    with pytest.raises(flight.FlightError, match=why) as refused:
        read(client, topic=topic, columns=columns)
    assert code_of(refused.value) == "malformed_request"


def test_waiting_read_returns_new_messages(client, topic):
    ticket = {"topic": topic, "wait_ms": 20_000, "to": 4}
    stream = client.do_get(flight.Ticket(json.dumps(ticket).encode()))
    produce(client, topic, b"1")
    assert stream.read_chunk().data.column("body").to_pylist() == [b"1"]
    produce(client, topic, b"2", b"3", b"4")
    assert stream.read_chunk().data.column("body").to_pylist() == [b"2", b"3"]
    with pytest.raises(StopIteration):
        stream.read_chunk()


def test_read_ends_after_wait_without_messages(client, topic):
    produce(client, topic, b"1")
    assert bodies(client, topic=topic, wait_ms=50) == [b"1"]


def test_trimming(client):
    act(client, "topic.create", topic="trimmed", shards=2)
    for number in range(10):
        produce(client, "trimmed", b"%d" % number)
    after = act(client, "topic.trim", topic="trimmed", before={"0": 4})
    assert [shard["start"] for shard in after["shards"]] == [4, 0]
    assert len(bodies(client, topic="trimmed", **{"from": 1})) == 6  # all: passes over them
    with pytest.raises(flight.FlightError) as caught:
        read(client, topic="trimmed", shard=0, **{"from": 0})
    assert code_of(caught.value) == "trimmed"
    act(client, "topic.trim", topic="trimmed", before={"0": 99, "1": 99})
    assert bodies(client, topic="trimmed", **{"from": 1}) == []
    assert produce(client, "trimmed", b"new")["first_id"] == 11
    assert bodies(client, topic="trimmed", wait_ms=50, **{"from": 1}) == [b"new"]


# --- stages


def test_staged_batches_are_invisible_until_published(client, topic):
    act(client, "topic.create", topic=f"{topic} 2", shards=1)
    stage = act(client, "stage.new")["stage"]
    for name in (topic, f"{topic} 2"):
        put = Put(client, "stage", stage, name)
        put.send([b"a"])
        put.send([b"b"])
        assert [put.answer(), put.answer()] == [{"counter": None}] * 2
        put.close()
    assert bodies(client, topic=topic) == []
    assert act(client, "stage.renew", stage=stage, lease_s=60) == {}
    act(client, "producer.open", producer=topic)
    stamp = {"producer": topic, "epoch": 1, "counter": 1}
    done = act(client, "stage.publish", stages=[stage], stamp=stamp)
    spans = [
        {"topic": name, "shard": 0, "first_offset": 0, "first_id": 1, "count": 2}
        for name in (topic, f"{topic} 2")
    ]
    assert sorted(done["spans"], key=lambda one: one["topic"]) == spans
    assert done["duplicate"] is False
    again = act(client, "stage.publish", stages=[stage], stamp=stamp)
    assert again["duplicate"] is True
    assert again["timestamp_ns"] == done["timestamp_ns"]
    assert bodies(client, topic=topic) == bodies(client, topic=f"{topic} 2") == [b"a", b"b"]
    assert refused(client, "stage.publish", stages=[stage]) == "stage_gone"


def test_discarded_stage_is_gone(client, topic):
    stage = act(client, "stage.new", lease_s=30)["stage"]
    put = Put(client, "stage", stage, topic)
    put.send([b"a"])
    put.answer()
    assert act(client, "stage.discard", stage=stage) == {}
    put.send([b"b"])
    assert put.answer()["error"]["code"] == "stage_gone"
    put.close()
    assert refused(client, "stage.publish", stages=[stage]) == "stage_gone"
    assert refused(client, "stage.renew", stage=stage) == "stage_gone"
    assert act(client, "stage.discard", stage=stage) == {}
    assert bodies(client, topic=topic) == []


def test_stamp_voided_by_an_empty_publish(client, topic):
    act(client, "producer.open", producer=topic)
    stamp = {"producer": topic, "epoch": 1, "counter": 1}
    assert act(client, "stage.publish", stages=[], stamp=stamp)["spans"] == []
    answer = produce(client, topic, b"x", stamp=stamp)
    assert answer == {"counter": 1, "first_id": None, "last_id": None, "duplicate": True}
    assert bodies(client, topic=topic) == []


# --- topics


def test_topic_is_created_configured_and_dropped(client):
    made = act(client, "topic.create", topic="life", shards=2, settings={"max_bytes": 10_000})
    assert (made["topic"], made["shards"], made["generations"]) == ("life", 2, [2])
    assert made["settings"] == {"keep": "all", "max_bytes": 10_000}
    assert refused(client, "topic.create", topic="life") == "already_exists"
    produce(client, "life", b"1")
    info = act(client, "topic.info", topic="life")
    assert (info["first_id"], info["next_id"], info["shards"]) == (1, 2, 2)
    assert info["creator"] == made["creator"]
    listed = act(client, "topic.list", pattern="li*")["topics"]
    assert [one["topic"] for one in listed] == ["life"]
    stats = act(client, "topic.stats", topic="life")
    assert stats["all"]["inserted"] == 1
    assert [shard["inserted"] for shard in stats["shards"]] in ([1, 0], [0, 1])
    changed = act(client, "topic.configure", topic="life", settings={})
    assert changed["settings"] == {"keep": "all", "max_bytes": 0}
    assert changed["creator"] == made["creator"]
    wider = act(client, "topic.reshard", topic="life", shards=4)
    assert (wider["shards"], wider["generation"], wider["generations"]) == (4, 2, [2, 4])
    assert act(client, "topic.reshard", topic="life", shards=4) == wider  # a repeat
    assert refused(client, "topic.reshard", topic="life", shards=513) == "malformed_request"
    assert act(client, "topic.drop", topic="life") == {}
    for action in ("topic.info", "topic.stats", "topic.drop", "bounds"):
        assert refused(client, action, topic="life") == "does_not_exist"
    assert produce(client, "life", b"again")["first_id"] == 2  # ids are never reused


def test_full_topic_refuses_batches(client):
    act(client, "topic.create", topic="full", shards=1, settings={"max_bytes": 5000})
    put = Put(client, "produce", "full")
    answers = []
    for _ in range(10):
        put.send([b"x" * 1000])
        answers.append(put.answer())
    put.close()
    errors = [one["error"]["code"] for one in answers if "error" in one]
    assert errors
    assert set(errors) == {"limit_reached"}
    assert len(bodies(client, topic="full")) == 10 - len(errors)
    assert act(client, "bounds", topic="full")["shards"][0]["bytes"] <= 5000


def test_bounds_and_find(client, topic):
    produce(client, topic, b"1")
    produce(client, topic, b"2")
    bounds = act(client, "bounds", topic=topic)
    assert (bounds["first_id"], bounds["next_id"]) == (1, 3)
    (shard,) = bounds["shards"]
    assert (shard["shard"], shard["start"], shard["end"]) == (0, 0, 2)
    assert shard["bytes"] > 0
    rows = read(client, topic=topic).to_pylist()

    def find(shard, timestamp_ns):
        found = act(client, "find", topic=topic, shard=shard, timestamp_ns=timestamp_ns)
        return found["position"]

    assert (find("all", 0), find(0, 0)) == (1, 0)
    assert find("all", rows[1]["timestamp_ns"]) in (1, 2)
    assert find(0, rows[1]["timestamp_ns"] + 1) == 2
    assert bounds["timestamp_ns"] == rows[1]["timestamp_ns"]


# --- waiting


def test_one_wait_over_many_shards_of_several_topics(bus, client, topic):
    act(client, "topic.create", topic=f"{topic} 2", shards=8)
    places = [{"topic": topic, "shard": 0, "offset": 0}] + [
        {"topic": f"{topic} 2", "shard": shard, "offset": 0} for shard in range(8)
    ]
    assert act(client, "wait", positions=places, timeout_ms=10) == {"news": []}
    found: list[object] = []
    waiter = threading.Thread(
        target=lambda: found.append(act(client, "wait", positions=places, timeout_ms=20_000))
    )
    waiter.start()
    produce(client, f"{topic} 2", b"x", keys=["k"])
    waiter.join()
    row = read(client, topic=f"{topic} 2").to_pylist()[0]
    assert found == [{"news": [{"topic": f"{topic} 2", "shard": row["shard"], "end": 1}]}]
    again = act(client, "wait", positions=places)
    assert [again] == found  # messages that are already there are news


# --- the rest


def test_rules_of_a_topic(client, topic):
    rule = f"deny user:4242 produce {topic}"
    assert act(client, "acl.add", rule=rule)["changed"] is True
    assert [one["rule"] for one in act(client, "acl.ls", topic=topic)["rules"]] == [rule]
    tested = act(client, "acl.test", who="user:4242", action="produce", topic=topic)
    assert (tested["allowed"], tested["rule"]) == (False, rule)
    assert act(client, "acl.rm", rule=rule)["changed"] is True
    assert refused(client, "acl.rm", rule=rule) == "does_not_exist"
    assert refused(client, "acl.add", rule="nonsense") == "invalid_rule"


def test_stats_and_the_list_of_actions(client, bus):
    assert act(client, "stats")["server"]["pid"] == bus.pid
    listed = {action.type: action.description for action in client.list_actions()}
    assert {"producer.open", "topic.create", "bounds", "find", "wait", "stage.new"} <= set(listed)
    assert all(listed.values())
