"""The work of `polybus rqueue sink` and `pusher`: receive or send, and print rates.

Prints a line per second and a summary at the end. Ctrl-C is the regular end of a run
without `--count` (exit code 0), and cuts short a run with it (exit code 130).
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from polybus.dialects.rqueue.client.client import Client, connect
from polybus.model.limits import MIB

REPORT_EVERY_S = 1.0
# Contents per call of publish_many: about 100 KiB at usual sizes, at most a few MiB.
BURST_MESSAGES = 1024
BURST_BYTES = 4 * MIB
# Interval for publishing at a rate. Shorter is smoother and costs more.
PACE_S = 0.005
NUMBER_BYTES = 8

DONE = 0
WRONG_SIZE = 1
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class MeterTarget:
    """A server, and a topic on it."""

    host: str
    port: int
    topic: str
    max_payload: int

    def new_client(self) -> Client:
        host = f"[{self.host}]" if ":" in self.host else self.host
        # A rate over a gap is meaningless, so the run ends with the connection.
        return connect(f"tcp://{host}:{self.port}", reconnect=False, max_payload=self.max_payload)


class ThroughputMeter:
    """Counts messages and bytes, and formats rates since the start and the last line."""

    def __init__(self, verb: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.messages = 0
        self.bytes = 0
        self._verb = verb
        self._clock = clock
        self._began_s: float | None = None
        self._last = (0.0, 0, 0)

    def start(self) -> None:
        self._began_s = self._clock()
        self._last = (self._began_s, 0, 0)

    def add(self, messages: int, size: int) -> None:
        if self._began_s is None:  # the time before the first message is not measured
            self.start()
        self.messages += messages
        self.bytes += size

    def interval(self) -> str | None:
        """Return the rates since the last line, or None before the start."""
        if self._began_s is None:
            return None
        since_s, messages, size = self._last
        self._last = (self._clock(), self.messages, self.bytes)
        return _format_rates(self.messages - messages, self.bytes - size, self._last[0] - since_s)

    def summary(self) -> str:
        took_s = 0.0 if self._began_s is None else self._clock() - self._began_s
        rates = _format_rates(self.messages, self.bytes, took_s)
        return f"{self._verb} {self.messages} messages, {self.bytes} bytes, {took_s:.2f} s: {rates}"


async def sink(target: MeterTarget, size: int, count: int) -> int:
    """Receive `count` messages (0: until Ctrl-C). Returns the exit code.

    If `size` is >= 0, the received bytes must be `size` per message.
    """
    tally = ThroughputMeter("received")
    async with target.new_client() as client:
        await client.subscribe(target.topic)
        interrupted = await _measure(_receive(client, tally, count), tally)
    if size >= 0 and tally.bytes != size * tally.messages:
        print_line(
            f"messages must have {size} bytes each, got a total other than {size * tally.messages}"
        )
        return WRONG_SIZE
    return INTERRUPTED if interrupted and count else DONE


async def pusher(target: MeterTarget, size: int, count: int, rate: float) -> int:
    """Publish `count` messages (0: until Ctrl-C). Returns the exit code.

    `rate` is in messages per second; 0 publishes as fast as the server accepts.
    """
    tally = ThroughputMeter("sent")
    async with target.new_client() as client:
        work = _push(client, target.topic, tally, _contents(size), count, rate)
        interrupted = await _measure(work, tally)
    return INTERRUPTED if interrupted and count else DONE


async def _receive(client: Client, tally: ThroughputMeter, count: int) -> None:
    async for batch in client.batches():
        if count and len(batch) > count - tally.messages:
            batch = batch[: count - tally.messages]
        tally.add(len(batch), batch.total_bytes)
        if tally.messages == count:  # never true for count 0, because a batch is not empty
            return


async def _push(
    client: Client,
    topic: str,
    tally: ThroughputMeter,
    contents: list[bytes],
    count: int,
    rate: float,
) -> None:
    tally.start()
    began_s = time.perf_counter()
    while not count or tally.messages < count:
        burst = min(len(contents), count - tally.messages) if count else len(contents)
        if rate:
            due = int((time.perf_counter() - began_s) * rate) - tally.messages
            burst = min(burst, due)
        if burst <= 0:
            await asyncio.sleep(PACE_S)
            continue
        await client.publish_many(topic, contents if burst == len(contents) else contents[:burst])
        tally.add(burst, burst * len(contents[0]))
    await client.flush()  # measure until the server has everything


async def _measure(work: Coroutine[Any, Any, None], tally: ThroughputMeter) -> bool:
    """Run the work with a line per second and a summary. Returns True after Ctrl-C."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    reports = loop.create_task(_report(tally))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        reports.cancel()
        print_line(tally.summary())
    return False


async def _report(tally: ThroughputMeter) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        line = tally.interval()
        if line is not None:
            print_line(line)


def _contents(size: int) -> list[bytes]:
    """Return a burst of contents, made once so that making them is not measured."""
    many = max(1, min(BURST_MESSAGES, BURST_BYTES // max(1, size)))
    return [number.to_bytes(NUMBER_BYTES, "big").ljust(size, b".")[:size] for number in range(many)]


def _format_rates(messages: int, size: int, seconds: float) -> str:
    if seconds <= 0:
        return "no time to measure"
    return f"{messages / seconds:,.0f} messages/s, {size / seconds / 1e6:,.1f} MB/s"


def print_line(line: str) -> None:
    """Print a line and flush, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
