"""The batch reader: `spark.read.format("polybus")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from polybus.spark.python_worker import hide_traceback
from polybus.spark.source import topic_schema
from polybus.spark.source.partition_reader import PartitionReader
from polybus.spark.source.partitions import Partition, plan_partitions, ranges_between
from polybus.spark.source.read_bounds import (
    EARLIEST,
    LATEST,
    Offsets,
    ReadBound,
    TopicSelection,
    clamp_offset,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

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

    def partitions(self) -> list[Partition]:
        with hide_traceback():
            starts, ends = self._resolve_bounds()
            return plan_partitions(ranges_between(starts, ends), self._rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)

    def _resolve_bounds(self) -> tuple[Offsets, Offsets]:
        access, strict = self._task.access, self._task.strict
        topics = self._wanted.shards(access)
        if not topics:
            raise self._wanted.no_match_error()
        starts: Offsets = {}
        ends: Offsets = {}
        for bound in (self._start, self._end):
            bound.check(topics)
        for topic, shards in topics.items():
            first, last = (
                one.resolve_offsets(access, topic, shards) for one in (self._start, self._end)
            )
            # An empty range cannot lose messages.
            fails = {shard: strict and first[shard] != last[shard] for shard in shards}
            starts[topic] = {
                shard: clamp_offset(topic, shard, first[shard], in_log, strict=fails[shard])
                for shard, in_log in shards.items()
            }
            ends[topic] = {
                shard: clamp_offset(
                    topic, shard, max(last[shard], in_log.start), in_log, strict=fails[shard]
                )
                for shard, in_log in shards.items()
            }
        return starts, ends
