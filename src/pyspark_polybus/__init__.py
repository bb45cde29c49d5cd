"""Lets Spark find `format("polybus")`: it looks for modules of this name, and for this class."""

from polybus.spark.data_source import PolybusSource as DefaultSource

__all__ = ["DefaultSource"]
