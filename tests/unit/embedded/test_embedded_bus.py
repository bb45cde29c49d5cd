"""The client of a bus inside the process: the actions, producers and reads of the port."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from polybus import errors
from polybus.native import Client
from polybus.native.inprocess import open_bus
from polybus.native.inprocess.inprocess_transport import MAX_IN_FLIGHT, InProcessTransport
from polybus.native.port import shard_waits
from tests.rig.native_bus import count_waits, held_answers
from tests.rig.observer import until

PATIENCE_S = 30


@pytest.fixture(params=["memory", "lmdb"])
def bus(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Client]:
    url = f"lmdb:{tmp_path / 'store'}" if request.param == "lmdb" else f"memory:{tmp_path}"
    with open_bus(url) as opened:
        yield opened


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def bodies(batches: Any) -> list[bytes]:
    return [body for batch in batches for body in batch.column("body").to_pylist()]


# --- actions


def test_requests_and_answers_go_through_json(bus: Client) -> None:
    bus.act("topic.create", topic="t", shards=2)
    producer = bus.producer()
    producer.produce("t", [b"a", b"b"], ["x", "y"]).result()
    places = ({"topic": "t", "shard": 0, "offset": 0}, {"topic": "t", "shard": 1, "offset": 0})
    assert bus.act("wait", positions=places, timeout_ms=0)["news"]  # a tuple is a list there
    assert bus.act("topic.trim", topic="t", before={0: 0})["shards"]  # and a key a string
    assert bus.act("topic.info", topic="t")["generations"] == [2]


def test_request_that_is_not_json_is_refused(bus: Client) -> None:
    with pytest.raises(errors.MalformedRequest, match="JSON"):
        bus.act("topic.create", topic=b"bytes")


def test_errors_are_those_of_the_port(bus: Client) -> None:
    with pytest.raises(errors.DoesNotExist):
        bus.act("topic.info", topic="nowhere")
    with pytest.raises(errors.MalformedRequest):
        bus.act("no.such.action")
    with pytest.raises(errors.InvalidTopic):
        bus.act("topic.create", topic="a,b")
    with pytest.raises(errors.NotSupported):
        bus.act("acl.ls")


def test_user_of_the_process_is_an_admin(bus: Client) -> None:
    bus.act("topic.create", topic="t", settings={"max_bytes": 1000})
    bus.act("topic.configure", topic="t", settings={})
    bus.act("topic.drop", topic="t")
    assert bus.act("topic.list")["topics"] == []
    assert bus.act("stats")["topics"] == 0


# --- producing


def test_a_batch_is_one_commit(bus: Client) -> None:
    first = bus.producer().produce("t", [b"a", b"b"], ["x", None]).result()
    second = bus.producer().produce("t", [b"c"]).result()
    assert (first.first_id, first.last_id, second.first_id) == (1, 2, 3)
    (batch,) = bus.read("t")
    times = batch.column("timestamp_ns").to_pylist()
    assert times[0] == times[1] <= times[2]


def test_batches_beyond_the_in_flight_limit_keep_their_order(bus: Client) -> None:
    bus.act("topic.create", topic="t", shards=1)
    producer = bus.producer()
    futures = [producer.produce("t", [b"%d" % n]) for n in range(4 * MAX_IN_FLIGHT)]
    assert producer.flush(PATIENCE_S)
    assert [future.result().first_id for future in futures] == list(range(1, len(futures) + 1))
    assert bodies(bus.read("t")) == [b"%d" % n for n in range(len(futures))]


def test_produce_blocks_at_the_in_flight_limit(bus: Client, pool: ThreadPoolExecutor) -> None:
    producer = bus.producer()
    with held_answers(bus):
        for _ in range(MAX_IN_FLIGHT):
            producer.produce("t", [b"x"])
        blocked = pool.submit(producer.produce, "t", [b"y"])
        with pytest.raises(TimeoutError):
            blocked.result(0.3)
    assert blocked.result(PATIENCE_S).result(PATIENCE_S).first_id == MAX_IN_FLIGHT + 1


def test_refused_batch_does_not_affect_others(bus: Client) -> None:
    bus.act("topic.create", topic="small", shards=1, settings={"max_bytes": 5000})
    producer = bus.producer()
    good = producer.produce("small", [b"x"])
    large = producer.produce("small", [b"x" * 100_000])
    after = producer.produce("small", [b"y"])
    other = producer.produce("other", [b"z"])
    assert good.result().first_id == 1
    with pytest.raises(errors.LimitReached):
        large.result()
    assert after.result().first_id == 2
    assert other.result().first_id == 1
    for name in ("a*b", "_own"):
        with pytest.raises(errors.InvalidTopic):
            producer.produce(name, [b"x"]).result()
    assert not producer.is_closed


def test_new_producer_fences_the_older_one_of_its_name(bus: Client) -> None:
    older = bus.producer("importer")
    older.produce("t", [b"1"]).result()
    newer = bus.producer("importer")
    assert (newer.name, newer.epoch) == ("importer", older.epoch + 1)
    newer.produce("t", [b"2"]).result()
    with pytest.raises(errors.Fenced):
        older.produce("t", [b"3"]).result()
    assert older.is_closed
    with pytest.raises(errors.Fenced):
        older.produce("t", [b"4"])
    newer.produce("t", [b"5"]).result()
    assert sorted(bodies(bus.read("t"))) == [b"1", b"2", b"5"]


def test_anonymous_producer_is_deleted_when_it_is_closed(bus: Client) -> None:
    producer = bus.producer()
    producer.produce("t", [b"x"]).result()
    producer.close()
    producer.close()
    with pytest.raises(errors.ConnectionLost):
        producer.produce("t", [b"y"])
    with pytest.raises(errors.UnknownProducer):
        bus.act("producer.close", producer=producer.name, epoch=producer.epoch)


def test_close_after_a_timeout_deletes_an_anonymous_producer(bus: Client) -> None:
    producer = bus.producer()
    with held_answers(bus):
        future = producer.produce("t", [b"x"])
        producer.close(0.0)
        assert producer.is_closed
        assert not future.done()
    producer.close()
    assert future.result(PATIENCE_S).first_id == 1
    with pytest.raises(errors.UnknownProducer):
        bus.act("producer.close", producer=producer.name, epoch=producer.epoch)


def test_a_callback_may_use_the_bus(bus: Client) -> None:
    producer = bus.producer()
    found: list[int] = []

    def look(_: object) -> None:
        found.append(bus.act("bounds", topic="t")["next_id"])
        producer.produce("t", [b"from within"])

    producer.produce("t", [b"x"]).add_done_callback(look)
    until(lambda: bus.act("bounds", topic="t")["next_id"] == 3, "the second message")
    assert found == [2]


def test_batch_over_the_limit_of_the_port_is_too_large(bus: Client) -> None:
    with pytest.raises(errors.TooLarge):
        bus.producer().produce("t", [b"x" * (32 << 20)] * 5).result()


def test_stages_become_visible_at_once(bus: Client) -> None:
    stage = bus.stage()
    stage.put("one", [b"a"])
    stage.put("other", [b"b"], ["key"])
    stage.close()
    assert bodies(bus.read("one")) == []
    assert len(bus.publish([stage])["spans"]) == 2
    assert bodies(bus.read("one")) + bodies(bus.read("other")) == [b"a", b"b"]


# --- reading and waiting


def test_a_read_has_bounds(bus: Client) -> None:
    bus.producer().produce("t", [b"%d" % n for n in range(10)], ["k"] * 10).result()
    assert bodies(bus.read("t", start=3, end=6)) == [b"2", b"3", b"4"]
    assert len(bodies(bus.read("t", max_rows=4))) == 4
    shard = bus.act("wait", positions=_everywhere("t"), timeout_ms=0)["news"][0]["shard"]
    assert bodies(bus.read("t", shard, 8)) == [b"8", b"9"]


def test_following_read_returns_new_messages(bus: Client, pool: ThreadPoolExecutor) -> None:
    bus.act("topic.create", topic="t")
    reading = bus.read("t", wait_s=math.inf)
    first = pool.submit(next, reading)
    bus.producer().produce("t", [b"news"]).result()
    assert bodies([first.result(PATIENCE_S)]) == [b"news"]
    second = pool.submit(next, reading, None)
    reading.cancel()
    assert second.result(PATIENCE_S) is None


def test_close_ends_waits_at_once(
    bus: Client, tmp_path: Any, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_waits, "CALLER_CHECK_INTERVAL_S", 3600.0)
    bus.act("topic.create", topic="t")
    with open_bus(f"memory:{tmp_path}/x") as other:
        other.act("topic.create", topic="t")
        leaving = open_bus(f"memory:{tmp_path}/x")
        joined = leaving.act("group.join", topic="t", consumer="c")
        asked = {"topic": "t", "group": "default", "consumer": "c", "epoch": joined["epoch"]}
        answer, _ = leaving.fetch(**asked, held=[], max_rows=10, max_bytes=1000, wait_ms=0)
        held = [
            {"shard": shard["shard"], "epoch": shard["epoch"], "next": shard["end"]}
            for shard in answer["assigned"]
        ]
        fetch = pool.submit(
            leaving.fetch, **asked, held=held, max_rows=10, max_bytes=1000, wait_ms=30_000
        )
        read = pool.submit(next, leaving.read("t", wait_s=math.inf), None)
        news = pool.submit(leaving.act, "wait", positions=_everywhere("t"), timeout_ms=30_000)
        until(lambda: count_waits(leaving) == 3, "all three to wait")
        leaving.close()
        for waiting in (fetch, read):
            with pytest.raises(errors.ConnectionLost):
                waiting.result(PATIENCE_S)
        assert news.result(PATIENCE_S) == {"news": []}
        assert other.act("topic.list")["topics"]


def test_close_of_the_last_client_ends_waits(bus: Client, pool: ThreadPoolExecutor) -> None:
    bus.act("topic.create", topic="t")
    read = pool.submit(next, bus.read("t", wait_s=math.inf), None)
    until(lambda: count_waits(bus) == 1, "the read to wait")
    bus.close()
    with pytest.raises(errors.ConnectionLost, match="closed"):  # as of a client over Flight
        read.result(PATIENCE_S)


def _everywhere(topic: str) -> list[dict[str, Any]]:
    return [{"topic": topic, "shard": shard, "offset": 0} for shard in range(16)]


def test_request_whose_client_is_closed_meanwhile_loses_its_connection(tmp_path: Any) -> None:
    """The store closes with its last client; the request reports the client, as over Flight."""
    leaving = open_bus(f"memory:{tmp_path}/x")
    leaving.act("topic.create", topic="t")
    transport = leaving._connection
    assert isinstance(transport, InProcessTransport)
    port_opened = transport.open_port()
    port = port_opened.__enter__()
    leaving.close()
    with pytest.raises(errors.StoreClosed) as closed:
        port.act(transport.caller, "topic.info", {"topic": "t"})
    with pytest.raises(errors.ConnectionLost):
        port_opened.__exit__(closed.type, closed.value, closed.tb)
