"""Pirate and the other dialects on one durable topic."""

from __future__ import annotations

import json

import pytest

from polybus.native import Client
from tests.rig import freud_client, rqueue_client
from tests.rig.observer import until
from tests.rig.pirate.pirate_bus import PirateBus
from tests.rig.pirate.zmq_client import Bare

WAIT_S = 20
LISTEN = ("rqueue=tcp://127.0.0.1:0", "native=grpc://127.0.0.1:0", "freud=unix:{}/freud.sock")


@pytest.fixture(scope="module")
def bus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bus", numbered=True)
    listen = [one.format(folder) for one in LISTEN]
    with PirateBus(listen=listen) as one:
        yield one


@pytest.fixture
def pirate(bus, request):
    with Bare(bus.endpoint, str(request.node.name).encode()[-60:]) as one:
        one.hello()
        yield one


@pytest.fixture
def native(bus):
    address = bus.process.address("native")
    with Client(f"polybus://{address.host}:{address.port}") as one:
        yield one


def read_all(pirate: Bare, topic: str) -> list[tuple[object, object]]:
    found = []
    while (answer := pirate.get(topic))[0] == "MSG":
        found.append((answer[1], answer[2]))
    return found


def test_all_shards_of_an_fdq_topic_are_read_in_id_order(bus, pirate, native):
    native.create_topic("fdq", shards=8)
    assert pirate.sub("fdq") == ("OK", 1, 0)
    with native.producer() as producer:
        for number in range(50):
            producer.produce("fdq", [b"%d" % number], keys=[f"k{number}"]).result(WAIT_S)
    assert pirate.put("fdq", b"last") == ("OK", 2, 51)
    found = read_all(pirate, "fdq")
    assert found == [(number + 1, b"%d" % number) for number in range(50)] + [(51, b"last")]
    assert pirate.unsub("fdq") == ("OK", 3, 1)
    assert any(one["topic"] == "fdq" for one in native.topics())


def test_puts_reach_rqueue_freud_and_native_readers_after_their_commit(bus, pirate, native):
    pirate.sub("shared")
    process = bus.process
    with (
        rqueue_client.connect(process.address("rqueue")) as reader,
        freud_client.connect(process.address("freud")) as other,
    ):
        reader.send(rqueue_client.subscribe(b"shared"))
        reader.settle()
        other.send(freud_client.subscribe(b"shared"))
        (subscribed,) = other.answers(1)
        bodies = [b"one", b"two", b"three"]
        for body in bodies:
            pirate.put("shared", body)
        assert [body for _, body in reader.messages(3)] == bodies
        other.send(*(freud_client.get(subscribed.payload, WAIT_S) for _ in bodies))
        assert [one.payload for one in other.answers(3)] == bodies
    found: list[bytes] = []
    for batch in native.read("shared", max_rows=3, wait_s=WAIT_S):
        found += batch.column("body").to_pylist()
    assert found == bodies


def test_messages_of_rqueue_and_freud_are_read(bus, pirate):
    pirate.sub("written")
    process = bus.process
    with freud_client.connect(process.address("freud")) as other:
        other.send(freud_client.produce(b"written", b"from freud"))
        assert other.answers(1)[0].code == freud_client.OK
    with rqueue_client.connect(process.address("rqueue")) as writer:
        writer.send(rqueue_client.publish(b"written", b"from rqueue"))
        found: list[tuple[object, object]] = []

        def are_read() -> bool:
            found.extend(read_all(pirate, "written"))
            return len(found) >= 2

        until(are_read, "both messages were read")
    assert found == [(1, b"from freud"), (2, b"from rqueue")]


def test_an_ephemeral_topic_is_denied(bus, pirate):
    with freud_client.connect(bus.process.address("freud")) as other:
        other.send(freud_client.create(b"fleeting"))
        assert other.answers(1)[0].code == freud_client.OK
        assert pirate.sub("fleeting") == ("ERR", "DENIED")
        assert pirate.put("fleeting", b"x") == ("ERR", "DENIED")
        assert pirate.get("fleeting") == ("ERR", "NOT_SUBSCRIBED")
        assert pirate.unsub("fleeting") == ("OK", 3, 0)


def test_subscribers_are_listed(bus, pirate, native):
    pirate.sub("watched")
    for _ in range(3):
        pirate.put("watched", b"x")
    pirate.get("watched")
    pirate.get("watched")
    expected = [{"id": pirate.client.hex(), "last": 1, "lag": 2}]
    # A GET is answered before the commit of its LAST.
    until(lambda: native.topic_stats("watched")["subscribers"] == expected, "the LAST is stored")
    ran = bus.process.run("connections", "--json", "--admin", str(bus.process.admin_path))
    open_now = [one for one in json.loads(ran.stdout) if one["dialect"] == "pirate"]
    assert open_now
    assert all(one["identity"].startswith("uid:") for one in open_now)
    assert max(one["received_messages"] for one in open_now) >= 5
    stats = native.stats()["pirate"]
    assert stats["subscriptions"] >= 1
    assert stats["clients"] >= 1
