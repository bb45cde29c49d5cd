"""The batch reader, called as Spark calls it, without Spark: ranges, plans, errors."""

from __future__ import annotations

import json
import pickle
import socket
from typing import Any

import pytest
from pyspark.sql.types import StructType

from polybus import freud
from polybus.errors import DoesNotExist, PolybusError, Trimmed, UsageError, WrongKind
from polybus.native import ClientOptions
from polybus.spark.source import log_access
from polybus.spark.source.batch_reader import BatchReader
from polybus.spark.source.partitions import OffsetRange, limit_rows, plan_partitions
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions
from tests.rig.native_bus import NativeBus


@pytest.fixture(params=["polybus", "lmdb"])
def url(request: pytest.FixtureRequest, bus: NativeBus) -> str:
    return bus.url if request.param == "polybus" else f"lmdb:{bus.folder / 'data'}"


def reader(schema: StructType = SCHEMA, /, **options: str) -> BatchReader:
    return BatchReader(SparkOptions(options, SOURCE_OPTIONS), schema)


def rows(**options: str) -> list[dict[str, Any]]:
    planned = reader(**options)
    planned, partitions = pickle.loads(pickle.dumps((planned, planned.partitions())))
    return [
        row
        for partition in partitions
        for batch in planned.read(partition)
        for row in batch.to_pylist()
    ]


def bodies(**options: str) -> list[bytes]:
    return sorted(row["body"] for row in rows(**options))


def test_topics_and_patterns_between_offsets(url, client, topic):
    names = [f"{topic}.{n}" for n in "ab"]
    with client.producer() as producer:
        for name in names:
            client.create_topic(name, 1)
            producer.produce(name, [f"{name[-1]}{n}".encode() for n in range(4)]).result()
    every = [f"{a}{n}".encode() for a in "ab" for n in range(4)]
    assert bodies(bus=url, topic=", ".join(names)) == every
    assert bodies(bus=url, topic=f"{topic}.*") == every
    assert {row["topic"] for row in rows(bus=url, topic=f"{topic}.*")} == set(names)
    starts, ends = {names[0]: {"0": 1}}, {names[0]: {"0": 3}, names[1]: {"0": 1}}
    between = {"startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}
    assert bodies(bus=url, topic=f"{topic}.*", **between) == [b"a1", b"a2", b"b0"]
    assert bodies(bus=url, topic=names[0], startingOffsets="latest") == []
    assert bodies(bus=url, topic=names[0], endingOffsets="earliest") == []


def test_task_reads_a_topic_created_again_under_the_same_name(bus, client, topic):
    """Workers live long, so their cached topic number may belong to a dropped topic."""
    task = log_access.StoreLogAccess(f"lmdb:{bus.folder / 'data'}")
    bodies = []
    for body in (b"old", b"new"):
        client.create_topic(topic, 1)
        with client.producer() as producer:
            producer.produce(topic, [body]).result()
        (shard,) = client.bounds(topic)["shards"]
        (batch,) = task.read(topic, 0, shard["end"] - 1, shard["end"])
        bodies += batch["body"].to_pylist()
        client.drop_topic(topic)
    assert bodies == [b"old", b"new"]
    with pytest.raises(DoesNotExist):
        list(task.read(topic, 0, 0, 9))


def test_topic_between_timestamps(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        for n in range(4):
            producer.produce(topic, [b"%d" % n]).result()
    (third,) = client.read(topic, 0, 2, 3)
    time_ms = third.column("timestamp_ns")[0].as_py() // 1_000_000
    # Messages of one millisecond are on the same side of it.
    later = bodies(bus=url, topic=topic, startingTimestamp=str(time_ms))
    earlier = bodies(bus=url, topic=topic, endingTimestamp=str(time_ms))
    assert sorted(earlier + later) == [b"0", b"1", b"2", b"3"]
    assert b"2" in later
    after = "2126-01-31T12:00:00+01:00"
    assert bodies(bus=url, topic=topic, startingTimestamp=after) == []
    assert len(bodies(bus=url, topic=topic, endingTimestamp=after)) == 4
    assert len(bodies(bus=url, topic=topic, startingTimestamp="1970-01-01")) == 4


def test_ephemeral_topic_is_reported():
    with NativeBus(listen=["freud=unix:freud.sock"]) as bus:
        with freud.blocking.connect(str(bus.process.address("freud"))) as client:
            client.create_topic("news")
        with pytest.raises(WrongKind, match="news is an ephemeral topic"):
            reader(bus=bus.url, topic="news").partitions()
        with pytest.raises(DoesNotExist, match="never created, or it is ephemeral"):
            reader(bus=f"lmdb:{bus.folder / 'data'}", topic="news").partitions()


def test_bus_does_not_answer(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free_tcp_port = taken.getsockname()[1]
    monkeypatch.setattr(log_access, "RECONNECT_OPTIONS", ClientOptions(connect_timeout_s=0.2))
    with pytest.raises(PolybusError, match=f"127.0.0.1:{free_tcp_port}"):
        reader(bus=f"polybus://127.0.0.1:{free_tcp_port}", topic="t").partitions()


def test_offsets_outside_the_log(url, client, topic):
    client.create_topic(topic, 1)
    with client.producer() as producer:
        producer.produce(topic, [b"%d" % n for n in range(10)]).result()
    client.trim(topic, {0: 4})
    early, late = ({topic: {"0": n}} for n in (1, 11))
    with pytest.raises(Trimmed, match=f"'{topic}', shard 0: offsets 1 to 3 were trimmed away"):
        reader(bus=url, topic=topic, startingOffsets=json.dumps(early)).partitions()
    for name in ("startingOffsets", "endingOffsets"):
        with pytest.raises(DoesNotExist, match=r"shard 0 ends at 10, .* 11"):
            reader(bus=url, topic=topic, **{name: json.dumps(late)}).partitions()
    lenient = {"bus": url, "topic": topic, "failOnDataLoss": "FALSE"}
    assert len(bodies(startingOffsets=json.dumps(early), **lenient)) == 6
    assert len(bodies(endingOffsets=json.dumps(late), **lenient)) == 6
    assert bodies(startingOffsets=json.dumps(late), **lenient) == []
    assert bodies(endingOffsets=json.dumps(early), **lenient) == []
    nothing = {"startingOffsets": json.dumps(early), "endingOffsets": json.dumps(early)}
    assert bodies(bus=url, topic=topic, **nothing) == []  # an empty range loses nothing


def test_pattern_without_a_match(url, topic):
    with pytest.raises(DoesNotExist, match="no durable topic matches"):
        reader(bus=url, topic=f"{topic}.*").partitions()


# --- plans


def test_plan_splits_long_ranges_and_groups_short_ones():
    long, short = (
        OffsetRange("t", 0, 10, 1_200_010),
        [OffsetRange("t", n, 0, 20_000) for n in range(1, 6)],
    )
    partitions = plan_partitions([long, *short], None)
    assert [partition.rows for partition in partitions] == [400_000] * 3 + [40_000, 40_000, 20_000]
    assert partitions[0].ranges == (OffsetRange("t", 0, 10, 400_010),)
    assert partitions[3].ranges == (short[0], short[1])


def test_rows_per_partition_is_a_limit():
    partitions = plan_partitions([OffsetRange("t", 0, 0, 10), OffsetRange("t", 1, 5, 8)], 4)
    assert [partition.ranges for partition in partitions] == [
        (OffsetRange("t", 0, 0, 3),), (OffsetRange("t", 0, 3, 6),), (OffsetRange("t", 0, 6, 10),),
        (OffsetRange("t", 1, 5, 8),),
    ]  # fmt: skip
    assert [partition.rows for partition in plan_partitions([], 4)] == [0]


def test_row_limit_is_shared_among_ranges():
    ranges = [OffsetRange("t", 0, 0, 1000), OffsetRange("t", 1, 0, 1), OffsetRange("t", 2, 50, 550)]
    admitted = limit_rows(ranges, 100)
    assert sum(part.rows for part in admitted) == 100
    assert admitted[1].rows == 1, "the smallest range gets a row"
    assert admitted[0].rows == pytest.approx(66, abs=2)
    assert sum(part.rows for part in limit_rows(ranges, 2)) == 2
    assert limit_rows(ranges, 1501) == ranges


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("bodies binary", "no column 'bodies'.*body"),
        ("body string", "body must be binary, got string"),
    ],
)
def test_schema_with_unknown_columns(schema, message):
    name, kind = schema.split()
    with pytest.raises(UsageError, match=message):
        reader(StructType().add(name, kind), topic="t")
