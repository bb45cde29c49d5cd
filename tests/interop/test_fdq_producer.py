"""FDQ producers and replays on a running bus: batches, errors, restarts, fences."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any

import pytest

from polybus import errors, fdq, freud
from polybus.dialects.fdq.limits import MAX_MESSAGE_BYTES
from polybus.native import ClientOptions
from tests.rig.native_bus import QUICK, NativeBus
from tests.rig.observer import until
from tests.rig.relay import Relay

PATIENCE_S = 60
QUICKLY = ClientOptions(**QUICK)


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        NativeBus(listen=[f"freud=unix:{folder}/freud.sock"]) as running,
    ):
        yield running


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def found(bus: NativeBus, topic: str) -> list[fdq.Envelope]:
    return list(fdq.replay(bus.url, topic, options=QUICKLY))


def numbers(envelopes: list[fdq.Envelope]) -> dict[str | None, list[int]]:
    by_key: dict[str | None, list[int]] = {}
    for one in envelopes:
        by_key.setdefault(one.shard_key, []).append(int(one.message))
    return by_key


def test_produced_messages_can_be_replayed(bus: NativeBus, topic: str) -> None:
    with fdq.Producer(bus.url) as producer:
        assert producer.produce(topic, "k", b"1", {"a": b"b"}).first_id == 1
        assert producer.produce_batch(topic, [("k", b"2"), ("k", b"3")]).last_id == 3
        futures = [producer.produce_nowait(topic, "k", b"%d" % n) for n in range(4, 2000)]
        assert producer.flush(PATIENCE_S)
    assert len({one.result() for one in futures}) < 500, "they travel together"
    envelopes = found(bus, topic)
    assert numbers(envelopes) == {"k": list(range(1, 2000))}
    assert [one.id for one in envelopes] == list(range(1, 2000))
    assert envelopes[0].headers == {"a": b"b"}
    some = list(fdq.replay(bus.url, topic, from_id=10, to=13))
    assert [one.id for one in some] == [10, 11, 12]
    assert fdq.stats(bus.url, topic)["all"]["inserted"] == 1999


def test_default_bus_is_taken_from_the_environment(
    bus: NativeBus, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYBUS_URL", bus.url)
    with fdq.Producer() as producer:
        producer.produce(topic, None, b"1")
    assert [one.message for one in fdq.replay(None, topic)] == [b"1"]


def test_batch_is_atomic_over_all_shards(bus: NativeBus, topic: str) -> None:
    with fdq.Producer(bus.url) as producer:
        producer.produce_batch(topic, [(f"k{n}", b"%d" % n) for n in range(1000)])
        envelopes = found(bus, topic)
    assert len({one.shard for one in envelopes}) == 16
    assert len({one.timestamp_ns for one in envelopes}) == 1


def test_the_largest_message_passes(bus: NativeBus, topic: str) -> None:
    body = bytes(range(256)) * (MAX_MESSAGE_BYTES // 256)
    with fdq.Producer(bus.url) as producer:
        producer.produce(topic, "k" * 1024, body)
        with pytest.raises(errors.TooLarge, match="at most"):
            producer.produce(topic, "k", body + b"!")
        producer.produce(topic, "k", b"small")
    assert sorted(len(one.message) for one in found(bus, topic)) == [5, len(body)]


def test_errors_of_the_bus_are_raised(bus: NativeBus, topic: str) -> None:
    with freud.blocking.connect(bus.process.address("freud")) as client:
        client.create_topic(topic)
    with fdq.Producer(bus.url) as producer:
        with pytest.raises(errors.WrongKind):
            producer.produce(topic, "k", b"x")
        future = producer.produce_nowait(topic, "k", b"x")
        with pytest.raises(errors.WrongKind):
            future.result(PATIENCE_S)
        producer.produce(topic + "-other", "k", b"x")
    with fdq.Producer(bus.url, create=False) as producer:
        with pytest.raises(errors.DoesNotExist):
            producer.produce(topic + "-nowhere", "k", b"x")
        producer.produce(topic + "-other", "k", b"x")
        with bus.client() as client:
            client.drop_topic(topic + "-other")
            with pytest.raises(errors.DoesNotExist):  # it has a stream to the topic
                producer.produce(topic + "-other", "k", b"x")
            assert client.topics(topic + "-other") == []


def test_a_newer_one_of_the_same_name_fences_the_older(bus: NativeBus, topic: str) -> None:
    with fdq.Producer(bus.url, topic) as older:
        older.produce(topic, "k", b"1")
        with fdq.Producer(bus.url, topic) as newer:
            newer.produce(topic, "k", b"2")
            with pytest.raises(errors.Fenced):
                older.produce(topic, "k", b"3")
            with pytest.raises(errors.Fenced):
                older.produce_nowait(topic, "k", b"4").result(PATIENCE_S)
            newer.produce(topic, "k", b"5")
    assert numbers(found(bus, topic)) == {"k": [1, 2, 5]}


def test_topics_are_independent(bus: NativeBus, topic: str) -> None:
    with fdq.Producer(bus.url) as producer:
        names = [f"{topic}-{n}" for n in range(10)]
        futures = [producer.produce_nowait(names[n % 10], "k", b"%d" % n) for n in range(200)]
        assert not wait(futures, PATIENCE_S).not_done
    for at, name in enumerate(names):
        assert numbers(found(bus, name)) == {"k": list(range(at, 200, 10))}


def test_replay_follows(bus: NativeBus, topic: str) -> None:
    with fdq.Producer(bus.url) as producer:
        producer.produce(topic, "k", b"1")
        with fdq.replay(bus.url, topic, wait_s=math.inf) as replay:
            assert next(replay).message == b"1"
            producer.produce(topic, "k", b"2")
            assert next(replay).message == b"2"
            ending = Thread(target=list, args=(replay,))
            ending.start()
            replay.cancel()
            ending.join(PATIENCE_S)
            assert not ending.is_alive()


def test_async_clients(bus: NativeBus, topic: str) -> None:
    async def main() -> list[bytes]:
        async with fdq.aio.Producer(bus.url) as producer:
            await asyncio.gather(*(producer.produce(topic, "k", b"%d" % n) for n in range(50)))
        return [one.message async for one in fdq.aio.replay(bus.url, topic)]

    assert asyncio.run(main()) == [b"%d" % n for n in range(50)]


# --- an unreachable bus


def test_producer_survives_a_restart_of_the_bus(topic: str) -> None:
    with NativeBus() as bus, fdq.Producer(bus.url, options=QUICKLY) as producer:
        producer.produce(topic, "k", b"0")
        bus.stop()
        futures = [producer.produce_nowait(topic, "k", b"%d" % n) for n in range(1, 500)]
        batch = producer.produce_batch_nowait(topic, [("k", b"500"), ("l", b"501")])
        assert not any(one.done() for one in [*futures, batch])
        bus.start()
        assert not wait([*futures, batch], PATIENCE_S).not_done
        assert numbers(found(bus, topic)) == {"k": list(range(501)), "l": [501]}


def test_lost_connection_neither_duplicates_nor_loses_messages(bus: NativeBus, topic: str) -> None:
    with Relay(bus.port) as relay:
        url = f"polybus://127.0.0.1:{relay.port}"
        with fdq.Producer(url, options=QUICKLY) as producer:
            futures: list[Future[Any]] = []
            for round_number in range(8):
                for n in range(100):
                    number = round_number * 100 + n
                    key = f"k{number % 3}"
                    futures.append(producer.produce_nowait(topic, key, b"%d" % number))
                until(lambda: any(one.done() for one in futures[-100:]), "some of them")
                relay.cut()
            assert producer.flush(PATIENCE_S)
            assert all(one.exception() is None for one in futures)
    by_key = numbers(found(bus, topic))
    assert by_key == {f"k{n}": list(range(n, 800, 3)) for n in range(3)}


def test_close_does_not_exceed_its_timeout(topic: str) -> None:
    """Although the queue of pending batches is full."""
    with NativeBus() as bus:
        options = ClientOptions(**QUICK, max_waiting_bytes=1000)
        producer = fdq.Producer(bus.url, options=options, max_batch_rows=1, linger_s=0)
        producer.produce(topic, "k", b"0")
        bus.kill()
        futures: list[Future[Any]] = []

        def work() -> None:
            try:
                while True:
                    futures.append(producer.produce_nowait(topic, "k", b"x" * 400))
            except errors.ConnectionLost:
                return

        stuck = Thread(target=work, daemon=True)
        stuck.start()
        until(lambda: len(futures) >= 2, "what cannot be sent")
        closing = Thread(target=producer.close, args=(0.1,))
        closing.start()
        closing.join(PATIENCE_S)
        stuck.join(PATIENCE_S)
        assert not closing.is_alive()
        assert not stuck.is_alive()
        for one in futures:
            with pytest.raises(errors.ConnectionLost):
                one.result(PATIENCE_S)
        bus.start()


def test_fetch_is_the_same_over_the_port_and_in_the_process(bus: NativeBus, topic: str) -> None:
    from polybus.native import bus_client as buses

    seen = []
    for url in (bus.url, f"memory:{topic}"):
        reached = buses.connect(url)
        with fdq.Producer(url) as producer:
            producer.produce_batch(topic, [(f"k{n}", b"%d" % n, {"h": b"v"}) for n in range(50)])
        joined = reached.act("group.join", topic=topic, consumer="c")
        asked = {"topic": topic, "group": "default", "consumer": "c", "epoch": joined["epoch"]}
        answer, rows = reached.fetch(**asked, held=[], max_rows=100, max_bytes=10**6, wait_ms=0)
        assert [(one["to"] - one["from"]) for one in answer["rows"]] == [b.num_rows for b in rows]
        columns = ["shard", "offset", "shard_key", "body", "headers"]
        seen.append((joined, answer, [batch.select(columns).to_pylist() for batch in rows]))
        with pytest.raises(errors.DoesNotExist):
            reached.fetch(**{**asked, "topic": "nowhere"}, held=[], wait_ms=0)
        reached.close()
    assert seen[0] == seen[1]
