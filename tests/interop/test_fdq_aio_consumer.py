"""The async consumer: coroutines as handlers, on the caller's event loop."""

import asyncio
import math
import threading
from typing import Any

import pytest

from polybus import fdq
from polybus.errors import Fenced, StoreFault, UsageError
from tests.rig.observer import eventually

URL = "memory:aio-consumers"
QUICK: dict[str, Any] = {"first_backoff_s": 0.005, "last_backoff_s": 0.02}


@pytest.fixture(autouse=True)
def bus():
    """An in-process bus, shared by the clients of a test."""
    with fdq.Producer(URL) as producer:
        yield producer


def requests(count):
    return [fdq.MessageRequest(f"k{n % 5}", b"%d" % n) for n in range(count)]


def acked(topic):
    return fdq.stats(URL, topic)["all"]["acked"]


def test_coroutines_run_on_the_loop_concurrently(bus):
    bus.produce_batch("side", [fdq.MessageRequest(None, b"") for _ in range(40)])

    async def main():
        here, most, running, seen = threading.get_ident(), 0, 0, 0

        async def handle(envelope):
            nonlocal most, running, seen
            assert threading.get_ident() == here
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1
            seen += 1

        async with fdq.aio.Consumer(URL, dead_s=120.0) as consumer:
            await consumer.consume("side", "one", handle, executors=4)
            await eventually(lambda: seen == 40, "all")
        assert 1 < most <= 4

    asyncio.run(main())
    assert acked("side") == 40


def test_plain_functions_run_on_threads(bus):
    bus.produce_batch("plain", requests(10))

    async def main():
        threads = []
        async with fdq.aio.Consumer(URL, dead_s=120.0) as consumer:
            await consumer.consume("plain", "one", lambda _: threads.append(threading.get_ident()))
            await eventually(lambda: len(threads) == 10, "all")
        assert threading.get_ident() not in threads

    asyncio.run(main())


def test_failed_or_hung_coroutine_is_retried(bus):
    bus.produce_batch("fail", [fdq.MessageRequest("k", b"")])

    async def main():
        cancelled, ended = [], []

        async def handle(envelope):
            if envelope.delivery == 1:
                raise ValueError("no")
            if envelope.delivery == 2:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    cancelled.append(envelope)
                    raise
            ended.append(envelope)

        async with fdq.aio.Consumer(URL, dead_s=120.0) as consumer:
            await consumer.consume("fail", "one", handle, handler_timeout_s=0.2, **QUICK)
            await eventually(lambda: ended and cancelled, "the third run")
        assert [one.delivery for one in ended] == [3]

    asyncio.run(main())
    assert acked("fail") == 1


def test_coroutine_without_a_timeout(bus):
    bus.produce_batch("patient", requests(3))

    async def main():
        ended = []

        async def handle(envelope):
            await asyncio.sleep(0)
            ended.append(envelope.delivery)

        async with fdq.aio.Consumer(URL, dead_s=120.0) as consumer:
            await consumer.consume("patient", "one", handle, handler_timeout_s=math.inf, **QUICK)
            await eventually(lambda: acked("patient") == 3, "all")
        assert ended == [1, 1, 1]

    asyncio.run(main())


def test_a_transaction_in_a_coroutine(bus):
    bus.produce_batch("tx", requests(10))

    async def main():
        async def handle(envelope):
            async with envelope.transaction() as tx:
                tx.produce("tx.out", envelope.shard_key, envelope.message)

        async with fdq.aio.Consumer(URL, dead_s=120.0) as consumer:
            await consumer.consume("tx", "one", handle)
            await eventually(lambda: acked("tx") == 10, "all")

    asyncio.run(main())
    found = sorted(int(one.message) for one in fdq.replay(URL, "tx.out"))
    assert found == list(range(10))


def test_handler_may_close_the_consumer(bus):
    bus.produce_batch("close", requests(10))

    async def main():
        consumer, seen = fdq.aio.Consumer(URL, dead_s=120.0), []

        async def handle(envelope):
            seen.append(envelope)
            await consumer.close()

        await consumer.consume("close", "one", handle)
        assert await consumer.wait(20)
        await consumer.close()
        assert len(seen) == 1

    asyncio.run(main())
    assert acked("close") == 1


def test_wait_ends_on_timeout_or_error(bus):
    async def main():
        async with (
            fdq.aio.Consumer(URL, dead_s=120.0) as one,
            fdq.aio.Consumer(URL, dead_s=120.0) as two,
        ):
            await one.consume("same", "name", print)
            assert not await one.wait(0.01)
            await two.consume("same", "name", print)
            with pytest.raises(Fenced):
                await one.wait(20)

    asyncio.run(main())


def test_invalid_handler_is_refused(bus):
    async def main():
        async with fdq.aio.Consumer(URL, dead_s=120.0) as consumer:
            with pytest.raises(UsageError):
                await consumer.consume("any", "one", None)  # type: ignore[arg-type]

    asyncio.run(main())


def test_consumer_closed_before_opening_stays_closed(bus):
    async def main():
        consumer = fdq.aio.Consumer(URL)
        await consumer.close()
        assert await consumer.wait()
        with pytest.raises(UsageError):
            await consumer.consume("any", "one", print)

    asyncio.run(main())


def test_failed_opening_can_be_retried(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("no folder")

    async def main():
        consumer = fdq.aio.Consumer(f"lmdb:{taken}", dead_s=120.0)
        for _ in range(2):
            with pytest.raises(StoreFault, match="file"):
                await consumer.consume("any", "one", print)
        taken.unlink()
        await consumer.consume("any", "one", print)
        await consumer.close()

    asyncio.run(main())


def test_closed_loop_stops_its_consumer(bus):
    made = []

    async def main():
        async def handle(envelope):
            await asyncio.sleep(0)

        consumer = fdq.aio.Consumer(URL, dead_s=120.0)
        await consumer.consume("ended", "one", handle)
        made.append(await consumer._open())

    asyncio.run(main())
    bus.produce_batch("ended", requests(10))
    assert made[0].wait(20)
    made[0].close()
    assert acked("ended") == 0
