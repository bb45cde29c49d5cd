"""One Spark session for all tests of this folder: its start takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import polybus.spark
from tests.rig.native_bus import NativeBus

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from polybus.native import Client

SETTINGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.sql.session.timeZone": "UTC",
    # Each query runs once: optimized compilation takes longer than it saves.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    # A query that a failed test has left must not block the next test.
    "spark.sql.streaming.stopTimeout": "20s",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    session = polybus.spark.session("local[2]", name="tests", settings=SETTINGS)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def shared_bus() -> Iterator[NativeBus]:
    """A bus for tests that use only topics of their own."""
    with NativeBus() as bus:
        yield bus


@pytest.fixture
def bus(shared_bus: NativeBus) -> NativeBus:
    return shared_bus


@pytest.fixture
def client(shared_bus: NativeBus) -> Iterator[Client]:
    with shared_bus.client() as client:
        yield client


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    return "t." + "".join(c if c.isalnum() else "." for c in request.node.name)
