"""The client side of each walk: `python -m bench.walks.client WALK FOLDER ADDRESSES`.

It uses the public API of the package alone, so it works with any layout of its modules. A walk
opens its clients, sends some messages to reach a steady state, and then sends one message per run.
The number of the run is in FOLDER/run from before the message is sent until the walk's settle_s
after it has arrived. Idle runs, as long as the longest of these, record the timers. ADDRESSES is a
JSON object: the address of the bus by dialect.
"""

import asyncio
import json
import mmap
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polybus import fdq, freud, gsb, native, pirate, rqueue

TOPIC = "walk"
BODY = b"x" * 128
ARRIVAL_TIMEOUT_S = 60.0
IDLE_RUNS = range(200, 205)  # their numbers
# Runs start at varying distances, so that a timer does not fall into all of them.
PAUSES_S = (0.05, 0.13, 0.29, 0.07, 0.19)

Addresses = dict[str, str]
Send = Callable[[], Awaitable[None]]  # sends one message and returns when it has arrived


@asynccontextmanager
async def _reader(receive: Callable[[], Awaitable[object]]) -> AsyncIterator[Send]:
    """Call `receive` in a loop; yields a function that waits for the next message."""
    arrived = asyncio.Event()

    async def read() -> None:
        while True:
            if await receive() is not None:
                arrived.set()

    async def wait() -> None:
        await asyncio.wait_for(arrived.wait(), ARRIVAL_TIMEOUT_S)
        arrived.clear()

    task = asyncio.create_task(read())
    try:
        yield wait
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _rqueue(bus: Addresses, _folder: Path) -> AsyncIterator[Send]:
    async with rqueue.connect(bus["rqueue"]) as subscriber, rqueue.connect(bus["rqueue"]) as sender:
        await subscriber.subscribe(TOPIC)
        messages = aiter(subscriber)
        async with _reader(lambda: anext(messages)) as wait:

            async def send() -> None:
                await sender.publish(TOPIC, BODY)
                await wait()

            yield send


@asynccontextmanager
async def _freud_reader(bus: Addresses) -> AsyncIterator[Send]:
    """Get from a durable topic; yields a function that waits for the next message."""
    with native.Client(_native_url(bus)) as client:
        client.create_topic(TOPIC, shards=1)
    async with (
        freud.connect(bus["freud"]) as reader,
        await reader.subscribe(TOPIC) as subscription,
        _reader(subscription.get) as wait,
    ):
        yield wait


@asynccontextmanager
async def _durable_rqueue(bus: Addresses, _folder: Path) -> AsyncIterator[Send]:
    async with _freud_reader(bus) as wait, rqueue.connect(bus["rqueue"]) as sender:

        async def send() -> None:
            await sender.publish(TOPIC, BODY)
            await wait()

        yield send


@asynccontextmanager
async def _durable_native(bus: Addresses, _folder: Path) -> AsyncIterator[Send]:
    async with _freud_reader(bus) as wait:
        with native.Client(_native_url(bus)) as client, client.producer() as producer:

            async def send() -> None:
                future = producer.produce(TOPIC, [BODY])
                await asyncio.to_thread(future.result, ARRIVAL_TIMEOUT_S)
                await wait()

            yield send


@asynccontextmanager
async def _fdq(bus: Addresses, _folder: Path) -> AsyncIterator[Send]:
    handled = threading.Event()
    url = _native_url(bus)
    consumer = fdq.Consumer(url)
    with fdq.Producer(url) as producer:
        try:
            consumer.consume(TOPIC, "walker", lambda _envelope: handled.set())

            async def send() -> None:
                await asyncio.to_thread(producer.produce, TOPIC, "key", BODY)
                await asyncio.to_thread(handled.wait, ARRIVAL_TIMEOUT_S)
                handled.clear()

            yield send
        finally:
            consumer.close()


@asynccontextmanager
async def _pirate(bus: Addresses, folder: Path) -> AsyncIterator[Send]:
    async with (
        pirate.connect(bus["pirate"], state=folder / "reader") as reader,
        pirate.connect(bus["pirate"], state=folder / "writer") as writer,
    ):
        await reader.subscribe(TOPIC)

        async def send() -> None:
            await writer.put(TOPIC, BODY)
            if await reader.get(TOPIC) is None:
                raise RuntimeError("the message that was put is not there")

        yield send


@asynccontextmanager
async def _gsb(bus: Addresses, _folder: Path) -> AsyncIterator[Send]:
    async with gsb.connect(bus["gsb"]) as service, gsb.connect(bus["gsb"]) as caller:

        async def answer(_call: gsb.Call) -> int:
            return 1

        await service.register(TOPIC, answer)

        async def send() -> None:
            await caller.call(TOPIC, {"number": 1}, timeout_s=ARRIVAL_TIMEOUT_S)

        yield send


@contextmanager
def _spark_session() -> Iterator[Any]:
    import polybus.spark

    session = polybus.spark.session("local[1]", name="walks")
    try:
        yield session
    finally:
        session.stop()


@asynccontextmanager
async def _spark_batch(bus: Addresses, _folder: Path) -> AsyncIterator[Send]:
    """A query over a topic of one shard with one message: planning, and one task that reads."""
    url = _native_url(bus)
    with native.Client(url) as client, client.producer() as producer:
        client.create_topic(TOPIC, shards=1)
        producer.produce(TOPIC, [BODY]).result(ARRIVAL_TIMEOUT_S)
    with _spark_session() as spark:

        async def send() -> None:
            rows = spark.read.format("polybus").options(bus=url, topic=TOPIC).load()
            if [bytes(row.body) for row in rows.select("body").collect()] != [BODY]:
                raise RuntimeError("the query did not return the message")

        yield send


@asynccontextmanager
async def _spark_epoch(bus: Addresses, folder: Path) -> AsyncIterator[Send]:
    """A streaming query from text files to a topic: each new file is one epoch of the sink."""
    url, files, number = _native_url(bus), folder / "files", 0
    files.mkdir()
    with native.Client(url) as client:
        client.create_topic(TOPIC, shards=1)
    with _spark_session() as spark:
        query = (
            spark.readStream.text(str(files))
            .selectExpr("cast(value as binary) as body")
            .writeStream.format("polybus")
            .options(bus=url, topic=TOPIC, checkpointLocation=str(folder / "checkpoint"))
            .start()
        )

        async def send() -> None:
            nonlocal number
            number += 1
            written = folder / "written"
            written.write_bytes(BODY)
            written.rename(files / f"{number}.txt")
            query.processAllAvailable()

        try:
            yield send
        finally:
            query.stop()


@dataclass(frozen=True)
class Walk:
    title: str
    open: Callable[[Addresses, Path], AbstractAsyncContextManager[Send]]
    dialects: tuple[str, ...]  # that the bus listens for
    warmups: int = 20
    runs: int = 9
    settle_s: float = 0.1


WALKS = {
    "rqueue": Walk("rqueue publish to subscriber", _rqueue, ("rqueue",)),
    "durable": Walk(
        "durable: rqueue publish to Freud Get", _durable_rqueue, ("rqueue", "freud", "native")
    ),
    "durable-native": Walk(
        "durable: native produce to Freud Get", _durable_native, ("freud", "native")
    ),
    # A consumer sends its acks up to 0.25 s after the handler has returned.
    "fdq": Walk("FDQ produce to ack", _fdq, ("native",), settle_s=0.6),
    "pirate": Walk("pirate PUT and GET", _pirate, ("pirate",)),
    "gsb": Walk("GSB call", _gsb, ("gsb",)),
    "spark-batch": Walk("Spark batch", _spark_batch, ("native",), 3, 4, 0.3),
    "spark-epoch": Walk("Spark epoch", _spark_epoch, ("native",), 3, 4, 0.3),
}


def _native_url(bus: Addresses) -> str:
    return bus["native"].replace("grpc://", "polybus://")


async def take(walk: Walk, bus: Addresses, folder: Path) -> None:
    """Send the messages of the warm-up, then one message per run."""
    with (folder / "run").open("r+b") as file, mmap.mmap(file.fileno(), 1) as current_run:
        async with walk.open(bus, folder) as send:
            for _ in range(walk.warmups):
                await send()
            longest_s = 0.0
            for run in (*range(1, walk.runs + 1), *IDLE_RUNS):
                await asyncio.sleep(walk.settle_s + PAUSES_S[run % len(PAUSES_S)])
                current_run[0] = run
                started_s = time.monotonic()
                if run in IDLE_RUNS:
                    await asyncio.sleep(longest_s)
                else:
                    await send()
                    await asyncio.sleep(walk.settle_s)
                longest_s = max(longest_s, time.monotonic() - started_s)
                current_run[0] = 0


def main() -> None:
    name, folder, addresses = sys.argv[1:]
    asyncio.run(take(WALKS[name], json.loads(addresses), Path(folder)))


if __name__ == "__main__":
    main()
