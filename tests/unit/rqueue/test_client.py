"""The async client: subscribe, publish, receive, large messages, back-pressure."""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

import pytest

from polybus import rqueue
from polybus.dialects.rqueue import codec
from polybus.errors import InvalidTopic, NotConnected, TooLarge, UsageError
from polybus.model.limits import KIB, MIB
from tests.unit.rqueue.polling import contents, receive, until


async def test_own_publishes_arrive_in_order(address, topic):
    async with rqueue.connect(address) as client:
        await client.subscribe(topic)
        for content in (b"one", b"", b"three"):
            await client.publish(topic, content)
        assert await receive(client, 3) == [
            rqueue.Message(topic.encode(), content) for content in (b"one", b"", b"three")
        ]


async def test_topics_may_be_text_or_any_bytes(address):
    raw = b"\xff\x00" + os.urandom(8)
    async with rqueue.connect(address) as client:
        await client.subscribe(raw, "bücher")
        await client.publish("bücher", b"1")
        await client.publish(raw, memoryview(b"2"))
        assert await receive(client, 2) == [
            rqueue.Message("bücher".encode(), b"1"),
            rqueue.Message(raw, b"2"),
        ]


async def test_subscription_is_active_when_subscribe_returns(address, topic):
    async with rqueue.connect(address) as reader, rqueue.connect(address) as writer:
        for number in range(50):
            await reader.subscribe(f"{topic}{number}")
            await writer.publish(f"{topic}{number}", b"%d" % number)
        assert await contents(reader, 50) == [b"%d" % number for number in range(50)]


async def test_remove_ends_a_subscription_before_it_returns(address, topic):
    async with rqueue.connect(address) as reader, rqueue.connect(address) as writer:
        await reader.subscribe(topic, topic + "2")
        await reader.remove(topic)
        await writer.publish(topic, b"unheard")
        await writer.publish(topic + "2", b"heard")
        assert await contents(reader, 1) == [b"heard"]


async def test_deregister_ends_all_subscriptions_and_allows_new_ones(address, topic):
    async with rqueue.connect(address) as reader, rqueue.connect(address) as writer:
        await reader.subscribe(topic, topic + "2")
        await reader.deregister()
        await writer.publish_many(topic, [b"unheard"])
        await writer.publish_many(topic + "2", [b"unheard"])
        await writer.flush()
        await reader.subscribe(topic)
        await writer.publish(topic, b"heard")
        assert await contents(reader, 1) == [b"heard"]


async def test_every_subscriber_gets_each_message_once(address, topic):
    async with (
        rqueue.connect(address) as one,
        rqueue.connect(address) as two,
        rqueue.connect(address) as writer,
    ):
        await one.subscribe(topic, topic)
        await one.subscribe(topic)
        await two.subscribe(topic)
        await writer.publish_many(topic, [b"a", b"b"])
        assert await contents(one, 2) == await contents(two, 2) == [b"a", b"b"]


@pytest.mark.parametrize("shape", [list, tuple, iter], ids=["list", "tuple", "iterator"])
async def test_many_messages_of_mixed_sizes_keep_their_order(address, topic, shape):
    sizes = itertools.cycle([0, 1, 128, 1500, 2042, 3000, 10_000])
    sent = [b"%d" % n + bytes(size) for n, size in zip(range(5000), sizes, strict=False)]
    async with rqueue.connect(address) as reader, rqueue.connect(address) as writer:
        await reader.subscribe(topic)
        publishing = asyncio.create_task(writer.publish_many(topic, shape(sent)))
        assert await contents(reader, len(sent)) == sent
        await publishing


class TestLargeMessages:
    @pytest.mark.parametrize("length", [1, 255])
    async def test_sizes_around_the_frame_and_part_limits_are_delivered(self, address, length):
        topic = os.urandom(length)
        frame, chunk = codec.max_content(topic), codec.max_chunk(topic)
        sizes = [frame - 1, frame, frame + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1]
        async with rqueue.connect(address) as client:
            await client.subscribe(topic)
            for size in sizes:
                await client.publish(topic, os.urandom(8) + bytes(size - 8))
            got = await contents(client, len(sizes))
            assert [len(content) for content in got] == sizes
            assert client.lost_parts == 0

    async def test_concurrent_large_publishes_are_delivered(self, address, topic):
        sent = [os.urandom(MIB) for _ in range(4)]
        async with rqueue.connect(address) as reader, rqueue.connect(address) as writer:
            await reader.subscribe(topic)
            async with asyncio.TaskGroup() as group:
                for content in sent:
                    group.create_task(writer.publish(topic, content))
                got = await contents(reader, 4)
            assert sorted(got) == sorted(sent)

    async def test_largest_message_is_delivered(self, address, topic, kind):
        # The oracle would take seconds for all of it, and learn nothing new.
        content = os.urandom(64) * (MIB if kind == "polybus" else MIB // 32)
        async with rqueue.connect(address) as client:
            await client.subscribe(topic)
            publishing = asyncio.create_task(client.publish(topic, content))
            assert await contents(client, 1) == [content]
            await publishing
            with pytest.raises(TooLarge):
                await client.publish(topic, bytes(64 * MIB + 1))
            await client.publish(topic, b"still here")
            assert await contents(client, 1) == [b"still here"]

    async def test_incomplete_message_expires_and_is_counted(self, address, topic):
        half = codec.publish_part(topic.encode(), bytes(16), 0, 2, b"half")
        async with rqueue.connect(address, parts=rqueue.PartLimits(timeout_s=0.05)) as client:
            await client.subscribe(topic)
            (await client._reconnector.wait_connected()).write(half)
            await until(lambda: client.lost_parts == 1)
            assert client.lost_messages["expired"] == 1
            await client.publish(topic, b"next")
            assert await contents(client, 1) == [b"next"]

    async def test_higher_max_payload_needs_fewer_parts(self, start, topic):
        cap = 64 * KIB
        content = os.urandom(codec.max_content(topic.encode(), cap))
        with start("--max-payload", str(cap)) as bus:
            async with rqueue.connect(str(bus.address()), max_payload=cap) as client:
                await client.subscribe(topic)
                await client.publish_many(topic, [content, content + b"!"])
                assert await contents(client, 2) == [content, content + b"!"]
                assert client._parts.completed == 1


class TestReading:
    async def test_messages_and_batches_can_be_read_alternately(self, address, topic):
        sent = [b"%d" % number for number in range(1000)]
        async with rqueue.connect(address) as client:
            await client.subscribe(topic)
            await client.publish_many(topic, sent)
            await client.flush()
            got = await contents(client, 3)
            batches = client.batches()
            while len(got) < len(sent):
                got += (await anext(batches)).contents()
                if len(got) < len(sent):
                    got += await contents(client, 1)
            assert got == sent

    async def test_next_batch_waits_at_most_its_timeout(self, address, topic):
        async with rqueue.connect(address) as client:
            await client.subscribe(topic)
            assert await client.next_batch(timeout_s=0.01) is None
            await client.publish(topic, b"x")
            batch = await client.next_batch(timeout_s=20)
            assert batch is not None
            assert batch.contents() == [b"x"]

    async def test_cancelled_read_loses_no_message(self, address, topic):
        async with rqueue.connect(address) as client:
            await client.subscribe(topic)
            batches = client.batches()
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(batches), 0.01)
            await client.publish(topic, b"x")
            assert (await asyncio.wait_for(anext(batches), 20)).contents() == [b"x"]

    async def test_probes_are_not_delivered_to_the_caller(self, address, topic):
        async with rqueue.connect(address) as client:
            for number in range(20):
                await client.subscribe(f"{topic}{number}")
                await client.publish(f"{topic}{number}", b"%d" % number)
                await client.flush()
            assert await contents(client, 20) == [b"%d" % number for number in range(20)]
            assert await client.next_batch(timeout_s=0.01) is None

    async def test_full_inbox_stops_the_publisher_without_loss(self, address, topic):
        limit, count, content = 1 * MIB, 40_000, bytes(1000)
        async with (
            rqueue.connect(address, max_inbox_bytes=limit) as reader,
            rqueue.connect(address) as writer,
        ):
            await reader.subscribe(topic)
            publishing = asyncio.create_task(writer.publish_many(topic, [content] * count))
            await until(lambda: reader.inbox_bytes > limit)
            held = reader.inbox_bytes
            got = 0
            async for batch in reader.batches():
                got += len(batch)
                held = max(held, reader.inbox_bytes)
                if got == count:
                    break
            await publishing
            # One read more than the bound may come, and its table of entries.
            assert held < limit + 512 * KIB
            assert reader.reconnects == writer.reconnects == 0

    async def test_subscribe_with_a_full_inbox_does_not_deadlock(self, address, topic):
        async with (
            rqueue.connect(address, max_inbox_bytes=64 * KIB) as reader,
            rqueue.connect(address) as writer,
        ):
            await reader.subscribe(topic)
            await writer.publish_many(topic, [bytes(1000)] * 4000)
            await until(lambda: reader.inbox_bytes > 64 * KIB)
            await reader.subscribe(topic + "2")
            assert len(await receive(reader, 4000)) == 4000


class TestClosing:
    async def test_received_messages_can_be_read_after_close(self, address, topic):
        client = rqueue.connect(address)
        async with client:
            await client.subscribe(topic)
            await client.publish_many(topic, [b"a", b"b"])
            await client.flush()
        assert [message.content async for message in client] == [b"a", b"b"]
        assert [batch async for batch in client.batches()] == []

    async def test_close_ends_waiting_readers(self, address):
        async with rqueue.connect(address) as client:
            waiting = asyncio.create_task(client.next_batch())
            await asyncio.sleep(0)
        assert await waiting is None

    async def test_closed_client_rejects_calls_and_closes_twice(self, address, topic):
        client = rqueue.connect(address)
        async with client:
            pass
        await client.close()
        assert not client.is_connected
        for call in (client.publish(topic, b""), client.subscribe(topic)):
            with pytest.raises(NotConnected, match="closed"):
                await call
        with pytest.raises(UsageError, match="once"):
            await client.open()

    async def test_error_in_the_with_block_is_raised(self, address, topic):
        async def fail() -> None:
            async with rqueue.connect(address) as client:
                await client.publish(topic, b"x")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()


class TestMisuse:
    @pytest.mark.parametrize("bad", ["", "x" * 256])
    async def test_invalid_topics_are_rejected_without_effect(self, address, topic, bad):
        async with rqueue.connect(address) as client:
            for call in (
                client.subscribe(topic, bad),
                client.remove(bad),
                client.publish(bad, b""),
                client.publish_many(bad, []),
            ):
                with pytest.raises(InvalidTopic):
                    await call
            await client.subscribe(topic)
            await client.publish(topic, b"x")
            assert await contents(client, 1) == [b"x"]

    async def test_contents_that_are_not_bytes_are_rejected(self, address, topic):
        text: Any = "text"
        many: Any = b"many?"
        async with rqueue.connect(address) as client:
            with pytest.raises(TypeError):
                await client.publish(topic, text)
            with pytest.raises(TypeError):
                await client.publish_many(topic, [b"ok", text])
            with pytest.raises(TypeError, match="use publish for a single one"):
                await client.publish_many(topic, many)

    async def test_client_must_be_opened_once_and_before_use(self, address, topic):
        client = rqueue.connect(address)
        with pytest.raises(UsageError, match="not open"):
            await client.publish(topic, b"x")
        async with client:
            with pytest.raises(UsageError, match="once"):
                await client.open()

    @pytest.mark.parametrize(
        "setting",
        [{"max_payload": 100}, {"wait_timeout_s": 0}, {"backoff_first_s": 9, "backoff_max_s": 1}],
    )
    async def test_invalid_options_are_rejected(self, setting):
        with pytest.raises(UsageError, match=next(iter(setting))):
            rqueue.connect(**setting)

    async def test_client_works_after_a_cancelled_subscribe(self, address, topic):
        async with rqueue.connect(address) as client:
            subscribing = asyncio.create_task(client.subscribe(topic))
            await asyncio.sleep(0)
            subscribing.cancel()
            await asyncio.wait([subscribing])
            await client.subscribe(topic)
            await client.publish(topic, b"x")
            assert await contents(client, 1) == [b"x"]
