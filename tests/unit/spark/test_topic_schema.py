"""Columns of a topic in Spark, and the columns of the log that they need."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from polybus.model.arrow import READ_SCHEMA
from polybus.spark.source.topic_schema import COLUMNS, SCHEMA, BatchBuilder

VALUES = ([1], [0], [0], [1], [1], [None], [b"x"], [None])
ROW = pa.record_batch(
    [pa.array(one, field.type) for one, field in zip(VALUES, READ_SCHEMA, strict=True)],
    schema=READ_SCHEMA,
)


@pytest.mark.parametrize("name", COLUMNS)
def test_column_is_built_from_its_needed_columns_only(name):
    builder = BatchBuilder(StructType([SCHEMA[name]]))
    batch = builder.build_batch("orders", ROW.select(sorted(builder.needed_columns | {"offset"})))
    assert batch.schema.names == [name]
    assert batch.to_pylist() == builder.build_batch("orders", ROW).to_pylist()
