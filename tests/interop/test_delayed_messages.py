"""Delayed messages and times to live, over the port, in process, and from the command line."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from polybus import fdq
from polybus.errors import MalformedRequest, UsageError
from polybus.native import bus_client
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 60
HOUR_S = 3600


@pytest.fixture(scope="module")
def bus():
    with NativeBus() as running:
        yield running


@pytest.fixture(params=["port", "in process"])
def url(request, tmp_path) -> str:
    if request.param == "in process":
        return f"lmdb:{tmp_path}"
    return request.getfixturevalue("bus").url


@pytest.fixture
def topic(request) -> str:
    return f"topic-{abs(hash(request.node.name))}"


def read(client, topic, count):
    """Return the first messages of a topic by their body, with their commit time."""
    rows = []
    for batch in client.read(topic, start=1, max_rows=count, wait_s=PATIENCE_S):
        rows += batch.to_pylist()
    return {row["body"]: row["timestamp_ns"] for row in rows}


def run(bus: NativeBus, *args: str) -> str:
    done = bus.process.run(*args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_message_is_appended_when_it_is_due_and_not_before(url, topic):
    client = bus_client.connect(url)
    with fdq.Producer(url) as producer:
        late = producer.produce(topic, "k", b"late", delay_s=0.4)
        soon = producer.produce(topic, "k", b"soon", deliver_at=time.time() + 0.2)
        now = producer.produce(topic, "k", b"now")
        assert (late.first_id, late.last_id, soon.first_id) == (0, 0, 0)
        assert (now.first_id, now.deliver_at_ns) == (1, 0)
        stored = read(client, topic, 3)
    assert list(stored) == [b"now", b"soon", b"late"]
    assert stored[b"soon"] >= soon.deliver_at_ns
    assert stored[b"late"] >= late.deliver_at_ns
    until(lambda: not client.topic(topic)["delayed"]["messages"], "the counts are zero")
    client.close()


def test_batches_datetimes_and_past_times(url, topic):
    client = bus_client.connect(url)
    past = datetime.now(UTC) - timedelta(days=1)
    with fdq.Producer(url) as producer:
        done = producer.produce_batch(topic, [("a", b"1"), ("b", b"2")], deliver_at=past)
        assert (done.first_id, done.deliver_at_ns // 10**6) == (0, int(past.timestamp() * 1000))
        assert set(read(client, topic, 2)) == {b"1", b"2"}
        producer.produce_batch(topic, [("a", b"3")], delay_s=HOUR_S)
    with client.producer() as native:
        future = native.produce(topic, [b"4"], delay_s=0.01)
        assert future.result(PATIENCE_S).deliver_at_ns > 0
    assert len(read(client, topic, 3)) == 3
    # The bus counts a message as delayed for a moment longer than it is invisible.
    until(lambda: client.topic(topic)["delayed"]["messages"] == 1, "one message is delayed")
    info = client.topic(topic)["delayed"]
    assert info["next_due_ns"] is not None
    assert info["next_due_ns"] > time.time_ns() + HOUR_S * 10**9 // 2
    assert client.topic_stats(topic)["delayed"] == info
    client.drop_topic(topic)
    client.create_topic(topic)
    assert client.topic(topic)["delayed"]["messages"] == 0
    client.close()


def test_ordinary_messages_keep_their_order_among_delayed_ones(url, topic):
    with fdq.Producer(url) as producer:
        futures = []
        for n in range(200):
            delay_s = 0.001 * (n % 7) if n % 3 == 0 else None
            futures.append(producer.produce_nowait(topic, "k", b"%d" % n, delay_s=delay_s))
        for future in futures:
            future.result(PATIENCE_S)
    client = bus_client.connect(url)
    stored = [int(body) for body in read(client, topic, 200)]
    assert sorted(stored) == list(range(200))
    ordinary = [n for n in stored if n % 3]
    assert ordinary == sorted(ordinary)
    client.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delay_s": -1}, "delay_s must be from 0"),
        ({"delay_s": 31 * 86_400}, "delay_s must be from 0"),
        ({"delay_s": float("nan")}, "delay_s must be a finite number"),
        ({"delay_s": 1, "deliver_at": 1}, "exclude each other"),
        ({"ttl_s": 0}, "ttl_s must be above 0"),
    ],
)
def test_invalid_times_are_refused_at_once(url, topic, options, text):
    with fdq.Producer(url) as producer:
        with pytest.raises(UsageError, match=text):
            producer.produce(topic, "k", b"x", **options)
        with pytest.raises(UsageError, match=text):
            producer.produce_batch(topic, [("k", b"x")], **options)
        with pytest.raises(MalformedRequest, match="within 30 days"):
            producer.produce(topic, "k", b"x", deliver_at=time.time() + 31 * 86_400)


def test_the_async_producer_takes_the_same_options(url, topic):
    async def produce() -> None:
        async with fdq.aio.Producer(url) as producer:
            done = await producer.produce(topic, "k", b"x", delay_s=HOUR_S)
            assert done.deliver_at_ns > time.time_ns()
            done = await producer.produce_batch(topic, [("k", b"y")], delay_s=HOUR_S, ttl_s=5)
            assert done.deliver_at_ns > time.time_ns()

    asyncio.run(produce())
    client = bus_client.connect(url)
    assert client.topic(topic)["delayed"]["messages"] == 2
    client.close()


def test_a_backup_has_the_delayed_messages(bus, topic, tmp_path):
    with fdq.Producer(bus.url) as producer:
        late = producer.produce(topic, "k", b"late", delay_s=1)
    copy, restored = str(tmp_path / "copy"), str(tmp_path / "restored")
    run(bus, "store", "backup", str(bus.process.data), copy)
    run(bus, "store", "restore", copy, restored)
    client = bus_client.connect(f"lmdb:{restored}")
    stored = read(client, topic, 1)
    assert stored[b"late"] >= late.deliver_at_ns
    client.close()


@pytest.mark.sabotage("ttl-ignored", expects="expired messages were handed out")
def test_expired_messages_are_not_handed_out_and_are_counted(url, topic):
    client = bus_client.connect(url)
    with fdq.Producer(url) as producer:
        producer.produce_batch(topic, [("k", b"%d" % n) for n in range(3)], ttl_s=0.001)
        producer.produce(topic, "k", b"fresh", {"h": b"1"}, ttl_s=HOUR_S)
        producer.produce(topic, "k", b"plain")
        last_ns = max(read(client, topic, 5).values())
    until(lambda: time.time_ns() > last_ns + 2_000_000, "the first three have expired")
    seen: list[tuple[bytes, dict[str, bytes]]] = []
    with fdq.Consumer(url) as consumer:
        consumer.consume(topic, "c", lambda one: seen.append((one.message, one.headers)))
        until(lambda: fdq.stats(url, topic)["all"]["acked"] == 5, "all are acked")
    assert len(seen) == 2, f"{len(seen) - 2} expired messages were handed out"
    assert seen == [(b"fresh", {"h": b"1", "polybus.ttl_ms": b"3600000"}), (b"plain", {})]
    assert fdq.stats(url, topic)["all"]["expired"] == 3
    assert client.act("group.info", topic=topic)["shards"] is not None
    assert len(read(client, topic, 5)) == 5  # plain reads return them
    client.close()


def test_outputs_of_a_transaction_have_a_ttl(url, topic):
    client = bus_client.connect(url)
    output = f"{topic}-output"

    def move(envelope: fdq.Envelope) -> None:
        with envelope.transaction() as transaction:
            transaction.produce(output, None, b"moved", {"h": b"1"}, ttl_s=HOUR_S)

    with fdq.Producer(url) as producer, fdq.Consumer(url) as consumer:
        producer.produce(topic, "k", b"x")
        consumer.consume(topic, "c", move)
        until(lambda: fdq.stats(url, topic)["all"]["acked"] == 1, "it is moved")
    (row,) = next(iter(client.read(output, start=1))).to_pylist()
    assert dict(row["headers"]) == {"h": b"1", "polybus.ttl_ms": b"3600000"}
    client.close()


def test_expired_messages_become_dead_letters_if_the_topic_says_so(url, topic):
    client = bus_client.connect(url)
    client.create_topic(topic, 2, {"expired": "dead-letter"})
    with fdq.Producer(url) as producer:
        producer.produce(topic, "k", b"old", ttl_s=0.001)
        producer.produce(topic, "k", b"new")
        last_ns = max(read(client, topic, 2).values())
        until(lambda: time.time_ns() > last_ns + 2_000_000, "it has expired")
        seen = []
        with fdq.Consumer(url) as consumer:
            consumer.consume(topic, "c", lambda one: seen.append(one.message))
            until(lambda: fdq.stats(url, topic)["all"]["acked"] == 2, "all are acked")
    assert seen == [b"new"]
    (row,) = next(iter(client.read(f"{topic}.dlq", start=1))).to_pylist()
    headers = dict(row["headers"])
    assert (row["body"], headers["polybus.reason"]) == (b"old", b"expired")
    assert "polybus.ttl_ms" not in headers
    counts = fdq.stats(url, topic)["all"]
    assert (counts["expired"], counts["dead_lettered"]) == (1, 1)
    client.close()


def test_the_command_line_has_delay_and_ttl(bus, topic):
    run(bus, "fdq", "produce", topic, "later", "--delay", "1h", "--ttl", "1d", "--bus", bus.url)
    run(bus, "pub", topic, "soon", "--delay", "10ms", "--bus", bus.url)
    with bus.client() as client:
        assert list(read(client, topic, 1)) == [b"soon"]
    info = run(bus, "topic", "info", topic, "--bus", bus.url)
    assert "delayed_next_due" in info
    shown = json.loads(run(bus, "topic", "stats", topic, "--json", "--bus", bus.url))
    assert shown[0]["delayed"]["messages"] == 1
    failed = bus.process.run("pub", topic, "x", "--delay", "soon", "--bus", bus.url)
    assert failed.returncode == 2
    assert "duration must be a number with ms, s, m, h or d" in failed.stderr
