"""Full scans: of a topic, of the same rows in Parquet, and by a source that yields tuples."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from bench.harness.load import LoadFailed
from bench.harness.quiet import OWN_PIDS
from bench.harness.results import RATE, Values
from bench.spark.engine import own_pids
from polybus.spark.source.batch_reader import BatchReader
from polybus.spark.source.topic_schema import SCHEMA
from polybus.spark.spark_options import SOURCE_OPTIONS, SparkOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SIZE = 128
ONE_COLUMN = ("sum(length(body))",)
EVERY_COLUMN = (*ONE_COLUMN, *(f"max({name})" for name in SCHEMA.names[:-2]), "count(headers)")
WARMING = 8  # scans before the first measured one, until Java's compiler has finished


class Scan:
    """`sum(length(body))` over a table, and the other `asked` columns.

    Each scan is a new query, because a query that is collected again reads its own shuffle. `pid`
    is the bus's, if it takes part.
    """

    def __init__(
        self,
        name: str,
        table: "DataFrame",
        messages: int,
        pid: int | None,
        *,
        asked: Sequence[str] = ONE_COLUMN,
        warming: int = WARMING,
    ) -> None:
        self.name, self.pid = name, pid
        self._warming = warming
        self._messages = messages
        self._table, self._asked = table, [functions.expr(column) for column in asked]

    def calibrate(self, wanted_s: float) -> None:
        for _ in range(self._warming):
            self.measure()

    def measure(self) -> Values:
        OWN_PIDS.update(own_pids())
        started_s = time.perf_counter()
        total_bytes, *_ = self._table.agg(*self._asked).collect()[0]
        seconds = time.perf_counter() - started_s
        if total_bytes != self._messages * SIZE:
            raise LoadFailed(f"{self.name} read {total_bytes} bytes, not {self._messages * SIZE}")
        return {RATE.key: self._messages / seconds}


def topic(spark: "SparkSession", bus: str, name: str) -> "DataFrame":
    return spark.read.format("polybus").options(bus=bus, topic=name).load()


def parquet(spark: "SparkSession", folder: Path, rows: "DataFrame") -> "DataFrame":
    """Return the same rows with all columns, as Spark writes them."""
    if not folder.exists():
        rows.write.parquet(str(folder))
    return spark.read.parquet(str(folder))


def tuples(spark: "SparkSession", bus: str, name: str) -> "DataFrame":
    spark.dataSource.register(TupleSource)
    return spark.read.format("polybus_tuples").options(bus=bus, topic=name).load()


class TupleSource(DataSource):
    """A source that yields a tuple per row, as the Python sources of Spark's documentation do."""

    @classmethod
    def name(cls) -> str:
        return "polybus_tuples"

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return TupleReader(SparkOptions(self.options, SOURCE_OPTIONS), schema)


class TupleReader(BatchReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:
        for batch in super().read(partition):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
