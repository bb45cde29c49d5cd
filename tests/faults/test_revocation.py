"""A revoked right ends streams and subscriptions, or refuses their next step, in every dialect.

These are the rows of "What ends when a right is revoked" in docs/guides/policy.md that have no
test elsewhere. All callers are the user that runs the tests: a deny rule holds for root, too,
and no rule keeps root from the admin socket.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

from polybus.server.admin_client import ask
from polybus.testing.bus_process import BusProcess, serve
from tests.rig import freud_client, gsb_peer, rqueue_client
from tests.rig.certificates import write_certificate
from tests.rig.flight_client import Put, act, bodies, code_of, connect, produce, refused
from tests.rig.gsb_wire import read_failure
from tests.rig.observer import check_unharmed, count, until
from tests.rig.pirate import wire
from tests.rig.pirate.zmq_client import Bare

ME = f"user:{os.getuid()}"
LONG_MS = 40_000  # a wait that only a revocation ends
SOON_S = 20.0
LISTEN = (
    "rqueue=tcp://127.0.0.1:0",
    "freud=unix:{folder}/freud.sock",
    "gsb=tcp://127.0.0.1:0",
    "pirate=tcp://127.0.0.1:0",
    "native=grpc://127.0.0.1:0",
    "admin=unix:{folder}/admin.sock",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="pb-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def running(folder) -> Iterator[BusProcess]:
    listen = [one.format(folder=folder) for one in LISTEN]
    with serve("--log-format", "json", listen=listen, folder=folder) as bus:
        yield bus


@pytest.fixture
def bus(running) -> Iterator[BusProcess]:
    yield running
    for rule in ask(running.admin_path, "acl_ls"):
        ask(running.admin_path, "acl_rm", rule=rule["rule"])
    check_unharmed(running)


@pytest.fixture
def client(bus) -> Iterator[flight.FlightClient]:
    with connect(bus) as made:
        yield made


@pytest.fixture
def topic(client, request) -> str:
    """A durable topic of this test."""
    name = str(request.node.name)
    act(client, "topic.create", topic=name, shards=1)
    return name


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def revoke(bus: BusProcess, verb: str, topic: str) -> None:
    ask(bus.admin_path, "acl_add", rule=f"deny {ME} {verb} {topic}")


def restore(bus: BusProcess, verb: str, topic: str) -> None:
    ask(bus.admin_path, "acl_rm", rule=f"deny {ME} {verb} {topic}")


# --- rqueue


@pytest.mark.parametrize("kind", ["ephemeral", "durable"])
def test_rqueue_subscription_ends(bus, client, kind):
    name = f"rqueue.{kind}"
    if kind == "durable":
        act(client, "topic.create", topic=name, shards=1)
    with rqueue_client.connect(bus.address("rqueue")) as reader:
        reader.send(rqueue_client.subscribe(name.encode()))
        reader.settle()
        before = count(bus, "refused", "subscription_revoked")
        revoke(bus, "subscribe", name)
        assert count(bus, "refused", "subscription_revoked") == before + 1
        with rqueue_client.connect(bus.address("rqueue")) as writer:
            writer.send(rqueue_client.publish(name.encode(), b"x"))
            writer.settle()
        if kind == "durable":
            produce(client, name, b"y")
        restore(bus, "subscribe", name)
        reader.send(rqueue_client.subscribe(name.encode()))
        reader.settle()
        with rqueue_client.connect(bus.address("rqueue")) as writer:
            writer.send(rqueue_client.publish(name.encode(), b"z"))
        assert reader.messages(1) == [(name.encode(), b"z")]


def test_rqueue_message_in_parts_does_not_pass(bus, client, topic):
    name = topic.encode()
    with rqueue_client.connect(bus.address("rqueue")) as writer:
        writer.send(rqueue_client.publish_part(name, bytes(16), 0, 2, b"first "))
        writer.settle()
        revoke(bus, "produce", topic)
        writer.send(rqueue_client.publish_part(name, bytes(16), 1, 2, b"second"))
        writer.settle()
    produced = act(client, "bounds", topic=topic)["next_id"]
    assert produced == 1, "a message whose last part was denied is stored"


# --- freud


@pytest.mark.parametrize("kind", ["ephemeral", "durable"])
def test_freud_subscriber_and_its_waiting_get_end(bus, client, kind):
    name = f"freud.{kind}"
    with freud_client.connect(bus.address("freud")) as peer:
        if kind == "durable":
            act(client, "topic.create", topic=name, shards=1)
        else:
            peer.ask(freud_client.create(name.encode()))
        subscriber = peer.ask(freud_client.subscribe(name.encode())).payload
        peer.send(freud_client.get(subscriber, freud_client.FOR_EVER))
        revoke(bus, "subscribe,produce", name)
        assert peer.answers(1)[0].code == freud_client.DOESNT_EXIST
        assert peer.ask(freud_client.get(subscriber)).code == freud_client.DOESNT_EXIST
        assert peer.ask(freud_client.produce(name.encode(), b"x")).code == freud_client.NO


# --- gsb


def gsb(bus: BusProcess) -> gsb_peer.Peer:
    return gsb_peer.connect(bus.address("gsb"))


def test_gsb_subscription_ends(bus):
    with gsb(bus) as reader, gsb(bus) as writer:
        reader.send(gsb_peer.packet("subscribe_request", topic="gsb.news"))
        assert reader.next("subscribe_reply").code == 0
        revoke(bus, "subscribe", "gsb.news")
        writer.send(gsb_peer.packet("broadcast_request", topic="gsb.news", data=b"x"))
        assert writer.next("broadcast_reply").code == 0
        assert reader.ping() == []


def test_gsb_open_call_ends(bus):
    with gsb(bus) as service, gsb(bus) as caller:
        assert service.register("open-call") == 0
        caller.send(gsb_peer.call("open-call/method", "1"), gsb_peer.call("open-call", "2"))
        requests = {service.call().address: None, service.call().address: None}
        assert len(requests) == 2
        revoke(bus, "call", "open-call/method")
        reply = caller.reply()
        assert reply.request_id == "1"
        assert read_failure(reply.data).code == 403, "an open call outlives its right"
        assert [one.WhichOneof("kind") for one in service.ping()] == ["cancel"]
        revoke(bus, "call", "open-call")
        assert read_failure(caller.reply().data).code == 403
        assert count(bus, "refused", "call_revoked") == 2
        caller.send(gsb_peer.call("open-call", "3"))
        assert read_failure(caller.reply().data).code == 403


def test_gsb_service_loses_its_name_and_its_calls(bus):
    with gsb(bus) as service, gsb(bus) as caller:
        assert service.register("lost-name") == 0
        assert service.register("kept-name") == 0
        caller.send(gsb_peer.call("lost-name", "1"), gsb_peer.call("kept-name", "2"))
        first, second = service.call(), service.call()
        revoke(bus, "create", "lost-name")
        assert read_failure(caller.reply().data).code == 503, "a revoked service serves its calls"
        (cancel,) = service.ping()
        assert cancel.cancel.request_id == first.request_id
        caller.send(gsb_peer.call("lost-name", "3"))
        assert read_failure(caller.reply().data).code == 404
        service.send(gsb_peer.reply(second.request_id, b"answer"))
        assert caller.reply().data == b"answer"
        assert service.register("lost-name") == 403
        assert count(bus, "refused", "service_revoked") == 1


# --- the native port, which carries fdq


def ended_with(future: Future[Any]) -> str:
    """Return the code of the error that a call ends with."""
    with pytest.raises(flight.FlightError) as caught:
        future.result(SOON_S)
    return code_of(caught.value)


def waiting_read(client: Any, topic: str) -> Any:
    """Return a read that has returned the only message and waits for more."""
    ticket = flight.Ticket(json.dumps({"topic": topic, "wait_ms": LONG_MS}).encode())
    stream = client.do_get(ticket)
    assert stream.read_chunk().data.num_rows == 1
    return stream


def test_put_is_denied_at_its_next_batch(bus, client, topic):
    put = Put(client, "produce", topic)
    assert put.ask(b"1")["first_id"] == 1
    revoke(bus, "produce", topic)
    assert put.ask(b"2")["error"]["code"] == "denied"
    put.close()
    assert bodies(client, topic=topic) == [b"1"]


@pytest.mark.sabotage("waits-outlive-rights", expects="TimeoutError", tries=3)
def test_waiting_read_ends(bus, client, topic, pool):
    produce(client, topic, b"1")
    reading = pool.submit(waiting_read(client, topic).read_chunk)
    revoke(bus, "subscribe", topic)
    assert ended_with(reading) == "denied"


@pytest.mark.sabotage("waits-outlive-rights", expects="TimeoutError", tries=3)
def test_wait_ends(bus, client, topic, pool):
    places = [{"topic": topic, "shard": 0, "offset": 0}]
    waiting = pool.submit(act, client, "wait", positions=places, timeout_ms=LONG_MS)
    revoke(bus, "subscribe", topic)
    assert ended_with(waiting) == "denied"


def join(client: Any, topic: str) -> dict[str, Any]:
    joined = act(client, "group.join", topic=topic, group="g", consumer="c", dead_ms=LONG_MS)
    return {"topic": topic, "group": "g", "consumer": "c", "epoch": joined["epoch"]}


@pytest.mark.sabotage("waits-outlive-rights", expects="TimeoutError", tries=3)
@pytest.mark.parametrize("follow", [False, True])
def test_waiting_fetch_of_a_group_member_ends(bus, client, topic, pool, follow):
    member = join(client, topic)
    (assigned,) = act(client, "group.fetch", **member)["assigned"]
    held = [{"shard": 0, "epoch": assigned["epoch"], "next": 0}]
    fields = {**member, "held": held, "wait_ms": LONG_MS, "follow": follow}
    action = flight.Action("group.fetch", json.dumps(fields).encode())
    fetching = pool.submit(lambda: list(client.do_action(action)))
    revoke(bus, "subscribe", topic)
    assert ended_with(fetching) == "denied"
    assert refused(client, "group.heartbeat", **member) == "denied"
    assert refused(client, "group.ack", **member, shards=[]) == "denied"


def stage_with(client: Any, topic: str, body: bytes) -> str:
    stage: str = act(client, "stage.new")["stage"]
    put = Put(client, "stage", stage, topic)
    assert put.ask(body) == {"counter": None}
    put.close()
    return stage


@pytest.mark.sabotage("stages-unchecked", expects="stage.publish was answered")
def test_stage_cannot_be_published(bus, client, topic):
    stage = stage_with(client, topic, b"staged")
    put = Put(client, "stage", stage, topic)
    assert "error" not in put.ask(b"more")  # the bus has opened the stream
    revoke(bus, "produce", topic)
    assert put.ask(b"too late")["error"]["code"] == "denied"
    put.close()
    assert refused(client, "stage.publish", stages=[stage]) == "denied"
    run = {"stamp": {"producer": topic, "counter": 1}, "run": {"id": "query"}}
    assert refused(client, "stage.publish", stages=[stage], **run) == "denied"
    assert bodies(client, topic=topic) == []
    restore(bus, "produce", topic)
    assert act(client, "stage.publish", stages=[stage])["spans"][0]["count"] == 2
    assert bodies(client, topic=topic) == [b"staged", b"more"]


@pytest.mark.sabotage("stages-unchecked", expects="group.commit was answered")
def test_transaction_is_denied_whole(bus, client, topic):
    output = f"{topic}.output"
    act(client, "topic.create", topic=output, shards=1)
    member = join(client, topic)
    (assigned,) = act(client, "group.fetch", **member)["assigned"]
    produce(client, topic, b"input")
    run = {**member, "shard": 0, "shard_epoch": assigned["epoch"], "offset": 0}
    stage = stage_with(client, output, b"staged")
    revoke(bus, "produce", output)
    message = {"topic": output, "body": "eA=="}
    assert refused(client, "group.commit", **run, messages=[message]) == "denied"
    assert refused(client, "group.commit", **run, stages=[stage]) == "denied"
    assert bodies(client, topic=output) == []
    restore(bus, "produce", output)
    assert act(client, "group.commit", **run, stages=[stage])["duplicate"] is False
    assert bodies(client, topic=output) == [b"staged"]


@pytest.mark.sabotage("certificates-outlive-authorities", expects="TimeoutError", tries=3)
def test_client_certificate_of_a_removed_authority_ends_its_streams(tmp_path, pool):
    own, first, second = (tmp_path / name for name in ("own", "first", "second"))
    for place in (own, first, second):
        place.mkdir()
    cert, key = write_certificate(own)
    shown_cert, shown_key = write_certificate(first, "first")
    other_cert, _ = write_certificate(second, "second")
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(shown_cert.read_bytes())
    config = tmp_path / "bus.toml"
    config.write_text(
        f"[tls]\ncertificate = '{cert}'\nkey = '{key}'\n"
        f"[native]\nclient_authorities = '{authorities}'\n"
    )
    trust: dict[str, Any] = {
        "tls_root_certs": cert.read_bytes(),
        "cert_chain": shown_cert.read_bytes(),
        "private_key": shown_key.read_bytes(),
    }
    flags = ("--config", str(config), "--log-format", "json")
    with (
        serve(*flags, listen=("native=grpc+tls://127.0.0.1:0",)) as bus,
        connect(bus, **trust) as client,
    ):
        act(client, "topic.create", topic="t", shards=1)
        put = Put(client, "produce", "t")
        assert put.ask(b"1")["first_id"] == 1
        stream = waiting_read(client, "t")
        reading = pool.submit(stream.read_chunk)
        authorities.write_bytes(other_cert.read_bytes())
        bus.signal(signal.SIGHUP)
        assert reading.exception(SOON_S) is not None
        with pytest.raises((flight.FlightError, ValueError, OSError, EOFError)):
            put.ask(b"2")
        with pytest.raises((flight.FlightError, ValueError, OSError)):
            act(client, "topic.list")
        until(
            lambda: count(bus, "connections", "closed", "certificates_changed") >= 1,
            "the connections are counted",
        )
        check_unharmed(bus)


# --- pirate


def test_pirate_client_is_denied_at_its_next_request(bus, client):
    address = bus.address("pirate")
    with Bare(f"tcp://{address.host}:{address.port}", b"c") as bare:
        bare.hello()
        bare.ask(wire.counted(wire.SUB, b"c", bare.epoch, 1, "pirate.t"))
        assert bare.ask(wire.counted(wire.PUT, b"c", bare.epoch, 2, "pirate.t", b"x"))[0] == "OK"
        revoke(bus, "produce,subscribe", "pirate.t")
        denied = wire.error("DENIED")
        assert bare.ask(wire.counted(wire.PUT, b"c", bare.epoch, 3, "pirate.t", b"y")) == denied
        assert bare.ask(wire.get(b"c", bare.epoch, "pirate.t", 0)) == denied
        assert bare.ask(wire.counted(wire.SUB, b"c", bare.epoch, 4, "pirate.t")) == denied
        restore(bus, "produce,subscribe", "pirate.t")
        assert bare.ask(wire.get(b"c", bare.epoch, "pirate.t", 0)) == ("MSG", 1, b"x")
