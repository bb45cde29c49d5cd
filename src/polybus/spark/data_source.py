"""The data source class of `format("polybus")`, from which Spark gets readers and writers."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from polybus.errors import UsageError
from polybus.spark.python_worker import hide_traceback
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SINK_OPTIONS, SOURCE_OPTIONS, SparkOptions


class PolybusSource(DataSource):
    """Data source without state. Spark pickles it and creates a new instance for every request."""

    @classmethod
    def name(cls) -> str:
        return "polybus"

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        from polybus.spark.source.batch_reader import BatchReader

        with hide_traceback():
            return BatchReader(SparkOptions(self.options, SOURCE_OPTIONS), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        from polybus.spark.source.stream_reader import StreamReader

        with hide_traceback():
            return StreamReader(SparkOptions(self.options, SOURCE_OPTIONS), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from polybus.spark.sink.sink_writers import BatchWriter, parse_options

        with hide_traceback():
            if overwrite:
                raise UsageError("a topic cannot be overwritten; use .mode('append')")
            options = SparkOptions(self.options, SINK_OPTIONS)
            return BatchWriter(parse_options(options, schema, is_stream=False))

    def streamWriter(  # noqa: N802  # Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from polybus.spark.sink.sink_writers import StreamWriter, parse_options

        with hide_traceback():
            options = SparkOptions(self.options, SINK_OPTIONS)
            return StreamWriter(parse_options(options, schema, is_stream=True))
