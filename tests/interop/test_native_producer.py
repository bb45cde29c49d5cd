"""A producer on a real bus: merged, refused, cut off, fenced; nothing lost, nothing doubled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pyarrow as pa
import pytest

from polybus import errors
from polybus.native import Client, ClientOptions, Produced
from polybus.native.client.put_stream import PutStream
from tests.rig.native_bus import QUICK, NativeBus
from tests.rig.relay import Relay

PATIENCE_S = 60
QUOTA = 100_000
OVER_QUOTA = b"!" * 3_000_000  # more than a connection takes at once: it breaks in the middle


@pytest.fixture(scope="module")
def bus() -> Iterator[NativeBus]:
    with NativeBus() as running:
        yield running


@pytest.fixture
def client(bus: NativeBus) -> Iterator[Client]:
    with bus.client() as one:
        yield one


@pytest.fixture
def topic(client: Client, request: pytest.FixtureRequest) -> str:
    client.create_topic(request.node.name, shards=1, settings={"max_bytes": QUOTA})
    return str(request.node.name)


@pytest.fixture
def relay(bus: NativeBus) -> Iterator[Relay]:
    with Relay(bus.port) as running:
        yield running


@pytest.fixture
def far(relay: Relay) -> Iterator[Client]:
    """A client behind the relay."""
    with Client(f"polybus://127.0.0.1:{relay.port}", ClientOptions(**QUICK)) as one:
        yield one


def stored(client: Client, topic: str) -> list[bytes]:
    return [body for batch in client.read(topic) for body in batch.column("body").to_pylist()]


def rows_of(bodies: list[bytes]) -> pa.RecordBatch:
    columns = [pa.nulls(len(bodies), pa.utf8()), pa.array(bodies, pa.binary())]
    return pa.record_batch(columns, names=["shard_key", "body"])


def batches(client: Client, topic: str) -> int:
    """Count the commits of a topic; messages of one commit have the same timestamp."""
    found = pa.Table.from_batches(client.read(topic))
    return len(set(found.column("timestamp_ns").to_pylist()))


def outcomes(futures: list[Future[Produced]]) -> list[BaseException | None]:
    wait(futures, PATIENCE_S)
    return [future.exception(0) for future in futures]


def test_many_small_produces_become_few_batches(client, topic):
    with client.producer() as producer:
        futures = [producer.produce(topic, [b"%d" % n]) for n in range(2000)]
        ids = [future.result(PATIENCE_S).first_id for future in futures]
    assert ids == list(range(1, 2001))
    assert stored(client, topic) == [b"%d" % n for n in range(2000)]
    assert batches(client, topic) < 400


def test_batches_stay_within_their_bounds(bus, topic):
    with bus.client(max_batch_rows=10, max_in_flight=1) as client:
        with client.producer() as producer:
            for n in range(100):
                producer.produce(topic, [b"%d" % n] * 4)
        assert stored(client, topic) == [b"%d" % n for n in range(100) for _ in range(4)]
        assert batches(client, topic) >= 50  # two of four fit, three do not


def test_refused_batch_does_not_affect_others(client, topic):
    bodies = [OVER_QUOTA if n % 50 == 7 else b"%d" % n for n in range(500)]
    with client.producer() as producer:
        futures = [producer.produce(topic, [body]) for body in bodies]
    is_refused = [isinstance(error, errors.LimitReached) for error in outcomes(futures)]
    assert is_refused == [body is OVER_QUOTA for body in bodies]
    assert stored(client, topic) == [body for body in bodies if body is not OVER_QUOTA]


def test_refusals_on_a_connection_that_breaks(client, topic, relay, far):
    """The bus must not accept late copies of refused or renumbered batches."""
    bodies = [OVER_QUOTA if n % 40 == 7 else b"%d" % n for n in range(300)]
    futures: list[Future[Produced]] = []
    with far.producer() as producer:
        for n, body in enumerate(bodies):
            futures.append(producer.produce(topic, [body]))
            if n % 25 in (8, 12):
                wait(futures[-20:-15], PATIENCE_S)
                relay.cut()
        found = outcomes(futures)
    assert relay.connections > 5
    is_refused = [isinstance(error, errors.LimitReached) for error in found]
    assert is_refused == [body is OVER_QUOTA for body in bodies]
    assert stored(client, topic) == [body for body in bodies if body is not OVER_QUOTA]


def test_lost_connection_is_reopened_without_another_message(client, topic, relay, far):
    with far.producer() as producer:
        producer.produce(topic, [b"before"]).result(PATIENCE_S)
        relay.hold()
        future = producer.produce(topic, [b"alone"])
        relay.cut()
        relay.release()
        assert future.result(PATIENCE_S).first_id == 2
    assert stored(client, topic) == [b"before", b"alone"]


def test_batches_cut_in_the_middle_are_sent_again(client, topic, relay, far):
    """No future fails, because only the connection was lost."""
    client.create_topic(f"{topic}.wide", shards=1)
    bodies = [b"%d" % n * 3_000_000 for n in range(4)]
    with far.producer() as producer:
        for _ in range(4):
            relay.hold()
            futures = [producer.produce(f"{topic}.wide", [body]) for body in bodies]
            relay.cut()
            relay.release()
            assert outcomes(futures) == [None] * 4
    assert stored(client, f"{topic}.wide") == bodies * 4


@pytest.mark.parametrize("is_sent", [False, True])
def test_interrupted_send_loses_and_duplicates_nothing(client, topic, monkeypatch, is_sent):
    """Ctrl-C, before the batch was given to gRPC or after."""
    send, interrupted = PutStream.send, []

    def once(stream: PutStream, rows: pa.RecordBatch, stamp: dict[str, Any] | None) -> None:
        if is_sent or interrupted:
            send(stream, rows, stamp)
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt

    with client.producer() as producer:
        producer.produce_rows(topic, rows_of([b"first"])).result(PATIENCE_S)
        monkeypatch.setattr(PutStream, "send", once)
        with pytest.raises(KeyboardInterrupt):
            producer.produce_rows(topic, rows_of([b"second"]))
        producer.produce_rows(topic, rows_of([b"third"])).result(PATIENCE_S)
    assert stored(client, topic) == [b"first", b"second", b"third"]


def test_topics_alternate(client, topic):
    names = [topic, f"{topic}.1", f"{topic}.2"]
    for name in names[1:]:
        client.create_topic(name, shards=1)
    with client.producer() as producer:
        futures = [producer.produce(names[n // 3 % 3], [b"%d" % n]) for n in range(90)]
        assert outcomes(futures) == [None] * 90
    for index, name in enumerate(names):
        assert stored(client, name) == [b"%d" % n for n in range(90) if n // 3 % 3 == index]


def test_denied_topic_does_not_stop_others(client, topic):
    with client.producer() as producer:
        good = [producer.produce(topic, [b"%d" % n]) for n in range(3)]
        bad = producer.produce("_forbidden", [b"x"])
        good += [producer.produce(topic, [b"%d" % n]) for n in range(3, 6)]
        assert outcomes(good) == [None] * 6
        with pytest.raises(errors.InvalidTopic):
            bad.result(PATIENCE_S)
    assert stored(client, topic) == [b"%d" % n for n in range(6)]


def test_lists_and_arrow_batches_keep_their_order(client, topic):
    schema = pa.schema([pa.field("shard_key", pa.utf8()), pa.field("body", pa.binary())])
    with client.producer() as producer:
        for n in range(40):
            if n % 4 < 2:
                producer.produce(topic, [b"%d" % n])
            else:
                rows = pa.record_batch([[None], [b"%d" % n]], schema=schema)
                producer.produce_rows(topic, rows)
    assert stored(client, topic) == [b"%d" % n for n in range(40)]


def test_threads_share_a_producer(client, topic):
    def work(who: int) -> None:
        for n in range(300):
            producer.produce(topic, [b"%d:%d" % (who, n)])

    with client.producer() as producer:
        threads = [threading.Thread(target=work, args=(who,)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert producer.flush(PATIENCE_S)
        found = stored(client, topic)
    for who in range(6):
        mine = [body for body in found if body.startswith(b"%d:" % who)]
        assert mine == [b"%d:%d" % (who, n) for n in range(300)]
    assert len(found) == 1800


def test_new_producer_fences_the_older_one_of_its_name(client, topic):
    old = client.producer("taken over")
    old.produce(topic, [b"old"]).result(PATIENCE_S)
    with client.producer("taken over") as new:
        assert new.epoch == old.epoch + 1
        new.produce(topic, [b"new"]).result(PATIENCE_S)
        with pytest.raises(errors.Fenced):
            old.produce(topic, [b"too late"]).result(PATIENCE_S)
        with pytest.raises(errors.Fenced):
            old.produce(topic, [b"too late"])
        new.produce(topic, [b"goes on"]).result(PATIENCE_S)
    old.close()
    assert stored(client, topic) == [b"old", b"new", b"goes on"]


def test_anonymous_producer_is_deleted_when_it_closes(client, topic):
    with client.producer() as producer:
        producer.produce(topic, [b"x"]).result(PATIENCE_S)
    with pytest.raises(errors.UnknownProducer):
        client.act("producer.close", producer=producer.name, epoch=producer.epoch)


def test_close_waits_for_all_batches(client, topic):
    producer = client.producer()
    futures = [producer.produce(topic, [b"%d" % n]) for n in range(100)]
    producer.close()
    assert all(future.done() for future in futures)
    assert len(stored(client, topic)) == 100
    producer.close()
    with pytest.raises(errors.ConnectionLost, match="closed"):
        producer.produce(topic, [b"x"])


def test_close_waits_at_most_its_timeout(topic, relay, far):
    producer = far.producer()
    producer.produce(topic, [b"x"]).result(PATIENCE_S)
    relay.hold()
    futures = [producer.produce(topic, [b"%d" % n] * 1000) for n in range(50)]
    assert not producer.flush(0.01)
    producer.close(0.01)
    assert {type(error) for error in outcomes(futures)} == {errors.ConnectionLost}
    relay.release()


def test_pending_bytes_are_bounded(bus, topic, relay):
    options = ClientOptions(**QUICK | {"max_waiting_bytes": 10_000})
    with Client(f"polybus://127.0.0.1:{relay.port}", options) as client:
        producer = client.producer()
        relay.hold()
        handed_over: list[Future[Produced]] = []

        def work() -> None:
            for _ in range(6):
                handed_over.append(producer.produce(topic, [b"x" * 4000]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert len(handed_over) == 2
        relay.release()
        thread.join(PATIENCE_S)
        assert outcomes(handed_over) == [None] * 6


def test_blocked_produce_fails_when_the_producer_closes(bus, topic, relay):
    options = ClientOptions(**QUICK | {"max_waiting_bytes": 1000})
    client = Client(f"polybus://127.0.0.1:{relay.port}", options)
    producer, texts = client.producer(), []
    relay.hold()
    producer.produce(topic, [b"x" * 2000])

    def work() -> None:
        try:
            producer.produce(topic, [b"y" * 2000])
        except errors.ConnectionLost as error:
            texts.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    producer.close(0.2)
    thread.join(PATIENCE_S)
    assert texts == ["the producer is closed"]


def test_cancelled_batch_is_never_sent(client, topic, relay, far):
    with far.producer() as producer:
        producer.produce(topic, [b"first"]).result(PATIENCE_S)
        relay.hold()
        futures = [producer.produce(topic, [b"%d" % n]) for n in range(200)]
        cancelled = [future.cancel() for future in futures]
        relay.release()
    assert True in cancelled
    kept = [b"%d" % n for n, was in enumerate(cancelled) if not was]
    assert stored(client, topic) == [b"first", *kept]


def test_failing_callback_does_not_affect_others(client, topic):
    with client.producer() as producer:
        future = producer.produce(topic, [b"x"])
        future.add_done_callback(lambda _: 1 / 0)
        future.result(PATIENCE_S)
        assert producer.produce(topic, [b"y"]).result(PATIENCE_S).first_id == 2


def test_produce_timeout_ends_the_producer(topic, relay):
    options = ClientOptions(**QUICK | {"produce_timeout_s": 0.2})
    with Client(f"polybus://127.0.0.1:{relay.port}", options) as client:
        producer = client.producer()
        producer.produce(topic, [b"x"]).result(PATIENCE_S)
        relay.close()
        with pytest.raises(errors.Unavailable):
            producer.produce(topic, [b"y"]).result(PATIENCE_S)
        with pytest.raises(errors.Unavailable):
            producer.produce(topic, [b"z"])


@pytest.mark.parametrize(
    ("bodies", "keys", "says"),
    [
        ([], None, "at least one row"),
        (b"one", None, "bodies must be a list of bytes"),
        (["text"], None, "body must be bytes, got str"),
        ([None], None, "body must be bytes, got NoneType"),
        ([b"x"], ["a", "b"], "2 keys for 1 bodies"),
        ([b"x"], [b"a"], "key must be str or None"),
        ([b"x"], ["\udc80"], "UTF-8"),
    ],
)
def test_invalid_messages_raise_at_once(client, bodies, keys, says):
    with client.producer() as producer, pytest.raises(errors.MalformedRequest, match=says):
        producer.produce("any", bodies, keys)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"body": pa.array([b"x"])}, "shard_key: the column is missing"),
        ({"shard_key": pa.array(["a"]), "body": pa.array(["x"])}, "body: the type is string"),
        ({"shard_key": pa.array(["a"]), "body": pa.array([None], pa.binary())}, "must not be null"),
        (
            {"shard_key": pa.array([], pa.utf8()), "body": pa.array([], pa.binary())},
            "at least one row",
        ),
    ],
)
def test_invalid_rows_raise_at_once(client, rows, says):
    batch = pa.record_batch(list(rows.values()), names=list(rows))
    with client.producer() as producer, pytest.raises(errors.MalformedRequest, match=says):
        producer.produce_rows("any", batch)
