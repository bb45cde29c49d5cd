"""The batch reader: `spark.read.format("polybus")`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from polybus.errors import DoesNotExist
from polybus.spark.python_worker import hide_traceback
from polybus.spark.source import topic_schema
from polybus.spark.source.partition_reader import PartitionReader
from polybus.spark.source.partitions import OffsetRange, Partition, plan_partitions
from polybus.spark.source.read_bounds import (
    EARLIEST,
    LATEST,
    ReadBound,
    TopicSelection,
    clamp_offset,
)
from polybus.spark.spark_options import SparkOptions


class BatchReader(DataSourceReader):
    """Reads topics between two bounds. Spark plans once per `load()`, so a DataFrame keeps its
    rows.
    """

    def __init__(self, options: SparkOptions, schema: StructType) -> None:
        topic_schema.check_schema(schema)
        self._wanted = TopicSelection(options.required("topic", "orders"))
        self._start = ReadBound.parse(options, "starting", EARLIEST)
        self._end = ReadBound.parse(options, "ending", LATEST)
        self._rows_per_partition = options.count("rowsPerPartition")
        strict = options.flag("failOnDataLoss", default=True)
        self._task = PartitionReader(options.bus, schema, strict, options.archive)

    @hide_traceback()
    def partitions(self) -> list[Partition]:
        access, strict = self._task.access, self._task.strict
        topics = self._wanted.shards(access)
        if not topics:
            raise DoesNotExist(
                f"no durable topic matches {self._wanted.text!r}: correct option topic"
            )
        for bound in (self._start, self._end):
            bound.check(topics)
        ranges = []
        for topic, shards in topics.items():
            starts = self._start.resolve_offsets(access, topic, shards)
            ends = self._end.resolve_offsets(access, topic, shards)
            for shard, in_log in shards.items():
                start, end = starts[shard], ends[shard]
                # An empty range cannot lose messages.
                fails = strict and start != end
                start = clamp_offset(topic, shard, start, in_log, strict=fails)
                # The start alone reports trimmed offsets.
                end = clamp_offset(topic, shard, max(end, in_log.start), in_log, strict=fails)
                if start < end:
                    ranges.append(OffsetRange(topic, shard, start, end))
        return plan_partitions(ranges, self._rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)
