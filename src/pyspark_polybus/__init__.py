"""Entry point for discovery: Spark imports modules `pyspark_*` and reads `DefaultSource`."""

from polybus.spark.data_source import PolybusSource as DefaultSource

__all__ = ["DefaultSource"]
