"""Durable topics as Spark tables and streams: `format("polybus")`, for reading and writing.

    spark = polybus.spark.session()
    orders = spark.readStream.format("polybus").option("topic", "orders").load()
    history = polybus.spark.table(spark, "orders", archive="/archive")

Spark discovers the format if polybus is installed (`pyspark_polybus`). Call `register` if
discovery does not work. Every machine of a cluster must have polybus installed, because the
tasks import it.
"""

from __future__ import annotations

from polybus.errors import MissingExtra

try:
    import pyspark.sql.datasource  # noqa: F401  # every module of this package needs it
except ImportError:
    raise MissingExtra("Spark", "spark") from None

from pyspark.sql import SparkSession

from polybus.spark.data_source import PolybusSource
from polybus.spark.source import column_pruning
from polybus.spark.spark_session import session
from polybus.spark.spark_table import table

__all__ = ["PolybusSource", "register", "session", "table"]


def register(spark: SparkSession) -> None:
    """Register `format("polybus")` and the column pruning rule in a session."""
    spark.dataSource.register(PolybusSource)
    column_pruning.install(spark)
