"""A topic read once, from here to there: `spark.read.format("polybus")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from polybus.spark.source import topic_columns
from polybus.spark.source.partition_reader import Task
from polybus.spark.source.partitions import Partition, plan, ranges_between
from polybus.spark.source.read_bounds import EARLIEST, LATEST, Bound, Offsets, Wanted, settle
from polybus.spark.worker_errors import told_plainly

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from polybus.spark.spark_options import Options


class BatchReader(DataSourceReader):
    """Spark plans once for each `load()`: the same DataFrame always has the same rows."""

    def __init__(self, options: Options, schema: StructType) -> None:
        topic_columns.check(schema)
        self._wanted = Wanted(options.required("topic", "orders"))
        self._start = Bound.parse(options, "starting", EARLIEST)
        self._end = Bound.parse(options, "ending", LATEST)
        self._rows_per_partition = options.count("rowsPerPartition")
        strict = options.flag("failOnDataLoss", default=True)
        self._task = Task(options.bus, schema, strict, options.archive)

    def partitions(self) -> list[Partition]:
        with told_plainly():
            starts, ends = self._between()
            return plan(ranges_between(starts, ends), self._rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Partition)
        return self._task.read(partition)

    def _between(self) -> tuple[Offsets, Offsets]:
        access, strict = self._task.access, self._task.strict
        topics = self._wanted.shards(access)
        if not topics:
            raise self._wanted.nothing()
        starts: Offsets = {}
        ends: Offsets = {}
        for bound in (self._start, self._end):
            bound.check(topics)
        for topic, shards in topics.items():
            first, last = (one.of(access, topic, shards) for one in (self._start, self._end))
            # Nothing was trimmed away of a range that is empty.
            fails = {shard: strict and first[shard] != last[shard] for shard in shards}
            starts[topic] = {
                shard: settle(topic, shard, first[shard], there, strict=fails[shard])
                for shard, there in shards.items()
            }
            ends[topic] = {
                shard: settle(
                    topic, shard, max(last[shard], there.start), there, strict=fails[shard]
                )
                for shard, there in shards.items()
            }
        return starts, ends
