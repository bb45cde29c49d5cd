"""The columns of a topic, as Spark and as Arrow know them.

Spark takes Arrow batches as they are if their types are exactly these, and says in many
words that they are not otherwise: timestamps of microseconds in UTC, a map whose entries
are named as Spark names them.
"""

from __future__ import annotations

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
