"""What a column of Spark is made of is what is read for it."""

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
def test_a_column_is_made_of_what_it_needs_alone(name):
    shape = BatchBuilder(StructType([SCHEMA[name]]))
    made = shape.build_batch("orders", ROW.select(sorted(shape.needed_columns | {"offset"})))
    assert made.schema.names == [name]
    assert made.to_pylist() == shape.build_batch("orders", ROW).to_pylist()
