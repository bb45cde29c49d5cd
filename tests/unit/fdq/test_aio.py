"""The async clients: the event loop is not blocked while threads wait."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polybus import errors, fdq
from polybus.native.inprocess import open_bus
from tests.rig.native_bus import count_waits
from tests.rig.observer import eventually


@pytest.fixture(params=["memory", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    where = f"{request.param}:{tmp_path / 'store'}"
    with open_bus(where):
        yield where


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main(), 60)

    asyncio.run(bounded())


@asynccontextmanager
async def ticking() -> AsyncIterator[list[int]]:
    """Count iterations of the event loop."""
    turns = [0]

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    yield turns
    task.cancel()


def test_produce_and_replay(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url) as producer:
            assert (await producer.produce("t", "k", b"1", {"a": b"b"})).first_id == 1
            assert (await producer.produce_batch("t", [("k", b"2"), ("k", b"3")])).last_id == 3
            later: Any = await producer.produce("t", "k", b"4", wait=False)
            batch: Any = await producer.produce_batch("t", [("k", b"5")], wait=False)
            assert isinstance(later, asyncio.Future)
            assert await producer.flush()
            assert ((await later).first_id, (await batch).first_id) == (4, 5)
        found = [one async for one in fdq.aio.replay(url, "t")]
        assert [one.message for one in found] == [b"1", b"2", b"3", b"4", b"5"]
        assert found[0].headers == {"a": b"b"}
        rows = [one.num_rows async for one in fdq.aio.replay(url, "t", from_id=2, batch=True)]
        assert sum(rows) == 4
        assert (await fdq.aio.stats(url, "t"))["all"]["inserted"] == 5

    run(main)


def test_concurrent_messages_share_a_batch(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url, linger_s=60) as producer:
            work = (producer.produce("t", f"k{n % 3}", b"%d" % n) for n in range(500))
            done = await asyncio.gather(*work)
            assert len(set(done)) < 100
        found = [int(one.message) async for one in fdq.aio.replay(url, "t")]
        assert sorted(found) == list(range(500))

    run(main)


def test_full_batch_is_sent_by_a_thread(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url, linger_s=60, max_batch_rows=10) as producer:
            futures = [await producer.produce_nowait("t", "k", b"%d" % n) for n in range(95)]
            await producer.flush()
            assert all(one.exception() is None for one in await _settled(futures))
        found = [int(one.message) async for one in fdq.aio.replay(url, "t")]
        assert found == list(range(95))

    run(main)


async def _settled(futures: list[asyncio.Future[Any]]) -> list[asyncio.Future[Any]]:
    await asyncio.wait(futures)
    return futures


def test_errors_are_raised_where_they_are_awaited(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url, create=False) as producer:
            with pytest.raises(errors.DoesNotExist):
                await producer.produce("nowhere", "k", b"x")
            with pytest.raises(errors.DoesNotExist):
                await producer.produce_batch("nowhere", [("k", b"x")])
        async with fdq.aio.Producer(url) as producer:
            with pytest.raises(errors.TooLarge):
                await producer.produce("t", "k" * 1025, b"x")
            with pytest.raises(errors.InvalidTopic):
                await producer.produce("a,b", "k", b"x")
            with pytest.raises(errors.MalformedRequest):
                await producer.produce_batch("t", [])
        with pytest.raises(errors.ConnectionLost):
            await producer.produce("t", "k", b"x")
        with pytest.raises(errors.DoesNotExist):
            await anext(fdq.aio.replay(url, "nowhere"))
        with pytest.raises(errors.UsageError):
            await anext(fdq.aio.replay(url, "t", from_id=-1))
        with pytest.raises(errors.UsageError):
            await fdq.aio.reset(url, "t", to="somewhere")

    run(main)


def test_producer_closed_before_its_first_use_is_not_opened(url: str) -> None:
    async def main() -> None:
        producer = fdq.aio.Producer(url)
        await producer.close()
        with pytest.raises(errors.ConnectionLost):
            await producer.produce("t", "k", b"x")

    run(main)


def test_newer_producer_of_the_same_name_fences_the_older(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url, "importer") as older:
            await older.produce("t", "k", b"1")
            async with fdq.aio.Producer(url, "importer") as newer:
                await newer.produce("t", "k", b"2")
                with pytest.raises(errors.Fenced):
                    await older.produce("t", "k", b"3")

    run(main)


def test_first_call_opens_the_producer_once(url: str) -> None:
    async def main() -> None:
        producer = fdq.aio.Producer(url)
        await asyncio.gather(*(producer.produce("t", "k", b"x") for _ in range(5)))
        await producer.close()
        await producer.close()
        never = fdq.aio.Producer(url)
        await never.close()

    run(main)


def test_failed_opening_can_be_retried(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")

    async def main() -> None:
        producer = fdq.aio.Producer(f"lmdb:{taken}")
        for _ in range(2):
            with pytest.raises(errors.StoreFault, match="file"):
                await producer.produce("t", "k", b"x")
        taken.unlink()
        await producer.produce("t", "k", b"x")
        await producer.close()

    run(main)


def test_waiting_replay_does_not_block_the_loop(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url) as producer, ticking() as turns:
            await producer.produce("t", "k", b"1")
            async with fdq.aio.replay(url, "t", wait_s=math.inf) as replay:
                assert (await anext(replay)).message == b"1"
                coming = asyncio.create_task(anext(replay))
                before = turns[0]
                await eventually(lambda: turns[0] > before + 10, "the loop to turn")
                assert not coming.done()
                await producer.produce("t", "k", b"2")
                assert (await coming).message == b"2"
            assert [one async for one in replay] == []

    run(main)


def test_cancelled_waiting_replay_can_be_closed(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url) as producer:
            await producer.produce("t", "k", b"1")
        replay = fdq.aio.replay(url, "t", wait_s=math.inf)
        await anext(replay)
        coming = asyncio.create_task(anext(replay))
        with open_bus(url) as bus:
            await eventually(lambda: count_waits(bus), "the replay to wait")
        coming.cancel()
        await replay.aclose()
        await replay.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(replay)

    run(main)


def test_cancelling_a_call_does_not_withdraw_the_message(url: str) -> None:
    async def main() -> None:
        async with fdq.aio.Producer(url) as producer:
            await producer.produce("t", "k", b"1")
            task = asyncio.create_task(producer.produce("t", "k", b"2"))
            await asyncio.sleep(0)
            task.cancel()
            await producer.flush()
        found = [one.message async for one in fdq.aio.replay(url, "t")]
        assert found in ([b"1"], [b"1", b"2"])

    run(main)
