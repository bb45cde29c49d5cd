"""A topic that is resharded while clients of all dialects use it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pytest

from polybus import fdq
from polybus.cli import main
from polybus.errors import Conflict
from polybus.native import Client
from polybus.testing.bus_process import POLYBUS
from tests.rig import freud_client, rqueue_client
from tests.rig.observer import until
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.zmq_client import Bare

WAIT_S = 30
LISTEN = ("rqueue=tcp://127.0.0.1:0", "native=grpc://127.0.0.1:0", "freud=unix:{}/freud.sock")


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bus", numbered=True)
    with PirateBus(listen=[one.format(folder) for one in LISTEN]) as one:
        yield one


@pytest.fixture
def url(bus):
    address = bus.process.address("native")
    return f"polybus://{address.host}:{address.port}"


@pytest.fixture
def native(url):
    with Client(url) as client:
        yield client


@pytest.fixture
def polybus(url, monkeypatch, capsys):
    monkeypatch.setenv("POLYBUS_URL", url)

    def call(*args: str, code: int = 0) -> str:
        assert main.run(args) == code, capsys.readouterr()
        out, err = capsys.readouterr()
        return out if code == 0 else err

    return call


def test_readers_of_all_dialects_go_through_reshards(bus, native, url):
    native.create_topic("shared", shards=1)
    process = bus.process
    with (
        Bare(bus.endpoint, b"reader") as pirate,
        rqueue_client.connect(process.address("rqueue")) as rqueue,
        rqueue_client.connect(process.address("rqueue")) as reader,
        freud_client.connect(process.address("freud")) as freud,
        native.producer() as producer,
    ):
        pirate.hello()
        pirate.sub("shared")
        reader.send(rqueue_client.subscribe(b"shared"))
        reader.settle()
        freud.send(freud_client.subscribe(b"shared"))
        (subscribed,) = freud.answers(1)
        sent = 0
        for shards in (3, 1, 8, 2):
            pirate.put("shared", b"pirate %d" % shards)
            freud.send(freud_client.produce(b"shared", b"freud %d" % shards))
            assert freud.answers(1)[0].code == freud_client.OK
            rqueue.send(rqueue_client.publish(b"shared", b"rqueue %d" % shards))
            bodies = [b"native %d" % at for at in range(5)]
            producer.produce("shared", bodies, keys=[f"k{at}" for at in range(5)]).result(WAIT_S)
            sent += 8
            until(lambda: native.bounds("shared")["next_id"] > sent, "all are stored")  # noqa: B023
            assert native.reshard("shared", shards)["shards"] == shards
        pirate.put("shared", b"last")
        sent += 1
        log = [
            body
            for batch in native.read("shared", max_rows=sent, wait_s=WAIT_S)
            for body in batch.column("body").to_pylist()
        ]
        assert len(log) == sent
        assert [body for _, body in reader.messages(sent)] == log
        freud.send(*(freud_client.get(subscribed.payload, WAIT_S) for _ in log))
        assert [one.payload for one in freud.answers(sent)] == log
        found = []
        while (answer := pirate.get("shared"))[0] == "MSG":
            found.append(answer[2])
        assert found == log
    with fdq.replay(url, "shared") as replay:
        envelopes = list(replay)
    assert [one.message for one in envelopes] == log
    # The index of a shard starts again with each generation.
    assert {one.shard: one.shard_index for one in envelopes}[4] == 0


def test_waiting_read_gets_messages_of_new_shards(native):
    native.create_topic("followed", shards=1)
    found: list[bytes] = []

    def follow() -> None:
        for batch in native.read("followed", max_rows=2, wait_s=WAIT_S):
            found.extend(batch.column("body").to_pylist())

    with ThreadPoolExecutor(1) as pool, native.producer() as producer:
        following = pool.submit(follow)
        producer.produce("followed", [b"before"]).result(WAIT_S)
        until(lambda: found == [b"before"], "the first message is read")
        native.reshard("followed", 3)
        producer.produce("followed", [b"after"], keys=["k"]).result(WAIT_S)
        following.result(WAIT_S)
    assert found == [b"before", b"after"]


def test_consumers_keep_the_order_of_keys_over_reshards(url, native):
    """Consumers are slower than the producer, so every reshard finds a backlog."""
    native.create_topic("ordered", shards=2)
    keys, turns = 16, 120
    handled: dict[str | None, list[int]] = defaultdict(list)
    done = threading.Event()

    def handle(envelope: fdq.Envelope) -> None:
        handled[envelope.shard_key].append(int(envelope.message))
        if sum(map(len, handled.values())) == keys * turns:
            done.set()

    producer = fdq.Producer(url, name="orders")
    consumers = [fdq.Consumer(url) for _ in range(3)]
    try:
        for number, consumer in enumerate(consumers):
            consumer.consume("ordered", f"c{number}", handle, executors=2)
        sizes = iter((5, 3, 8, 1, 4))
        for turn in range(turns):
            batch = [fdq.MessageRequest(f"k{key}", b"%d" % turn) for key in range(keys)]
            producer.produce_batch("ordered", batch)
            if turn % 25 == 10:
                until(partial(reshard, native, next(sizes)), "the group has drained")
        assert done.wait(WAIT_S)
    finally:
        for consumer in consumers:
            consumer.close()
        producer.close()
    assert dict(handled) == {f"k{key}": list(range(turns)) for key in range(keys)}
    assert native.topic("ordered")["draining"] == {}


def reshard(client: Client, shards: int) -> bool:
    try:
        client.reshard("ordered", shards)
    except Conflict:
        return False
    return True


def test_commands(polybus, native, url):
    native.create_topic("commands", shards=2)
    with native.producer() as producer:
        producer.produce("commands", [b"a", b"b"], keys=["é", "a"]).result(WAIT_S)
    joined = native.act("group.join", topic="commands", group="billing", consumer="c")
    shown = polybus("topic", "reshard", "commands", "--shards", "4")
    assert "commands has 4 shards (2 to 5), generation 2" in shown
    assert "draining: group billing has 2 shards (0, 1)" in shown
    assert "billing has 2 shards (0, 1)" in polybus("topic", "info", "commands")
    info = json.loads(polybus("topic", "info", "commands", "--json"))
    assert (info["generation"], info["generations"]) == (2, [2, 4])
    assert info["draining"] == {"billing": [0, 1]}
    refused = polybus("topic", "reshard", "commands", "--shards", "8", code=4)
    assert "commands is still draining: group billing has 2 shards (0, 1)" in refused
    polybus("topic", "reshard", "commands", "--shards", "4")  # a repeat changes nothing
    member = {"topic": "commands", "group": "billing", "consumer": "c", "epoch": joined["epoch"]}
    answer, _ = native.fetch(**member, held=[], max_rows=10)
    acks = [
        {"shard": one["shard"], "epoch": one["epoch"], "acked": [[0, one["end"]]]}
        for one in answer["assigned"]
    ]
    native.act("group.ack", **member, shards=acks)
    assert fdq.reshard(url, "commands", 8)["generation"] == 3
    assert json.loads(polybus("topic", "info", "commands", "--json"))["draining"] == {}
    polybus("topic", "reshard", "commands", "--shards", "0", code=2)


def test_group_info_shows_the_phases(polybus, native):
    native.create_topic("phases", shards=1)
    with native.producer() as producer:
        producer.produce("phases", [b"a"]).result(WAIT_S)
    native.act("group.join", topic="phases", group="g", consumer="c")
    native.reshard("phases", 2)
    info = native.act("group.info", topic="phases", group="g")
    assert [shard["phase"] for shard in info["shards"]] == ["active", "waiting", "waiting"]
    shown = [line.split()[:3] for line in polybus("group", "info", "phases", "g").splitlines()]
    assert ["shard", "0", "c"] in shown
    assert ["shard", "2", "waiting"] in shown


def test_messages_without_a_key_reach_all_consumers(url, native):
    native.create_topic("jobs")
    counts = {"a": 0, "b": 0}
    consumers = [fdq.Consumer(url) for _ in counts]
    for name, consumer in zip(counts, consumers, strict=True):

        def count(batch: pa.RecordBatch, name: str = name) -> None:
            counts[name] += batch.num_rows

        consumer.consume("jobs", name, count, batch=True)
    until(lambda: spread(native) == {"a": 8, "b": 8}, "the consumers share the shards")
    lines = b"".join(b"%d\n" % number for number in range(20_000))
    command = [*POLYBUS, "fdq", "produce", "jobs"]
    subprocess.run(command, input=lines, env={**os.environ, "POLYBUS_URL": url}, check=True)
    until(lambda: sum(counts.values()) >= 20_000, "all are handled")
    for consumer in consumers:
        consumer.close()
    assert min(counts.values()) >= 8_000, counts


def spread(client: Client) -> dict[str, int]:
    """Return the number of shards of each member."""
    members = client.act("group.info", topic="jobs", group="default")["members"]
    return {member["consumer"]: len(member["shards"]) for member in members}
