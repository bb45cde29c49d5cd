"""The stream's own part, asked as Spark asks it, without Spark: positions, plans, bounds."""

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
    """A run of a query: what goes to Spark and comes back is JSON, and tasks are pickled."""

    def __init__(self, **options: str) -> None:
        self.reader = StreamReader(SparkOptions(options, SOURCE_OPTIONS), SCHEMA)
        self.at: dict[str, Any] | None = None

    def start(self) -> dict[str, Any]:
        return self.at or _travelled(self.reader.initialOffset())

    def next_end(self) -> dict[str, Any]:
        limit = self.reader.getDefaultReadLimit()
        return _travelled(self.reader.latestOffset(self.start(), limit))

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


def _travelled(offset: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found


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


# --- where it begins


def test_from_the_start_and_on(url, produce, topic):
    produce(topic, *range(5))
    query = Query(bus=url, topic=topic)
    assert query.batch() == bodies(*range(5))
    at = query.at
    assert query.next_end() == at, "nothing new: Spark must see the same position"
    produce(topic, 5, 6)
    assert query.batch() == bodies(5, 6)


def test_latest_is_resolved_once_and_kept(url, produce, topic):
    produce(topic, 0)
    query = Query(bus=url, topic=topic, startingOffsets="latest")
    first = query.start()
    produce(topic, 1)
    assert query.start() == first, "asked again, it is the same place"
    assert query.batch() == bodies(1)


@pytest.mark.sabotage("latest-again", expects=r"assert \[\] == \[b'01'\]")
def test_latest_is_kept_over_a_restart_before_the_first_commit(url, produce, topic):
    """Spark has written where the first batch ends, and asks a new process where it began."""
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


def test_latest_of_a_silent_topic_is_kept_by_an_empty_first_batch(url, produce, topic):
    produce(topic, 0)
    old = Query(bus=url, topic=topic, startingOffsets="latest")
    end = old.next_end()
    assert end != old.start(), "a batch, so that the checkpoint knows where it began"
    assert old.rows(old.start(), end) == []
    produce(topic, 1)
    new = Query(bus=url, topic=topic, startingOffsets="latest")
    assert new.rows(new.start(), end) == []
    new.at = end
    assert new.batch() == bodies(1)


def test_from_offsets_and_times(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        for body in bodies(0, 1, 2):
            producer.produce(topic, [body]).result()
    (middle,) = client.read(topic, 0, 1, 2)
    offsets = json.dumps({topic: {"0": 1}})
    assert Query(bus=url, topic=topic, startingOffsets=offsets).batch() == bodies(1, 2)
    time_ms = middle.column("timestamp_ns")[0].as_py() // 1_000_000
    found = Query(bus=url, topic=topic, startingTimestamp=str(time_ms)).batch()
    assert found[-2:] == bodies(1, 2)
    assert Query(bus=url, topic=topic, startingTimestamp="2999-01-01").batch() == []


# --- how much a batch has


def test_rows_of_a_batch_are_bounded_and_none_is_lost(url, produce, topic):
    produce(topic, *range(50))
    query = Query(bus=url, topic=topic, maxRowsPerBatch="7")
    sizes, found = [], []
    while rows := query.batch():
        sizes.append(len(rows))
        found += rows
    assert sizes == [7] * 7 + [1]
    assert sorted(found) == bodies(*range(50))


def test_bytes_of_a_batch_are_bounded_by_the_size_of_what_comes_next(url, client, topic):
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


def test_a_limit_of_bytes_lets_at_least_one_through(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, [bytes(10_000)] * 3).result()
    query = Query(bus=url, topic=topic, maxBytesPerBatch="10")
    assert [len(query.batch()) for _ in range(4)] == [1, 1, 1, 0]


def test_all_available_is_not_bounded(url, produce, topic):
    produce(topic, *range(20))
    query = Query(bus=url, topic=topic, maxRowsPerBatch="3")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(3)
    end = _travelled(query.reader.latestOffset(query.start(), ALL))
    assert len(query.rows(query.start(), end)) == 20


def test_available_now_ends_where_the_topic_ended(url, produce, topic):
    produce(topic, *range(10))
    query = Query(bus=url, topic=topic, maxRowsPerBatch="4")
    query.reader.prepareForTriggerAvailableNow()
    produce(topic, 10, 11)
    assert [len(query.batch()) for _ in range(4)] == [4, 4, 2, 0]
    again = Query(bus=url, topic=topic)
    again.at = query.at
    assert again.batch() == bodies(10, 11)


def test_a_batch_planned_again_has_the_same_rows(url, produce, topic):
    produce(topic, *range(40))
    query = Query(bus=url, topic=topic)
    end = query.next_end()
    whole = query.rows(query.start(), end)
    other = Query(bus=url, topic=topic, rowsPerPartition="3")
    other.reader._initial = query.reader._initial
    assert len(other.reader.partitions(query.start(), end)) > 10
    assert sorted(other.rows(query.start(), end)) == sorted(whole)


# --- topics and shards that come and go


def test_topics_that_appear_under_a_pattern_are_read_from_their_start(url, produce, topic):
    query = Query(bus=url, topic=f"{topic}.*", startingOffsets="latest")
    assert query.batch() == []
    produce(f"{topic}.a", 1, 2)
    assert query.batch() == bodies(1, 2)
    produce(f"{topic}.b", 3)
    produce(f"{topic}.a", 4)
    assert query.batch() == bodies(3, 4)


def test_a_new_topic_begins_where_it_began_when_its_batch_is_planned_again(
    url, client, produce, topic
):
    produce(f"{topic}.a", 0)
    query = Query(bus=url, topic=f"{topic}.*")
    query.batch()
    produce(f"{topic}.b", 1)
    end = query.next_end()
    shards = {one["shard"]: one["end"] for one in client.bounds(f"{topic}.b")["shards"]}
    client.trim(f"{topic}.b", shards)
    with pytest.raises(Trimmed):
        query.rows(query.start(), end)


def test_available_now_leaves_out_topics_that_came_later(url, produce, topic):
    produce(f"{topic}.a", 1)
    query = Query(bus=url, topic=f"{topic}.*")
    query.reader.prepareForTriggerAvailableNow()
    produce(f"{topic}.b", 2)
    assert [query.batch(), query.batch()] == [bodies(1), []]


def test_shards_of_a_reshard_are_read_from_their_start(tmp_path):
    """No bus can reshard yet; its store can."""
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


def test_a_topic_dropped_while_it_is_read(url, client, produce, topic):
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


def test_a_topic_that_is_gone_when_a_bounded_run_begins(url, client, produce, topic):
    produce(topic, *range(5))
    options = {"bus": url, "topic": topic}
    query, lenient = Query(**options), Query(**options, failOnDataLoss="false")
    assert query.batch() == lenient.batch() == bodies(*range(5))
    client.drop_topic(topic)
    for one in (query, lenient):
        one.reader.prepareForTriggerAvailableNow()
    with pytest.raises(TopicDeleted, match="was dropped"):
        query.next_end()
    assert lenient.batch() == []


class Vanishing:
    """A way to a bus on which topics that a list still has are gone when they are asked for."""

    def __init__(self, real: LogAccess, gone: str) -> None:
        self._real, self._gone = real, gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def list_topics(self, pattern: str) -> list[str]:
        return [*self._real.list_topics(pattern), self._gone]


def test_what_a_pattern_found_may_be_gone_when_it_is_asked_for(bus, produce, topic):
    produce(f"{topic}.a", 1)
    access = Vanishing(open_log_access(bus.url), f"{topic}.b")
    assert set(TopicSelection(f"{topic}.*").shards(access)) == {f"{topic}.a"}
    with pytest.raises(DoesNotExist):
        TopicSelection(f"{topic}.b").shards(access)


def test_a_topic_dropped_and_made_again_goes_on(url, client, produce, topic):
    produce(topic, *range(5))
    query = Query(bus=url, topic=topic)
    assert query.batch() == bodies(*range(5))
    client.drop_topic(topic)
    produce(topic, 5, 6)
    assert query.batch() == bodies(5, 6)


# --- what is lost


def test_a_trimmed_range_is_an_error_that_names_it(url, client, topic):
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


def test_a_range_trimmed_under_a_running_task(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, bodies(*range(10))).result()
    query = Query(bus=url, topic=topic)
    lenient = Query(bus=url, topic=topic, failOnDataLoss="false")
    end = query.next_end()
    plans = [one.reader.partitions(query.start(), end) for one in (query, lenient)]
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
def test_no_loss_is_passed_over_in_silence(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, bodies(*range(10))).result()
    query = Query(bus=url, topic=topic)
    (planned,) = query.reader.partitions(query.start(), query.next_end())
    client.trim(topic, {0: 9})
    try:
        found = [batch.num_rows for batch in query.reader.read(planned)]
    except Trimmed:
        found = []
    assert found == []


def test_a_bus_that_has_less_than_was_read_is_another_bus(url, produce, topic):
    produce(topic, *range(5))
    query = Query(bus=url, topic=topic)
    query.batch()
    assert query.at is not None
    query.at[topic] = {shard: offset + 100 for shard, offset in query.at[topic].items()}
    with pytest.raises(DoesNotExist, match="ends at"):
        query.next_end()


# --- what is wrong


def test_a_checkpoint_of_another_topic(url, produce, topic):
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


def test_a_checkpoint_of_something_else(url, topic):
    query = Query(bus=url, topic=topic)
    query.at = {"sourceVersion": 1, "logOffset": 17}
    with pytest.raises(UsageError, match="another checkpointLocation"):
        query.next_end()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "{none}"}, "there is no .*topic"),
        ({"topic": " , "}, "names no topic"),
        ({"topic": "_x"}, "option topic"),
        ({"topic": "t", "endingOffsets": "latest"}, "leave option endingOffsets out"),
        ({"topic": "t", "endingTimestamp": "1"}, "leave option endingTimestamp out"),
        ({"topic": "t", "startingOffsets": "first"}, "earliest, latest, or JSON"),
        ({"topic": "t", "startingOffsets": "[1]"}, "earliest, latest, or JSON"),
        ({"topic": "t", "startingOffsets": '{"t": 1}'}, "a topic has its shards"),
        ({"topic": "t", "startingOffsets": '{"t": {"0": -1}}'}, "no shard with its offset"),
        ({"topic": "t", "startingOffsets": '{"t": {"x": 1}}'}, "no shard with its offset"),
        ({"topic": "{there}", "startingOffsets": '{"u": {"0": 1}}'}, "names topic 'u'"),
        ({"topic": "{there}", "startingOffsets": '{"{there}": {"99": 1}}'}, "has no shard 99"),
        ({"topic": "{there}", "startingOffsets": '{"{there}": {"0": 99}}'}, "ends at .* 99"),
        ({"topic": "t", "startingTimestamp": "yesterday"}, "a time like"),
        ({"topic": "t", "startingTimestamp": "-1"}, "a time like"),
        ({"topic": "t", "startingTimestamp": "1", "startingOffsets": "latest"}, "not both"),
        ({"topic": "t", "maxRowsPerBatch": "0"}, "maxRowsPerBatch is a whole number above 0"),
        ({"topic": "t", "maxBytesPerBatch": "1k"}, "maxBytesPerBatch is a whole number"),
        ({"topic": "t", "rowsPerPartition": "-1"}, "rowsPerPartition is a whole number"),
        ({"topic": "t", "failOnDataLoss": "perhaps"}, "one of true, false"),
        ({"topic": "t", "startingOfsets": "latest"}, "no option 'startingOfsets': use one of bus"),
        ({}, "option topic is missing"),
        ({"topic": ""}, "option topic is empty"),
        ({"topic": "t", "bus": "nats://x"}, "NATS is still to come"),
        ({"topic": "t", "bus": "lmdb:"}, "lmdb:PATH"),
        ({"topic": "t", "bus": "http://x"}, "no bus"),
        ({"topic": "t", "bus": "lmdb:/nowhere/at/all"}, "there is no store here"),
    ],
)
def test_wrong_options_say_what_to_do(bus, produce, topic, options, said):
    produce(topic, 1)
    names = {"{there}": topic, "{none}": f"{topic}.none"}
    for short, long in names.items():
        options = {key: value.replace(short, long) for key, value in options.items()}
    with pytest.raises(PolybusError, match=said):
        Query(**{"bus": bus.url, **options}).start()


@pytest.mark.parametrize(
    ("columns", "said"),
    [("bodies binary", "no column 'bodies'.*body"), ("body string", "body is binary, not string")],
)
def test_a_schema_that_topics_do_not_have(columns, said):
    name, kind = columns.split()
    schema = StructType().add(name, kind)
    with pytest.raises(UsageError, match=said):
        StreamReader(SparkOptions({"topic": "t"}, SOURCE_OPTIONS), schema)


def test_the_bus_is_told_how_far_a_query_has_come(bus, client, produce, topic):
    produce(topic, *range(10))
    query = Query(bus=bus.url, topic=topic, maxRowsPerBatch="4")
    query.batch()
    query.batch()
    query.reader.stop()
    (told,) = client.topic_stats(topic)["queries"]
    assert (told["lag"], told["query"]) == (2, query.start()["_query"])
    query.batch()
    query.reader.stop()
    (told,) = client.topic_stats(topic)["queries"]
    assert told["lag"] == 0
