"""The session that is measured, as `polybus.spark.session` makes it, and its processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

import polybus.spark
from bench.harness.places import REPOSITORY
from bench.harness.quiet import OWN_PIDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {"spark.driver.memory": "3g", "spark.sql.session.timeZone": "UTC"}


@contextmanager
def session() -> Iterator["SparkSession"]:
    # Tasks import the benchmark's own source from there.
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    spark = polybus.spark.session("local[2]", name="bench", settings=SETTINGS)
    try:
        yield spark
    finally:
        OWN_PIDS.difference_update(own_pids())
        spark.stop()


def own_pids() -> set[int]:
    """Return the processes of Spark: its Java, and the Python workers that it has started."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
