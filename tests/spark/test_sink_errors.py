"""Errors and transactions of the sink, called as Spark calls it, without Spark.

test_sink.py checks how Spark prints an error; starting a write there takes a second.
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
    ("columns", "message"),
    [
        ({"value": ["x"]}, "cannot be written: select only body"),
        ({"shard_key": ["x"]}, "there is no column body"),
        ({"body": [1]}, "column body is bigint: cast it to binary or string"),
        ({**BODY, "shard_key": [1]}, "column shard_key is bigint: cast it"),
        ({"body": ["x", None]}, "a body is null"),
        ({**BODY, "topic": [""]}, "topic name '' is empty"),
        ({**BODY, "topic": ["_hidden"]}, "_hidden"),
        ({"body": [b"x" * 68_000_000]}, "bytes, got 68000000"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_invalid_rows_are_reported(bus, client, topic, columns, message):
    assert message in refused(columns, bus=bus.url, topic=topic)
    assert bodies(client, topic) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topics": "x"}, "unknown option 'topics': use one of bus, topic, producerId"),
        ({"producerId": " "}, "option producerId must not be empty"),
        ({"producerId": "p" * 300}, "producerId and transactionId must have at most"),
        ({"onNewCheckpoint": "continue"}, "option onNewCheckpoint is not allowed"),
        ({"topic": ""}, "option topic must not be empty"),
        ({"transactionNumber": "2"}, "transactionNumber needs transactionId"),
        ({"bus": "lmdb:/x"}, "its bus is the only writer"),
        ({"bus": "nats://x"}, "NATS is not supported"),
    ],
)
def test_invalid_options_of_a_write(bus, options, message):
    assert message in refused(BODY, **{"bus": bus.url, "topic": "t", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"onNewCheckpoint": "maybe"}, "option onNewCheckpoint must be one of refuse, continue"),
        ({"transactionId": "x"}, "option transactionId is not allowed"),
        ({"startingOffsets": "earliest"}, "unknown option 'startingoffsets'"),
    ],
)
def test_invalid_options_of_a_stream(bus, options, message):
    with pytest.raises(PolybusError) as error:
        stream(**{"bus": bus.url, "topic": "t", **options})
    assert message.lower() in str(error.value).lower()


def test_rows_need_a_topic(bus):
    assert "no target topic: give .option('topic', NAME)" in refused(BODY, bus=bus.url)


def test_missing_bus_is_reported(monkeypatch):
    monkeypatch.setattr(sink_writers, "CLIENT_OPTIONS", ClientOptions(connect_timeout_s=0.1))
    message = refused(BODY, bus="polybus://127.0.0.1:1", topic="t")
    assert "no bus answers at polybus://127.0.0.1:1; start one" in message


def test_ephemeral_topic_is_refused(tmp_path):
    socket = f"unix:{tmp_path / 'freud.sock'}"
    with NativeBus(listen=[f"freud={socket}"]) as bus:
        with freud.blocking.connect(socket) as client:
            client.create_topic("ephemeral")
        message = refused(BODY, bus=bus.url, topic="ephemeral")
    assert "write to another topic: ephemeral is an ephemeral topic" in message


def test_each_transaction_number_is_published_once(bus, client, topic):
    for number in ("1", "2", "2", "1", "5", "5"):
        options = {"transactionId": f"{topic}.series", "transactionNumber": number}
        write({"body": [number]}, bus=bus.url, topic=topic, **options)
    assert sorted(bodies(client, topic)) == [b"1", b"2", b"5"]
