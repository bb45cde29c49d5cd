"""Writers: to topics, to Parquet, and the latency of a stream from topic to topic."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.harness.load import LoadFailed
from bench.harness.quiet import OWN_PIDS
from bench.harness.results import OURS, P50, P99, RATE, Values
from bench.spark.engine import own_pids
from polybus.native import Client

_numbers = count(1)
WARMING = 3  # writes before the first measured one, until Java's compiler has finished
MESSAGES = 40  # of a measurement of latency, one at a time
STALL_S = 60.0
PAUSES_S = (0.0, 0.03, 0.07, 0.11, 0.16)  # between two messages: not in step with the triggers


class Write:
    """A write of all rows, which are in Spark's memory. `pid` is the bus's, if it takes part."""

    def __init__(self, name: str, rows: int, write: Callable[[], object], pid: int | None) -> None:
        self.name, self.pid = name, pid
        self._rows = rows
        self._write = write

    def calibrate(self, wanted_s: float) -> None:
        for _ in range(WARMING):
            self.measure()

    def measure(self) -> Values:
        OWN_PIDS.update(own_pids())
        started_s = time.perf_counter()
        self._write()
        return {RATE.key: self._rows / (time.perf_counter() - started_s)}


def to_parquet(rows: Any, folder: Path) -> Callable[[], object]:
    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        rows.write.parquet(str(folder))

    return write


def to_topic(rows: Any, client: Client, url: str) -> Callable[[], object]:
    """Return a write to a new topic. It drops the last one: the store must not grow."""
    last: list[str] = []

    def write() -> None:
        if last:
            client.drop_topic(last.pop())
        last.append(f"written-{next(_numbers)}")
        rows.write.format("polybus").mode("append").options(bus=url, topic=last[0]).save()

    return write


class TopicToTopic:
    """Produces one message at a time and waits until the query has copied it."""

    name = OURS

    def __init__(self, spark: Any, client: Client, url: str, folder: Path, pid: int) -> None:
        self.pid = pid
        self._spark, self._client, self._url = spark, client, url
        self._folder = folder
        self._source, self._target = (f"latency-{way}-{next(_numbers)}" for way in ("in", "out"))
        for topic in (self._source, self._target):
            client.create_topic(topic, shards=1)
        self._producer = client.producer()
        self._query: Any = None

    def calibrate(self, wanted_s: float) -> None:
        self._query = (
            self._spark.readStream.format("polybus")
            .options(bus=self._url, topic=self._source)
            .load()
            .select("shard_key", "body")
            .writeStream.format("polybus")
            .options(bus=self._url, topic=self._target)
            .option("checkpointLocation", str(self._folder / self._target))
            .trigger(processingTime="0 seconds")
            .start()
        )
        for _ in range(MESSAGES):
            self._copy_message()

    def measure(self) -> Values:
        OWN_PIDS.update(own_pids())
        times_us = []
        for number in range(MESSAGES):
            time.sleep(PAUSES_S[number % len(PAUSES_S)])
            times_us.append(self._copy_message() * 1e6)
        cuts = quantiles(times_us, n=100, method="inclusive")
        return {P50.key: cuts[49], P99.key: cuts[98]}

    def close(self) -> None:
        with suppress(Exception):
            self._query.stop()

    def _copy_message(self) -> float:
        end = self._client.bounds(self._target)["shards"][0]["end"]
        start_s = time.perf_counter()
        self._producer.produce(self._source, [b"x" * 128]).result(STALL_S)
        if not self._client.wait([(self._target, 0, end)], STALL_S):
            raise LoadFailed(f"no message arrived within {STALL_S:g} s: {self._query.exception()}")
        return time.perf_counter() - start_s
