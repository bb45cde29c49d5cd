"""The client on a real bus: reads, writes, stages, waits, and the class of each error."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from polybus import errors
from polybus.native import Client, ClientOptions, Produced
from tests.rig.native_bus import NativeBus

LATER_NS = 2**62


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
    name = request.node.name[:200].replace("*", "")
    client.create_topic(name, shards=1)
    return str(name)


def bodies(reading) -> list[bytes]:
    return [body for batch in reading for body in batch.column("body").to_pylist()]


def fill(client: Client, topic: str, *messages: bytes) -> Produced:
    with client.producer() as producer:
        return producer.produce(topic, messages).result(20)


def test_produced_messages_are_read(client, topic):
    with client.producer() as producer:
        assert producer.produce(topic, [b"a", b""]).result(20)[:3] == (1, 2, False)
        assert producer.produce(topic, [b"c"], [None]).result(20)[:3] == (3, 3, False)
    batch = next(client.read(topic))
    assert batch.column("id").to_pylist() == [1, 2, 3]
    assert batch.column("offset").to_pylist() == [0, 1, 2]
    assert batch.column("body").to_pylist() == [b"a", b"", b"c"]


def test_read_of_some_columns_includes_the_position(client, topic):
    with client.producer() as producer:
        producer.produce(topic, [b"a", b"b", b"c"]).result(20)
    of_all, of_one = (client.read(topic, one, columns=["body"]) for one in ("all", 0))
    assert next(of_all).to_pydict() == {"id": [1, 2, 3], "body": [b"a", b"b", b"c"]}
    assert next(of_one).to_pydict() == {"offset": [0, 1, 2], "body": [b"a", b"b", b"c"]}
    assert [batch.num_rows for batch in client.read(topic, 0, 1, columns=())] == [2]


def test_arrow_batch_is_produced(client, topic):
    kind = pa.map_(pa.utf8(), pa.binary())
    rows = pa.record_batch(
        [["k", None], [b"one", b"two"], [5, None], pa.array([[("h", b"v")], None], kind)],
        names=["shard_key", "body", "insertion_ms", "headers"],
    )
    rows = rows.cast(pa.schema(rows.schema).set(1, pa.field("body", pa.binary())))
    with client.producer() as producer:
        producer.produce_rows(topic, rows).result(20)
    (read,) = client.read(topic)
    assert read.column("shard_key").to_pylist() == ["k", None]
    assert read.column("insertion_ms")[0].as_py() == 5
    assert read.column("insertion_ms")[1].as_py() > 1_600_000_000_000
    assert read.column("headers").to_pylist() == [[("h", b"v")], None]


def test_keys_choose_shards(client, topic):
    """One key is one shard, in order; messages without a key share one shard per batch."""
    name = topic + ".wide"
    client.create_topic(name, shards=4)
    with client.producer() as producer:
        for n in range(0, 400, 20):
            batch = range(n, n + 20)
            producer.produce(name, [b"%d" % i for i in batch], [f"k{i % 7}" for i in batch])
    rows = pa.Table.from_batches(client.read(name)).to_pylist()
    for key in range(7):
        mine = [row for row in rows if row["shard_key"] == f"k{key}"]
        assert [int(row["body"]) for row in mine] == [n for n in range(400) if n % 7 == key]
        assert len({row["shard"] for row in mine}) == 1
    assert len({row["shard"] for row in rows}) > 1
    assert [row["id"] for row in rows] == list(range(1, 401))
    found = fill(client, name, b"a", b"b", b"c")
    last = pa.Table.from_batches(client.read(name, start=found.first_id))
    assert len(set(last.column("shard").to_pylist())) == 1


def test_merged_batches_have_ids_of_their_own(client, topic):
    """Without keys each future has its own ids, with keys the range of the merged batch."""
    with client.producer() as producer:
        plain = [producer.produce(topic, [b"p%d" % n] * 2) for n in range(50)]
        keyed = [producer.produce(topic, [b"k%d" % n], [f"{n}"]) for n in range(50)]
    ids = {row["body"]: row["id"] for row in pa.Table.from_batches(client.read(topic)).to_pylist()}
    for n, future in enumerate(plain):
        assert future.result(0).last_id == ids[b"p%d" % n]
        assert future.result(0).first_id == ids[b"p%d" % n] - 1
    for n, future in enumerate(keyed):
        assert future.result(0).first_id <= ids[b"k%d" % n] <= future.result(0).last_id


def test_ranges_are_ids_of_all_and_offsets_of_a_shard(client, topic):
    fill(client, topic, b"0", b"1", b"2", b"3", b"4")
    assert bodies(client.read(topic, start=2, end=4)) == [b"1", b"2"]
    assert bodies(client.read(topic, 0, start=2, end=4)) == [b"2", b"3"]
    assert bodies(client.read(topic, max_rows=2)) == [b"0", b"1"]
    assert bodies(client.read(topic, start=4, end=100, max_rows=50)) == [b"3", b"4"]
    assert bodies(client.read(topic, start=6)) == []


def test_bounds_find_and_trim(client, topic):
    fill(client, topic, b"old", b"new")
    bounds = client.bounds(topic)
    assert (bounds["first_id"], bounds["next_id"]) == (1, 3)
    assert client.find(topic, bounds["timestamp_ns"]) == 1
    assert client.find(topic, bounds["timestamp_ns"], shard=0) == 0
    assert client.find(topic, LATER_NS) == 3
    assert client.trim(topic, {0: 1})["first_id"] == 2
    assert bodies(client.read(topic)) == [b"new"]
    with pytest.raises(errors.Trimmed):
        list(client.read(topic, 0, start=0))
    assert client.topic_stats(topic)["all"]["trimmed"] == 1


def test_wait_ends_with_news(client, topic):
    assert client.wait([(topic, 0, 0)], 0.01) == []
    with client.producer() as producer:
        waiting = threading.Thread(target=lambda: news.append(client.wait([(topic, 0, 0)], 60)))
        news: list[object] = []
        waiting.start()
        producer.produce(topic, [b"x"]).result(20)
        waiting.join(30)
    assert news == [[{"topic": topic, "shard": 0, "end": 1}]]


def test_waiting_read_returns_new_messages(client, topic):
    with client.producer() as producer:
        producer.produce(topic, [b"first"]).result(20)
        reading = client.read(topic, wait_s=math.inf)
        assert next(reading).column("body").to_pylist() == [b"first"]
        producer.produce(topic, [b"second"])
        assert next(reading).column("body").to_pylist() == [b"second"]
        reading.close()


def test_waiting_read_can_be_cancelled(client, topic):
    fill(client, topic, b"only")
    reading, seen = client.read(topic, wait_s=math.inf), threading.Event()
    found: list[bytes] = []

    def follow() -> None:
        for batch in reading:
            found.extend(batch.column("body").to_pylist())
            seen.set()

    following = threading.Thread(target=follow)
    following.start()
    assert seen.wait(20)
    reading.cancel()
    following.join(20)
    assert not following.is_alive()
    assert found == [b"only"]


def test_stage_is_visible_when_published(client, topic):
    client.create_topic(topic + ".b", shards=1)
    with client.stage() as stage:
        stage.put(topic, [b"1", b"2"])
        stage.put(topic + ".b", [b"3"], [None])
        stage.put(topic, [b"4"])
        assert bodies(client.read(topic)) == []
        done = client.publish([stage])
    assert {span["topic"]: span["count"] for span in done["spans"]} == {topic: 3, topic + ".b": 1}
    assert bodies(client.read(topic)) == [b"1", b"2", b"4"]
    assert bodies(client.read(topic + ".b")) == [b"3"]
    with pytest.raises(errors.StageGone):
        client.publish([stage.name])


def test_stamped_publish_is_executed_once(client, topic):
    opened = client.act("producer.open", producer="publisher")
    stamp = {"producer": "publisher", "epoch": opened["epoch"], "counter": 1}
    with client.stage() as stage:
        stage.put(topic, [b"once"])
        first = client.publish([stage], stamp)
        again = client.publish([stage], stamp)
    assert (first["duplicate"], again["duplicate"]) == (False, True)
    assert first["spans"] == again["spans"]
    assert bodies(client.read(topic)) == [b"once"]


def test_topics_are_created_listed_and_dropped(client, topic):
    made = client.create_topic(topic + ".more", settings={"max_bytes": 1000})
    assert made["settings"] == {"keep": "all", "max_bytes": 1000}
    assert [one["topic"] for one in client.topics(topic + "*")] == [topic, topic + ".more"]
    client.drop_topic(topic)
    assert [one["topic"] for one in client.topics(topic + "*")] == [topic + ".more"]


def test_producing_creates_a_missing_topic(bus):
    with NativeBus("--config", str(one_shard(bus))) as other, other.client() as client:
        assert fill(client, "made", b"x").first_id == 1
        assert client.topic("made")["shards"] == 1


def one_shard(bus: NativeBus):
    path = bus.folder / "one_shard.toml"
    path.write_text("[native]\ndefault_shards = 1\n")
    return path


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (errors.DoesNotExist, lambda client, topic: client.topic("missing")),
        (errors.DoesNotExist, lambda client, topic: client.bounds("missing")),
        (errors.DoesNotExist, lambda client, topic: list(client.read("missing"))),
        (errors.DoesNotExist, lambda client, topic: client.drop_topic("missing")),
        (errors.AlreadyExists, lambda client, topic: client.create_topic(topic)),
        (errors.InvalidTopic, lambda client, topic: client.create_topic("_hidden")),
        (errors.MalformedRequest, lambda client, topic: client.act("topic.fly")),
        (errors.MalformedRequest, lambda client, topic: list(client.read(topic, 7))),
        (errors.MalformedRequest, lambda client, topic: client.trim(topic, {0: -1})),
        (errors.MalformedRequest, lambda client, topic: client.reshard(topic, 0)),
        (errors.MalformedRequest, lambda client, topic: client.reshard(topic, 513)),
        (errors.DoesNotExist, lambda client, topic: client.reshard("missing", 2)),
        (errors.StageGone, lambda client, topic: client.publish(["nothing"])),
        (errors.UnknownProducer, lambda c, t: c.act("producer.close", producer="who", epoch=1)),
    ],
)
def test_errors_have_their_classes(client, topic, error, call):
    with pytest.raises(error) as caught:
        call(client, topic)
    assert type(caught.value) is error
    assert "Detail" not in str(caught.value)


def test_no_bus_is_not_connected(bus):
    nobody = Client("polybus://127.0.0.1:1", ClientOptions(connect_timeout_s=0))
    with nobody, pytest.raises(errors.NotConnected, match="no bus answers"):
        nobody.topics()
    reader = Client("polybus://127.0.0.1:1", ClientOptions(connect_timeout_s=0))
    with reader, pytest.raises(errors.NotConnected):
        list(reader.read("any"))


@pytest.mark.parametrize("url", ["127.0.0.1:6570", "http://a:1", "polybus://a", "polybus://a:x"])
def test_peer_that_is_not_a_bus_is_reported(url):
    with pytest.raises(errors.AddressError, match="invalid bus URL"):
        Client(url)


def test_invalid_options_are_refused(tmp_path):
    with pytest.raises(errors.UsageError, match="max_in_flight"):
        ClientOptions(max_in_flight=17)
    with pytest.raises(errors.UsageError, match="given together"):
        ClientOptions(certificate=tmp_path / "cert.pem")


def test_client_closed_by_another_thread_ends_its_reads():
    """As of a client in process; see `test_close_of_the_last_client_ends_waits`."""
    # The bus ends a read after `max_wait_s`; the next read finds the client closed.
    with NativeBus(env={"POLYBUS_NATIVE_MAX_WAIT_S": "0.5"}) as bus, ThreadPoolExecutor() as pool:
        client, is_reading = bus.client(), threading.Event()
        fill(client, "t", b"first")

        def follow() -> None:
            for _ in client.read("t", wait_s=math.inf):
                is_reading.set()

        reader = pool.submit(follow)
        assert is_reading.wait(20)
        client.close()
        with pytest.raises(errors.ConnectionLost, match="closed"):
            reader.result(20)


def test_closed_client_raises(bus):
    client = bus.client()
    producer = client.producer()
    client.close()
    with pytest.raises(errors.ConnectionLost, match="closed"):
        client.topics()
    with pytest.raises(errors.ConnectionLost, match="closed"):
        producer.produce("any", [b"x"])
