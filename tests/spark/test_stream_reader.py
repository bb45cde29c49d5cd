"""The stream reader, called as Spark calls it, without Spark: positions, plans, limits."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType

from polybus.errors import DoesNotExist, PolybusError, TopicDeleted, Trimmed, UsageError
from polybus.native import Client
from polybus.spark.source.log_access import LogAccess, open_log_access
from polybus.spark.source.read_bounds import TopicSelection
from polybus.spark.source.stream_reader import StreamReader
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions
from tests.rig.native_bus import NativeBus

ALL = ReadAllAvailable()


class Query:
    """A run of a query. Positions pass through JSON and tasks through pickle, as in Spark."""

    def __init__(self, **options: str) -> None:
        self.reader = StreamReader(SparkOptions(options, SOURCE_OPTIONS), SCHEMA)
        self.at: dict[str, Any] | None = None

    def start(self) -> dict[str, Any]:
        return self.at or _through_json(self.reader.initialOffset())

    def next_end(self) -> dict[str, Any]:
        limit = self.reader.getDefaultReadLimit()
        return _through_json(self.reader.latestOffset(self.start(), limit))

    def rows(self, start: dict[str, Any], end: dict[str, Any]) -> list[bytes]:
        tasks = pickle.loads(pickle.dumps((self.reader, self.reader.partitions(start, end))))
        reader, partitions = tasks
        return [
            body
            for partition in partitions
            for batch in reader.read(partition)
            for body in batch.column("body").to_pylist()
        ]

    def batch(self) -> list[bytes]:
        end = self.next_end()
        rows = self.rows(self.start(), end)
        self.at = end
        self.reader.commit(end)
        return sorted(rows)


def _through_json(offset: dict[str, Any]) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(json.dumps(offset))
    return decoded


@pytest.fixture(params=["polybus", "lmdb"])
def url(request: pytest.FixtureRequest, bus: NativeBus) -> str:
    return bus.url if request.param == "polybus" else f"lmdb:{bus.folder / 'data'}"


Produce = Callable[..., None]


@pytest.fixture
def produce(client: Client) -> Produce:
    """Messages with these numbers, in all shards."""

    def produce(topic: str, *numbers: int) -> None:
        with client.producer() as producer:
            keys = [f"k{number}" for number in numbers]
            producer.produce(topic, [b"%02d" % number for number in numbers], keys).result()

    return produce


def bodies(*numbers: int) -> list[bytes]:
    return [b"%02d" % number for number in numbers]


# --- start position


def test_query_reads_from_the_start_and_continues(url, produce, topic):
    produce(topic, *range(5))
    query = Query(bus=url, topic=topic)
    assert query.batch() == bodies(*range(5))
    at = query.at
    assert query.next_end() == at, "the position must not change without new messages"
    produce(topic, 5, 6)
    assert query.batch() == bodies(5, 6)


def test_latest_is_resolved_once(url, produce, topic):
    produce(topic, 0)
    query = Query(bus=url, topic=topic, startingOffsets="latest")
    first = query.start()
    produce(topic, 1)
    assert query.start() == first, "the initial position must not change"
    assert query.batch() == bodies(1)


@pytest.mark.sabotage("latest-again", expects=r"assert \[\] == \[b'01'\]")
def test_latest_survives_a_restart_before_the_first_commit(url, produce, topic):
    """Spark has stored the end of the first batch, and asks a new process for its start."""
    produce(topic, 0)
    old = Query(bus=url, topic=topic, startingOffsets="latest")
    old.start()
    produce(topic, 1)
    end = old.next_end()
    produce(topic, 2)
    new = Query(bus=url, topic=topic, startingOffsets="latest")
    assert new.rows(new.start(), end) == bodies(1)
    new.at = end
    assert new.batch() == bodies(2)


def test_empty_first_batch_stores_latest(url, produce, topic):
    produce(topic, 0)
    old = Query(bus=url, topic=topic, startingOffsets="latest")
    end = old.next_end()
    assert end != old.start(), "the first batch must store the initial position"
    assert old.rows(old.start(), end) == []
    produce(topic, 1)
    new = Query(bus=url, topic=topic, startingOffsets="latest")
    assert new.rows(new.start(), end) == []
    new.at = end
    assert new.batch() == bodies(1)


def test_query_starts_at_offsets_or_times(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        for body in bodies(0, 1, 2):
            producer.produce(topic, [body]).result()
    (middle,) = client.read(topic, 0, 1, 2)
    offsets = json.dumps({topic: {"0": 1}})
    assert Query(bus=url, topic=topic, startingOffsets=offsets).batch() == bodies(1, 2)
    time_ms = middle.column("timestamp_ns")[0].as_py() // 1_000_000
    batch = Query(bus=url, topic=topic, startingTimestamp=str(time_ms)).batch()
    assert batch[-2:] == bodies(1, 2)
    assert Query(bus=url, topic=topic, startingTimestamp="2999-01-01").batch() == []


# --- limits of a batch


def test_max_rows_per_batch(url, produce, topic):
    produce(topic, *range(50))
    query = Query(bus=url, topic=topic, maxRowsPerBatch="7")
    sizes, received = [], []
    while rows := query.batch():
        sizes.append(len(rows))
        received += rows
    assert sizes == [7] * 7 + [1]
    assert sorted(received) == bodies(*range(50))


def test_max_bytes_per_batch_follows_the_message_size(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, [b"s"] * 5000).result()
        producer.produce(topic, [bytes(10_000)] * 100).result()
    query = Query(bus=url, topic=topic, maxBytesPerBatch="100000")
    sizes = []
    while rows := query.batch():
        sizes.append(sum(map(len, rows)))
    assert sum(sizes) == 5000 + 100 * 10_000
    assert max(sizes) <= 120_000


def test_max_bytes_per_batch_admits_at_least_one_message(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, [bytes(10_000)] * 3).result()
    query = Query(bus=url, topic=topic, maxBytesPerBatch="10")
    assert [len(query.batch()) for _ in range(4)] == [1, 1, 1, 0]


def test_read_all_available_ignores_limits(url, produce, topic):
    produce(topic, *range(20))
    query = Query(bus=url, topic=topic, maxRowsPerBatch="3")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(3)
    end = _through_json(query.reader.latestOffset(query.start(), ALL))
    assert len(query.rows(query.start(), end)) == 20


def test_available_now_ends_at_the_end_of_its_start(url, produce, topic):
    produce(topic, *range(10))
    query = Query(bus=url, topic=topic, maxRowsPerBatch="4")
    query.reader.prepareForTriggerAvailableNow()
    produce(topic, 10, 11)
    assert [len(query.batch()) for _ in range(4)] == [4, 4, 2, 0]
    again = Query(bus=url, topic=topic)
    again.at = query.at
    assert again.batch() == bodies(10, 11)


def test_batch_planned_again_has_the_same_rows(url, produce, topic):
    produce(topic, *range(40))
    query = Query(bus=url, topic=topic)
    end = query.next_end()
    whole = query.rows(query.start(), end)
    other = Query(bus=url, topic=topic, rowsPerPartition="3")
    other.reader._initial = query.reader._initial
    assert len(other.reader.partitions(query.start(), end)) > 10
    assert sorted(other.rows(query.start(), end)) == sorted(whole)


# --- new and dropped topics and shards


def test_new_topics_of_a_pattern_are_read_from_their_start(url, produce, topic):
    query = Query(bus=url, topic=f"{topic}.*", startingOffsets="latest")
    assert query.batch() == []
    produce(f"{topic}.a", 1, 2)
    assert query.batch() == bodies(1, 2)
    produce(f"{topic}.b", 3)
    produce(f"{topic}.a", 4)
    assert query.batch() == bodies(3, 4)


def test_new_topic_keeps_its_start_if_its_batch_is_planned_again(url, client, produce, topic):
    produce(f"{topic}.a", 0)
    query = Query(bus=url, topic=f"{topic}.*")
    query.batch()
    produce(f"{topic}.b", 1)
    end = query.next_end()
    shards = {shard["shard"]: shard["end"] for shard in client.bounds(f"{topic}.b")["shards"]}
    client.trim(f"{topic}.b", shards)
    with pytest.raises(Trimmed):
        query.rows(query.start(), end)


def test_available_now_skips_topics_created_later(url, produce, topic):
    produce(f"{topic}.a", 1)
    query = Query(bus=url, topic=f"{topic}.*")
    query.reader.prepareForTriggerAvailableNow()
    produce(f"{topic}.b", 2)
    assert [query.batch(), query.batch()] == [bodies(1), []]


def test_shards_added_by_a_reshard_are_read_from_their_start(tmp_path):
    from polybus.model.commit import Commit
    from polybus.store.engine_registry import open_store
    from polybus.testing.conformance import kit

    folder = tmp_path / "data"
    with open_store(f"lmdb:{folder}") as store:
        old = store.create("t", 1, {})
        store.commit(Commit(appends=(kit.append(old, 0, b"00"),))).result()
        query = Query(bus=f"lmdb:{folder}", topic="t", startingOffsets="latest")
        assert query.batch() == []
        new = store.configure("t", {}, add_shards=2)
        store.commit(Commit(appends=tuple(kit.append(new, n, b"0%d" % n) for n in (1, 2)))).result()
        assert query.batch() == bodies(1, 2)


def test_topic_dropped_while_it_is_read(url, client, produce, topic):
    produce(topic, *range(5))
    query, lenient = (
        Query(bus=url, topic=topic),
        Query(bus=url, topic=topic, failOnDataLoss="false"),
    )
    assert query.batch() == lenient.batch() == bodies(*range(5))
    client.drop_topic(topic)
    with pytest.raises(TopicDeleted, match=f"{topic}.*was dropped.*checkpointLocation"):
        query.next_end()
    assert lenient.batch() == []


def test_topic_dropped_before_an_available_now_run(url, client, produce, topic):
    produce(topic, *range(5))
    options = {"bus": url, "topic": topic}
    query, lenient = Query(**options), Query(**options, failOnDataLoss="false")
    assert query.batch() == lenient.batch() == bodies(*range(5))
    client.drop_topic(topic)
    for run in (query, lenient):
        run.reader.prepareForTriggerAvailableNow()
    with pytest.raises(TopicDeleted, match="was dropped"):
        query.next_end()
    assert lenient.batch() == []


class StaleTopicList:
    """Access whose list of topics contains one that was just dropped."""

    def __init__(self, real: LogAccess, gone: str) -> None:
        self._real, self._gone = real, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def list_topics(self, pattern: str) -> list[str]:
        return [*self._real.list_topics(pattern), self._gone]


def test_topic_dropped_after_the_pattern_matched_is_skipped(bus, produce, topic):
    produce(f"{topic}.a", 1)
    access: Any = StaleTopicList(open_log_access(bus.url), f"{topic}.b")
    assert set(TopicSelection(f"{topic}.*").shards(access)) == {f"{topic}.a"}
    with pytest.raises(DoesNotExist):
        TopicSelection(f"{topic}.b").shards(access)


def test_topic_created_again_continues(url, client, produce, topic):
    produce(topic, *range(5))
    query = Query(bus=url, topic=topic)
    assert query.batch() == bodies(*range(5))
    client.drop_topic(topic)
    produce(topic, 5, 6)
    assert query.batch() == bodies(5, 6)


# --- data loss


def test_trimmed_range_is_reported(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, bodies(*range(10))).result()
    query = Query(bus=url, topic=topic)
    end = query.next_end()
    lenient = Query(bus=url, topic=topic, failOnDataLoss="false")
    client.trim(topic, {0: 4})
    for _ in range(2):
        with pytest.raises(Trimmed, match=f"{topic}.*shard 0: offsets 0 to 3 .*failOnDataLoss"):
            query.rows(query.start(), end)
    assert lenient.rows(query.start(), end) == bodies(*range(4, 10))


def test_range_trimmed_during_a_task(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, bodies(*range(10))).result()
    query = Query(bus=url, topic=topic)
    lenient = Query(bus=url, topic=topic, failOnDataLoss="false")
    end = query.next_end()
    plans = [run.reader.partitions(query.start(), end) for run in (query, lenient)]
    client.trim(topic, {0: 4})
    with pytest.raises(Trimmed, match="offsets 0 to 3"):
        list(query.reader.read(plans[0][0]))
    (batch,) = lenient.reader.read(plans[1][0])
    assert batch.column("offset").to_pylist() == list(range(4, 10))
    client.drop_topic(topic)
    with pytest.raises(Trimmed, match="offsets 0 to 9"):
        list(query.reader.read(plans[0][0]))
    assert list(lenient.reader.read(plans[1][0])) == []


@pytest.mark.sabotage("losses-unseen", expects=r"assert \[1\] == \[\]")
def test_loss_is_never_ignored(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, bodies(*range(10))).result()
    query = Query(bus=url, topic=topic)
    (planned,) = query.reader.partitions(query.start(), query.next_end())
    client.trim(topic, {0: 9})
    try:
        row_counts = [batch.num_rows for batch in query.reader.read(planned)]
    except Trimmed:
        row_counts = []
    assert row_counts == []


def test_log_that_ends_before_the_position_is_reported(url, produce, topic):
    produce(topic, *range(5))
    query = Query(bus=url, topic=topic)
    query.batch()
    assert query.at is not None
    query.at[topic] = {shard: offset + 100 for shard, offset in query.at[topic].items()}
    with pytest.raises(DoesNotExist, match="ends at"):
        query.next_end()


# --- errors


def test_checkpoint_of_another_topic(url, produce, topic):
    produce(f"{topic}.a", 1)
    produce(f"{topic}.b", 2)
    query = Query(bus=url, topic=f"{topic}.a")
    query.batch()
    other = Query(bus=url, topic=f"{topic}.b")
    other.at = query.at
    with pytest.raises(UsageError, match=f"{topic}.a.*another checkpointLocation"):
        other.next_end()
    with pytest.raises(UsageError, match="another checkpointLocation"):
        other.rows(query.start(), query.start())


def test_checkpoint_of_another_source(url, topic):
    query = Query(bus=url, topic=topic)
    query.at = {"sourceVersion": 1, "logOffset": 17}
    with pytest.raises(UsageError, match="another checkpointLocation"):
        query.next_end()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "{none}"}, "there is no .*topic"),
        ({"topic": " , "}, "must name a topic"),
        ({"topic": "_x"}, "option topic"),
        (
            {"topic": "t", "endingOffsets": "latest"},
            "option endingOffsets is not allowed for streams",
        ),
        (
            {"topic": "t", "endingTimestamp": "1"},
            "option endingTimestamp is not allowed for streams",
        ),
        ({"topic": "t", "startingOffsets": "first"}, "earliest, latest, or JSON"),
        ({"topic": "t", "startingOffsets": "[1]"}, "earliest, latest, or JSON"),
        ({"topic": "t", "startingOffsets": '{"t": 1}'}, "shards of a topic must be an object"),
        ({"topic": "t", "startingOffsets": '{"t": {"0": -1}}'}, "is not a shard and an offset"),
        ({"topic": "t", "startingOffsets": '{"t": {"x": 1}}'}, "is not a shard and an offset"),
        ({"topic": "{there}", "startingOffsets": '{"u": {"0": 1}}'}, "names topic 'u'"),
        ({"topic": "{there}", "startingOffsets": '{"{there}": {"99": 1}}'}, "has no shard 99"),
        ({"topic": "{there}", "startingOffsets": '{"{there}": {"0": 99}}'}, "ends at .* 99"),
        ({"topic": "t", "startingTimestamp": "yesterday"}, "a time like"),
        ({"topic": "t", "startingTimestamp": "-1"}, "a time like"),
        ({"topic": "t", "startingTimestamp": "1", "startingOffsets": "latest"}, "not both"),
        ({"topic": "t", "maxRowsPerBatch": "0"}, "maxRowsPerBatch must be an integer > 0"),
        ({"topic": "t", "maxBytesPerBatch": "1k"}, "maxBytesPerBatch must be an integer > 0"),
        ({"topic": "t", "rowsPerPartition": "-1"}, "rowsPerPartition must be an integer > 0"),
        ({"topic": "t", "failOnDataLoss": "perhaps"}, "one of true, false"),
        (
            {"topic": "t", "startingOfsets": "latest"},
            "unknown option 'startingOfsets': use one of bus",
        ),
        ({}, "option topic is missing"),
        ({"topic": ""}, "option topic must not be empty"),
        ({"topic": "t", "bus": "nats://x"}, "NATS is not supported"),
        ({"topic": "t", "bus": "lmdb:"}, "lmdb:PATH"),
        ({"topic": "t", "bus": "http://x"}, "invalid bus URL"),
        ({"topic": "t", "bus": "lmdb:/nowhere/at/all"}, "no such folder"),
    ],
)
def test_invalid_options_are_reported(bus, produce, topic, options, message):
    produce(topic, 1)
    names = {"{there}": topic, "{none}": f"{topic}.none"}
    for short, long in names.items():
        options = {key: value.replace(short, long) for key, value in options.items()}
    with pytest.raises(PolybusError, match=message):
        Query(**{"bus": bus.url, **options}).start()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("bodies binary", "no column 'bodies'.*body"),
        ("body string", "body must be binary, got string"),
    ],
)
def test_schema_with_unknown_columns(columns, message):
    name, kind = columns.split()
    schema = StructType().add(name, kind)
    with pytest.raises(UsageError, match=message):
        StreamReader(SparkOptions({"topic": "t"}, SOURCE_OPTIONS), schema)


def test_progress_is_reported_to_the_bus(bus, client, produce, topic):
    produce(topic, *range(10))
    query = Query(bus=bus.url, topic=topic, maxRowsPerBatch="4")
    query.batch()
    query.batch()
    query.reader.stop()
    (reported,) = client.topic_stats(topic)["queries"]
    assert (reported["lag"], reported["query"]) == (2, query.start()["_query"])
    query.batch()
    query.reader.stop()
    (reported,) = client.topic_stats(topic)["queries"]
    assert reported["lag"] == 0
