"""What cannot be written, and what is done once, asked as Spark asks it, without Spark.

How Spark shows such an error is in test_sink.py: to start a write there takes a second.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict, DataSourceWriter
from pyspark.sql.types import StructType

from polybus.dialects import freud
from polybus.errors import DoesNotExist, PolybusError
from polybus.native import ClientOptions
from polybus.spark.data_source import PolybusSource
from polybus.spark.sink import sink_writers
from tests.rig.native_bus import NativeBus

BODY = {"body": ["x"]}
KINDS = {int: "long", str: "string", bytes: "binary"}


def write(columns: dict[str, list[Any]], **options: str) -> None:
    schema = StructType()
    for name, values in columns.items():
        known = next(value for value in values if value is not None)
        schema.add(name, KINDS[type(known)])
    writer: Any = PolybusSource(CaseInsensitiveDict(options)).writer(schema, overwrite=False)
    assert isinstance(writer, DataSourceWriter)
    writer.commit([writer.write(iter([pa.record_batch(columns)]))])


def stream(**options: str) -> None:
    schema = StructType().add("body", "string")
    PolybusSource(CaseInsensitiveDict(options)).streamWriter(schema, overwrite=False)


def refused(columns: dict[str, list[Any]], **options: str) -> str:
    with pytest.raises(PolybusError) as error:
        write(columns, **options)
    return str(error.value)


def bodies(client: Any, topic: str) -> list[bytes]:
    try:
        return [body for batch in client.read(topic) for body in batch["body"].to_pylist()]
    except DoesNotExist:
        return []


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"value": ["x"]}, "cannot be written: select only body"),
        ({"shard_key": ["x"]}, "there is no column body"),
        ({"body": [1]}, "column body is bigint: cast it to binary or string"),
        ({**BODY, "shard_key": [1]}, "column shard_key is bigint: cast it"),
        ({"body": ["x", None]}, "a body is null"),
        ({**BODY, "topic": [""]}, "topic name '' is empty"),
        ({**BODY, "topic": ["_hidden"]}, "_hidden"),
        ({"body": [b"x" * 68_000_000]}, "a body has 68000000 bytes"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_rows_that_cannot_be_written(bus, client, topic, columns, told):
    assert told in refused(columns, bus=bus.url, topic=topic)
    assert bodies(client, topic) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"topics": "x"}, "there is no option 'topics': use one of bus, topic, producerId"),
        ({"producerId": " "}, "option producerId is empty"),
        ({"producerId": "p" * 300}, "shorten producerId"),
        ({"onNewCheckpoint": "continue"}, "leave option onNewCheckpoint out"),
        ({"topic": ""}, "option topic is empty"),
        ({"transactionNumber": "2"}, "transactionNumber needs transactionId"),
        ({"bus": "lmdb:/x"}, "write through the running bus"),
        ({"bus": "nats://x"}, "NATS is still to come"),
    ],
)
def test_options_of_a_write(bus, options, told):
    assert told in refused(BODY, **{"bus": bus.url, "topic": "t", **options})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"onNewCheckpoint": "maybe"}, "option onNewCheckpoint is one of refuse, continue"),
        ({"transactionId": "x"}, "leave option transactionId out"),
        ({"startingOffsets": "earliest"}, "there is no option 'startingoffsets'"),
    ],
)
def test_options_of_a_stream(bus, options, told):
    with pytest.raises(PolybusError) as error:
        stream(**{"bus": bus.url, "topic": "t", **options})
    assert told.lower() in str(error.value).lower()


def test_rows_need_a_topic(bus):
    assert "say where to write: .option('topic', NAME)" in refused(BODY, bus=bus.url)


def test_a_bus_that_is_not_there(monkeypatch):
    monkeypatch.setattr(sink_writers, "CLIENT_OPTIONS", ClientOptions(connect_timeout_s=0.1))
    told = refused(BODY, bus="polybus://127.0.0.1:1", topic="t")
    assert "no bus answers at polybus://127.0.0.1:1: start one" in told


def test_a_topic_of_the_other_kind(tmp_path):
    socket = f"unix:{tmp_path / 'freud.sock'}"
    with NativeBus(listen=[f"freud={socket}"]) as bus:
        with freud.blocking.connect(socket) as client:
            client.create_topic("ephemeral")
        told = refused(BODY, bus=bus.url, topic="ephemeral")
    assert "write to another topic: ephemeral is an ephemeral topic" in told


def test_a_series_of_transactions_has_each_number_once(bus, client, topic):
    for number in ("1", "2", "2", "1", "5", "5"):
        options = {"transactionId": f"{topic}.series", "transactionNumber": number}
        write({"body": [number]}, bus=bus.url, topic=topic, **options)
    assert sorted(bodies(client, topic)) == [b"1", b"2", b"5"]
