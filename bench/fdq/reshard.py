"""How long a reshard takes, and what it costs while a group drains.

    python -m bench.fdq.reshard [--messages 10000000] [--backlog 8000000] [--rounds 5]

The first part reshards a topic that holds many messages. The others have a producer and a group,
and count the rows that the group handles per second while it drains the sealed shards: with a
backlog, beside the same backlog without a reshard; and after the group has caught up, beside the
time before the reshard.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pyarrow as pa

from polybus import fdq
from polybus.native import Client
from polybus.testing.bus_process import POLYBUS

BODY = b"sixteen bytes ..."[:16]
BATCH_ROWS = 50_000
KEYS = [f"customer-{number}" for number in range(1000)]
SHARDS, MORE_SHARDS = 16, 32
IN_FLIGHT = 8  # batches
PRODUCE_EVERY_S = 0.02
SAMPLE_S = 0.02
WARM_S = 3.0  # of the rate before the reshard
WINDOW_S = 1.0


@contextmanager
def running_bus(folder: Path) -> Iterator[str]:
    command = [*POLYBUS, "serve", "--data", str(folder / "data")]
    listen = ["--listen", "native=grpc://127.0.0.1:0"]
    with subprocess.Popen([*command, *listen], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if line.startswith("listening native"))
            yield line.split()[-1].replace("grpc://", "polybus://")
        finally:
            process.terminate()


def measure_reshard(client: Client, messages: int) -> None:
    client.create_topic("large", shards=SHARDS)
    fill(client, "large", messages)
    # A group that has read nothing, so that it has the most to wait for.
    client.act("group.join", topic="large", group="idle", consumer="c")
    began_s = time.perf_counter()
    client.reshard("large", MORE_SHARDS)
    took_s = time.perf_counter() - began_s
    stored = client.topic_stats("large")["all"]["inserted"]
    print(f"reshard of a topic with {stored:,} messages: {took_s * 1000:.1f} ms")


def fill(client: Client, topic: str, messages: int) -> None:
    keys = [KEYS[number % len(KEYS)] for number in range(BATCH_ROWS)]
    with client.producer() as producer:
        futures = []
        for _ in range(messages // BATCH_ROWS):
            futures.append(producer.produce(topic, [BODY] * BATCH_ROWS, keys=keys))
            if len(futures) > IN_FLIGHT:
                futures.pop(0).result()
        for future in futures:
            future.result()


class Load:
    """A producer and a group, and the rows that the group has handled."""

    def __init__(self, url: str, topic: str) -> None:
        self.handled = 0
        self._samples: list[tuple[float, int]] = []
        self._is_over = threading.Event()
        self._url, self._topic = url, topic
        self._threads = [threading.Thread(target=run) for run in (self._produce, self._sample)]

    @contextmanager
    def running(self) -> Iterator[None]:
        consumer = fdq.Consumer(self._url)
        consumer.consume(self._topic, "c", self._handle, batch=True)
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()
            consumer.close()

    def rate(self, start_s: float, end_s: float) -> float:
        """Return the rows per second between two times."""
        at = [sample_s for sample_s, _ in self._samples]
        first, last = bisect_left(at, start_s), bisect_left(at, end_s)
        (first_s, before), (last_s, after) = self._samples[first], self._samples[last]
        return (after - before) / (last_s - first_s)

    def _handle(self, batch: pa.RecordBatch) -> None:
        self.handled += batch.num_rows

    def _produce(self) -> None:
        keys = KEYS * 2
        with Client(self._url) as client, client.producer() as producer:
            while not self._is_over.wait(PRODUCE_EVERY_S):
                producer.produce(self._topic, [BODY] * len(keys), keys=keys).result()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self._samples.append((time.monotonic(), self.handled))


def measure_backlog(client: Client, url: str, rounds: int, backlog: int) -> None:
    """Compare the rest of a backlog, read with a reshard and without one, in turn."""
    ratios = []
    for number in range(rounds):
        plain = drain_rate(client, url, f"plain-{number}", backlog, is_resharded=False)
        resharded = drain_rate(client, url, f"resharded-{number}", backlog, is_resharded=True)
        ratios.append(resharded / plain)
        print(
            f"backlog: {plain:,.0f} rows/s without a reshard,"
            f" {resharded:,.0f} while the group drains ({ratios[-1]:.0%})"
        )
    print(f"backlog: median {median(ratios):.0%}")


def drain_rate(client: Client, url: str, topic: str, backlog: int, *, is_resharded: bool) -> float:
    """Return the rows per second of the last two thirds of a backlog."""
    client.create_topic(topic, shards=SHARDS)
    fill(client, topic, backlog)
    load = Load(url, topic)
    with load.running():
        wait_for(lambda: load.handled > backlog // 3)
        began_s, before = time.monotonic(), load.handled
        if is_resharded:
            client.reshard(topic, MORE_SHARDS)
        wait_for(lambda: load.handled >= backlog)  # new shards are read after it, not before
        rate = (load.handled - before) / (time.monotonic() - began_s)
        if is_resharded:
            wait_for(lambda: not client.topic(topic)["draining"])
        return rate


def measure_caught_up(client: Client, url: str) -> None:
    """Compare a window before a reshard with the one after it; the drain is shorter than it."""
    topic = "caught up"
    client.create_topic(topic, shards=SHARDS)
    load = Load(url, topic)
    with load.running():
        wait_for(lambda: load.handled > 0)
        began_s = time.monotonic()
        wait_for(lambda: time.monotonic() > began_s + WARM_S)
        resharded_s = time.monotonic()
        client.reshard(topic, MORE_SHARDS)
        wait_for(lambda: not client.topic(topic)["draining"])
        drained_s = time.monotonic()
        wait_for(lambda: time.monotonic() > max(drained_s, resharded_s + WINDOW_S) + 2 * SAMPLE_S)
        before = load.rate(began_s, resharded_s)
        during = load.rate(resharded_s, max(drained_s, resharded_s + WINDOW_S))
    print(
        f"{topic}: drained in {drained_s - resharded_s:.2f} s; {before:,.0f} rows/s before,"
        f" {during:,.0f} meanwhile ({during / before:.0%})"
    )


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(SAMPLE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--backlog", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_bus(Path(folder)) as url,
        Client(url) as client,
    ):
        measure_reshard(client, given.messages)
        measure_backlog(client, url, given.rounds, given.backlog)
        measure_caught_up(client, url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
