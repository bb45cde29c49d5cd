"""Durable topics as Spark's tables: `format("polybus")`, to read and to write.

    spark = polybus.spark.session()
    orders = spark.readStream.format("polybus").option("topic", "orders").load()
    history = polybus.spark.table(spark, "orders", archive="/archive")

Spark finds the format by itself where polybus is installed (`pyspark_polybus`); `register`
is for where it does not look. Tasks need polybus, too, on every machine of a cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.errors import MissingExtra

try:
    import pyspark.sql.datasource  # noqa: F401  # all else here needs it
except ImportError:
    raise MissingExtra("Spark", "spark") from None

from polybus.spark.catalog.spark_table import table
from polybus.spark.data_source import PolybusSource
from polybus.spark.source import column_pruning
from polybus.spark.spark_session import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["PolybusSource", "register", "session", "table"]


def register(spark: SparkSession) -> None:
    """Makes `format("polybus")` known to a session, and reads what its queries need, no more."""
    spark.dataSource.register(PolybusSource)
    column_pruning.install(spark)
