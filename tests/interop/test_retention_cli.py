"""Retention and pauses of topics and groups, by the command line and on a running bus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest

from polybus import fdq, gsb
from polybus.errors import Denied, MalformedRequest, Paused, Unavailable
from polybus.native import Client
from tests.rig import freud_client, rqueue_client
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until
from tests.rig.pirate.zmq_client import Bare

PATIENCE_S = 60
DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def bus(tmp_path_factory) -> Iterator[NativeBus]:
    folder = tmp_path_factory.mktemp("bus")
    listen = [
        "rqueue=tcp://127.0.0.1:0",
        f"freud=unix:{folder}/freud.sock",
        "pirate=tcp://127.0.0.1:0",
        "gsb=tcp://127.0.0.1:0",
    ]
    with NativeBus(listen=listen, env={"POLYBUS_DURABLE_RETAIN_AGE": "30d"}) as running:
        yield running


@pytest.fixture
def client(bus) -> Iterator[Client]:
    with bus.client() as opened:
        yield opened


@pytest.fixture
def pirate(bus, request) -> Iterator[Bare]:
    endpoint = f"tcp://127.0.0.1:{bus.process.address('pirate').port}"
    with Bare(endpoint, str(request.node.name).encode()[-60:]) as connected:
        connected.hello()
        yield connected


@pytest.fixture
def topic(request) -> str:
    return str(request.node.name)


def settings(client: Client, topic: str) -> dict[str, object]:
    return client.topic(topic)["settings"]


def produce(client: Client, topic: str, count: int, *, start: int = 0) -> None:
    with client.producer() as producer:
        bodies = [b"%d" % number for number in range(start, start + count)]
        producer.produce(topic, bodies).result(PATIENCE_S)


def stored(client: Client, topic: str) -> int:
    return int(client.topic(topic)["retention"]["stored_messages"])


def test_configure_changes_only_the_named_settings(polybus, client, topic):
    polybus("topic", "create", topic, "--retain-age", "7d", "--max-bytes", "1GiB")
    polybus("topic", "configure", topic, "--retain-bytes", "10GiB", "--retain-unread", "drop")
    assert settings(client, topic) == {
        "keep": "all",
        "max_bytes": 1 << 30,
        "retain_age_ms": 7 * DAY_MS,
        "retain_bytes": 10 << 30,
        "retain_unread": "drop",
    }
    polybus("topic", "configure", topic, "--retain-age", "none", "--retain-messages", "5")
    assert "retain_age_ms" not in settings(client, topic)
    assert settings(client, topic)["retain_messages"] == 5
    client.act("topic.configure", topic=topic, settings={"keep": "read"})
    assert settings(client, topic) == {"keep": "read", "max_bytes": 0}


def test_concurrent_changes_are_not_lost(client, topic):
    client.create_topic(topic)
    names = ("retain_bytes", "retain_messages", "retain_age_ms", "max_bytes")

    def change(name: str, value: int) -> None:
        while True:
            try:
                client.configure_topic(topic, {name: value})
                return
            except Unavailable:  # another change is in progress
                continue

    threads = [Thread(target=change, args=(name, n + 1)) for n, name in enumerate(names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    found = settings(client, topic)
    assert [found[name] for name in names] == [1, 2, 3, 4]


def test_defaults_of_the_config_are_for_new_topics(polybus, client, topic):
    produce(client, topic, 1)
    assert settings(client, topic)["retain_age_ms"] == 30 * DAY_MS
    polybus("topic", "create", f"{topic}-own", "--retain-age", "none")
    assert "retain_age_ms" not in settings(client, f"{topic}-own")
    client.create_topic(f"{topic}.dlq")
    assert "retain_age_ms" not in settings(client, f"{topic}.dlq")


@pytest.mark.parametrize(
    ("flag", "text"),
    [("--retain-age", "7 days"), ("--retain-bytes", "10GB"), ("--retain-messages", "-1")],
)
def test_invalid_limits_are_usage_errors(polybus, flag, text):
    polybus("topic", "create", "unused", flag, text, code=2)


def test_invalid_settings_are_refused(client, topic):
    client.create_topic(topic)
    for change in ({"retain_age_ms": -1}, {"retain_unread": "no"}, {"paused": ["produce"]}):
        with pytest.raises(MalformedRequest):
            client.configure_topic(topic, change)
    with pytest.raises(MalformedRequest):
        client.act("topic.configure", topic=topic, settings={}, change={})


def test_limit_is_in_force_and_info_says_why_messages_stay(polybus, client, bus, topic):
    client.create_topic(topic, shards=1)
    produce(client, topic, 100)
    held = client.act("group.join", topic=topic, group="billing", consumer="c", dead_ms=600_000)
    fetched, _ = client.fetch(topic=topic, group="billing", consumer="c", **epoch(held))
    acked = {"shard": 0, "epoch": fetched["assigned"][0]["epoch"], "acked": [[0, 30]]}
    client.act(
        "group.ack", topic=topic, group="billing", consumer="c", shards=[acked], **epoch(held)
    )
    polybus("topic", "configure", topic, "--retain-messages", "10")
    until(lambda: stored(client, topic) == 70, "the acked messages are trimmed", 30)
    shown = json.loads(polybus("topic", "info", topic, "--json"))
    assert shown["retention"]["held_by"] == [{"reader": "group billing", "messages": 60}]
    assert shown["retention"]["due"] == 60
    text = polybus("topic", "info", topic)
    assert "held back by group billing" in text
    assert "retain messages" in text
    polybus("topic", "configure", topic, "--retain-unread", "drop")
    until(lambda: stored(client, topic) == 10, "the unread messages are trimmed", 30)
    (group,) = client.topic_stats(topic)["groups"]
    assert group["trimmed_unread"] == 60
    stats = client.stats()
    assert stats["dropped"]["retention_unread"] >= 60
    assert "retention_unread" in [alarm["kind"] for alarm in stats["alarms"]]


def epoch(joined: Any) -> dict[str, int]:
    return {"epoch": joined["epoch"]}


# --- pauses


def test_paused_topic_refuses_messages_in_every_dialect(polybus, client, bus, pirate, topic):
    process = bus.process
    client.create_topic(topic, shards=1)
    assert pirate.put(topic, b"before") == ("OK", 1, 1)
    polybus("topic", "pause", topic, "--produce")
    assert client.topic(topic)["paused"] == ["produce"]
    with client.producer() as producer, pytest.raises(Paused):
        producer.produce(topic, [b"x"]).result(PATIENCE_S)
    with fdq.Producer(bus.url) as fdq_producer, pytest.raises(Paused):
        fdq_producer.produce(topic, shard_key="k", message=b"x")
    with client.stage() as stage, pytest.raises(Paused):
        stage.put(topic, [b"x"])
    assert "BUSY" in pirate.put(topic, b"x")
    with freud_client.connect(process.address("freud")) as freud:
        freud.send(freud_client.produce(topic.encode(), b"x"))
        (answer,) = freud.answers(1)
        assert (answer.code, answer.payload) == (freud_client.SERVER_ERROR, b"paused")
    with (
        gsb.blocking.connect(str(process.address("gsb"))) as sender,
        pytest.raises(Denied, match="paused"),
    ):
        sender.broadcast(topic, body=b"x")
    before = client.stats()["dropped"].get("paused", 0)
    with rqueue_client.connect(process.address("rqueue")) as rqueue:
        rqueue.send(rqueue_client.publish(topic.encode(), b"x"))
        until(lambda: client.stats()["dropped"].get("paused", 0) == before + 1, "it is counted")
    assert stored(client, topic) == 1
    polybus("topic", "resume", topic)
    assert client.topic(topic)["paused"] == []
    produce(client, topic, 1)
    pirate.counter -= 1  # the refused PUT did not use its counter
    assert pirate.put(topic, b"after") == ("OK", 2, 3)


def test_stage_of_a_paused_topic_is_not_published(client, topic):
    client.create_topic(topic)
    stage = client.stage()
    stage.put(topic, [b"x"])
    client.pause_topic(topic, produce=True)
    with pytest.raises(Paused):
        client.publish([stage])
    client.resume_topic(topic)
    client.publish([stage])
    assert stored(client, topic) == 1


class Handled:
    """A consumer that notes the messages that it has handled."""

    def __init__(self, bus: NativeBus, topic: str, group: str = "default") -> None:
        self.bodies: list[bytes] = []
        self.consumer = fdq.Consumer(bus.url)
        self.consumer.consume(topic, "c", self._handle, group=group)

    def _handle(self, envelope: fdq.Envelope) -> None:
        self.bodies.append(envelope.message)


@pytest.mark.parametrize("by", ["topic", "group"])
def test_paused_consumers_get_nothing_until_they_are_resumed(polybus, client, bus, by, request):
    topic = f"paused-by-{by}"
    client.create_topic(topic, shards=2)
    produce(client, topic, 5)
    handled = Handled(bus, topic)
    until(lambda: len(handled.bodies) == 5, "the first messages are handled")
    arguments = ["topic", "pause", topic, "--consume"], ["group", "pause", topic, "default"]
    polybus(*arguments[by == "group"])
    produce(client, topic, 5, start=5)
    # Another group shows that the messages are there; a pause of the topic holds it, too.
    other = Handled(bus, topic, "other")
    if by == "group":
        until(lambda: len(other.bodies) == 10, "the other group is not paused")
        assert [group["paused"] for group in client.topic_stats(topic)["groups"]] == [True, False]
    assert [row["body"] for batch in client.read(topic) for row in batch.to_pylist()]
    # A restart of the bus ends no pause.
    assert bus.stop() == 0
    bus.start()
    lag = {group["group"]: group["lag"] for group in client.topic_stats(topic)["groups"]}
    assert lag["default"] == 5
    assert len(handled.bodies) == 5
    resumed = ["topic", "resume", topic], ["group", "resume", topic, "default"]
    polybus(*resumed[by == "group"])
    until(lambda: len(handled.bodies) == 10, "the waiting fetch is woken")
    until(lambda: len(other.bodies) == 10, "the other group has all")
    (first, _) = client.topic_stats(topic)["groups"]
    assert (first["dead_lettered"], first["redelivered"]) == (0, 0)
    for each in (handled, other):
        each.consumer.close()


def test_pirate_subscriber_of_a_paused_topic_gets_nothing(client, pirate, topic):
    assert pirate.sub(topic)[0] == "OK"
    assert pirate.put(topic, b"x")[0] == "OK"
    client.pause_topic(topic, consume=True)
    assert pirate.get(topic)[0] != "MSG"
    client.resume_topic(topic)
    assert pirate.get(topic) == ("MSG", 1, b"x")


def test_pauses_are_listed(polybus, client, topic):
    client.create_topic(topic)
    polybus("topic", "pause", topic)
    row = polybus("topic", "ls", topic).splitlines()[1]
    assert "consume, produce" in row
    assert "consume, produce" in polybus("topic", "stats", topic)
    polybus("topic", "resume", topic, "--produce")
    assert "consume" in polybus("topic", "info", topic)
    assert client.topic(topic)["paused"] == ["consume"]
