"""Conversion of Spark rows to message batches: columns, target topics, sizes."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VarcharType,
)

from polybus.errors import TooLarge, UsageError
from polybus.model.arrow import HEADERS_TYPE, block_of, check_schema
from polybus.spark.sink import message_batches
from polybus.spark.source.topic_schema import SCHEMA


def converted(rows: pa.RecordBatch, topic: str | None = "t") -> list[tuple[str, list[bytes]]]:
    batches = list(message_batches.build_batches(rows, topic))
    for _, batch in batches:
        check_schema(batch.schema)
        block_of(batch, 0)  # as the bus converts it
    return [(name, batch.column("body").to_pylist()) for name, batch in batches]


def rows(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


KINDS: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "varchar": VarcharType(10),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "struct": StructType([StructField("a", LongType())]),
    "headers": MapType(StringType(), BinaryType()),
    "texts": MapType(StringType(), StringType()),
}


def schema_of(columns: str) -> StructType:
    """Parse a schema with the kinds above."""
    pairs = (column.split() for column in columns.split(","))
    return StructType([StructField(name, KINDS[kind]) for name, kind in pairs])


BODIES = pa.array([b"a", b"b", b"c", b"d"])


# --- schemas


@pytest.mark.parametrize(
    "columns",
    [
        "body binary",
        "body string",
        "body varchar",
        "shard_key string, body binary",
        "body string, headers headers, topic string",
        "body binary, offset bigint, id bigint, timestamp timestamp",
    ],
)
def test_valid_schemas_are_accepted(columns):
    message_batches.check_schema(schema_of(columns), "t")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("shard_key string", "there is no column body"),
        ("value binary", "column 'value' cannot be written"),
        ("body binary, shardkey string", "column 'shardkey' cannot be written"),
        ("body bigint", "cast it to binary or string"),
        ("body struct", "cast it to binary or string"),
        ("body binary, shard_key bigint", "shard_key is bigint: cast it to string"),
        ("body binary, topic binary", "topic is binary: cast it to string"),
        ("body binary, headers texts", "cast it to map<string,binary>"),
        ("body binary, headers string", "cast it to map<string,binary>"),
    ],
)
def test_invalid_schema_is_reported_with_a_remedy(columns, message):
    with pytest.raises(UsageError) as caught:
        message_batches.check_schema(schema_of(columns), "t")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_need_a_topic():
    with pytest.raises(UsageError, match=r"option\('topic'"):
        message_batches.check_schema(schema_of("body binary"), None)
    message_batches.check_schema(schema_of("body binary, topic string"), None)


def test_column_topic_of_the_source_conflicts_with_option_topic():
    with pytest.raises(UsageError, match=r"drop\('topic'\)"):
        message_batches.check_schema(SCHEMA, "elsewhere")
    message_batches.check_schema(SCHEMA, None)  # copies topics to another bus


# --- batches


def test_strings_become_bytes_and_missing_columns_null():
    ((name, batch),) = message_batches.build_batches(rows(body=pa.array(["ä", "b"])), "t")
    assert name == "t"
    assert batch.column("body").to_pylist() == ["ä".encode(), b"b"]
    assert batch.column("shard_key").null_count == 2
    assert batch.schema.names == ["shard_key", "body"]


def test_wide_types_are_narrowed():
    wide = rows(
        body=BODIES.cast(pa.large_binary()),
        shard_key=pa.array(["k"] * 4, pa.large_utf8()),
        topic=pa.array(["t"] * 4, pa.large_utf8()),
        headers=pa.array(
            [[("n", b"v")], None, [], None], pa.map_(pa.large_utf8(), pa.large_binary())
        ),
    )
    assert converted(wide) == [("t", [b"a", b"b", b"c", b"d"])]


def test_rows_are_grouped_by_topic_in_order():
    topics = pa.array(["x", "y", "x", None])
    assert converted(rows(body=BODIES, topic=topics), "z") == [
        ("x", [b"a", b"c"]),
        ("y", [b"b"]),
        ("z", [b"d"]),
    ]


def test_keys_and_headers_stay_with_their_rows():
    given = rows(
        body=BODIES,
        topic=pa.array(["x", "y", "x", "y"]),
        shard_key=pa.array(["1", None, "3", "4"]),
        headers=pa.array([[("h", b"1")], None, None, [("h", b"4")]], HEADERS_TYPE),
    )
    found = {name: batch.to_pylist() for name, batch in message_batches.build_batches(given, None)}
    assert found["x"] == [
        {"shard_key": "1", "body": b"a", "headers": [("h", b"1")]},
        {"shard_key": "3", "body": b"c", "headers": None},
    ]
    assert found["y"][1] == {"shard_key": "4", "body": b"d", "headers": [("h", b"4")]}


def test_many_topics_keep_the_order_of_each():
    count = 5000
    names = pa.array([f"t{n * 7 % 13}" for n in range(count)])
    numbers = pa.array([b"%d" % n for n in range(count)])
    found = converted(rows(body=numbers, topic=names), None)
    assert len(found) == 13
    for name, bodies in found:
        assert bodies == [b"%d" % n for n in range(count) if f"t{n * 7 % 13}" == name]


def test_no_rows_make_no_batches():
    assert converted(rows(body=BODIES)[:0]) == []
    assert converted(rows(body=BODIES, topic=pa.array(["x"] * 4))[:0]) == []


@pytest.mark.parametrize(
    ("columns", "topic", "message"),
    [
        ({"body": pa.array([b"a", None])}, "t", "body is not null"),
        ({"body": BODIES, "topic": pa.array(["x", None, "x", "x"])}, None, "a topic is null"),
        (
            {
                "body": BODIES[:1],
                "headers": pa.array([[("h", None)]], pa.map_(pa.utf8(), pa.binary())),
            },
            "t",
            "a header's value is null",
        ),
    ],
)
def test_invalid_values_are_reported_with_a_remedy(columns, topic, message):
    with pytest.raises(UsageError) as caught:
        list(message_batches.build_batches(rows(**columns), topic))
    assert message in str(caught.value)


def test_too_large_message_is_reported_with_its_size():
    large = b"x" * (message_batches.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(TooLarge, match=f"got {len(large)}"):
        list(message_batches.build_batches(rows(body=pa.array([b"a", large])), "t"))
    assert converted(rows(body=pa.array([b"a", large[1:]]))) == [("t", [b"a"]), ("t", [large[1:]])]


# --- pieces


def test_large_batch_is_split_in_order():
    whole = rows(body=pa.array([b"%04d" % n for n in range(1000)]))
    found = list(message_batches.split_batch(whole, 1000))
    assert len(found) >= 8
    assert all(piece.nbytes <= 1000 for piece in found)
    assert pa.Table.from_batches(found) == pa.Table.from_batches([whole])


def test_large_message_is_not_split():
    found = list(message_batches.split_batch(rows(body=pa.array([b"x" * 5000, b"y"])), 1000))
    assert [piece.num_rows for piece in found] == [1, 1]
