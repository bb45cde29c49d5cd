"""The columns of a topic in Spark and in Arrow, and the conversion of batches.

Spark accepts Arrow batches without conversion if their types match exactly: timestamps in
microseconds and UTC, a map whose entries have Spark's field names. Batches of the log therefore
keep their buffers. Only times are computed, a column at a time, and the topic's name is repeated
once for all batches.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from polybus.errors import UsageError
from polybus.model.arrow import HEADERS_TYPE

SCHEMA = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("shard", IntegerType(), nullable=False),
        StructField("offset", LongType(), nullable=False),
        StructField("id", LongType(), nullable=False),
        StructField("timestamp", TimestampType(), nullable=False),
        StructField("timestamp_ns", LongType(), nullable=False),
        StructField("insertion_time", TimestampType(), nullable=False),
        StructField("shard_key", StringType()),
        StructField("body", BinaryType(), nullable=False),
        StructField("headers", MapType(StringType(), BinaryType())),
    ]
)

TIME, NANOSECONDS, MILLISECONDS = (pa.timestamp(unit, tz="UTC") for unit in ("us", "ns", "ms"))
# The years of Python and SQL, 1 to 9999. A client may send any number as its time.
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999

# Spark's column → its Arrow type.
COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.utf8(),
    "shard": pa.int32(),
    "offset": pa.int64(),
    "id": pa.int64(),
    "timestamp": TIME,
    "timestamp_ns": pa.int64(),
    "insertion_time": TIME,
    "shard_key": pa.utf8(),
    "body": pa.binary(),
    "headers": HEADERS_TYPE,
}
# Spark's column → the column of the log that it is computed from.
STORED_NAMES = {"timestamp": "timestamp_ns", "insertion_time": "insertion_ms"}


def check_schema(schema: StructType) -> None:
    """Raise `UsageError` unless a user's schema names columns of a topic with their types."""
    known = {field.name: field.dataType for field in SCHEMA.fields}
    for field in schema.fields:
        if field.name not in known:
            raise UsageError(
                f"a topic has no column {field.name!r}: leave the schema out, or name some of "
                f"{', '.join(known)}"
            )
        if field.dataType.simpleString() != known[field.name].simpleString():
            raise UsageError(
                f"column {field.name} must be {known[field.name].simpleString()}, got "
                f"{field.dataType.simpleString()}: cast it after load()"
            )


class BatchBuilder:
    """Builds Spark batches with the columns of a schema."""

    def __init__(self, schema: StructType) -> None:
        self._schema = pa.schema(
            pa.field(field.name, COLUMNS[field.name], field.nullable) for field in schema.fields
        )
        self._names: dict[str, pa.Array] = {}
        self.needed_columns = {
            STORED_NAMES.get(name, name) for name in schema.names if name != "topic"
        }

    def build_batch(self, topic: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for name in self._schema.names:
            if name == "topic":
                # A batch of the log has no column for its topic: slice a repeated name.
                names = self._names.get(topic)
                if names is None or len(names) < rows.num_rows:
                    names = pa.repeat(pa.scalar(topic, pa.utf8()), rows.num_rows)
                    self._names[topic] = names
                column = names[: rows.num_rows]
            elif name == "timestamp":
                column = rows.column("timestamp_ns").view(NANOSECONDS).cast(TIME, safe=False)
            elif name == "insertion_time":
                times = rows.column("insertion_ms")
                bounds = pc.min_max(times)
                if bounds["min"].as_py() < FIRST_MS or bounds["max"].as_py() > LAST_MS:
                    times = pc.min_element_wise(pc.max_element_wise(times, FIRST_MS), LAST_MS)
                column = times.view(MILLISECONDS).cast(TIME, safe=False)
            else:
                column = rows.column(name)
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
