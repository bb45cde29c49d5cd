"""The async client: topics, produce, subscribe, get and iteration."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from typing import Any

import pytest

from polybus import freud
from polybus.dialects.freud import codec
from polybus.dialects.freud.client import pull_subscription
from polybus.dialects.freud.limits import FreudLimits
from polybus.errors import (
    DoesNotExist,
    InvalidTopic,
    MalformedRequest,
    NotConnected,
    TooLarge,
    TopicDeleted,
    UsageError,
)
from polybus.model.limits import MIB
from tests.rig import freud_client as stranger


def bodies(records: list[freud.Record]) -> list[bytes]:
    return [record.body for record in records]


async def read(subscription: freud.Subscription, count: int) -> list[bytes]:
    """The next `count` bodies, by iteration."""
    return [(await anext(subscription)).body for _ in range(count)]


async def rest_of(subscription: freud.Subscription) -> list[bytes]:
    return [record.body async for record in subscription]


class TestTopics:
    async def test_create_and_delete_return_whether_the_topic_changed(self, address, topic):
        async with freud.connect(address) as client:
            assert await client.create_topic(topic) is True
            assert await client.create_topic(topic) is False
            assert topic in await client.list_topics()
            assert await client.delete_topic(topic) is True
            assert await client.delete_topic(topic) is False
            assert topic not in await client.list_topics()

    async def test_topic_names_may_be_non_ascii(self, address, topic):
        name = f"bücher/{topic}/読む"
        async with freud.connect(address) as client:
            await client.create_topic(name)
            assert name in await client.list_topics()

    @pytest.mark.parametrize("name", ["", "a,b", "a*", "_own", "a\nb", "x" * 256, b"bytes"])
    async def test_invalid_topic_name_is_rejected(self, address, name):
        async with freud.connect(address) as client:
            with pytest.raises(InvalidTopic):
                await client.create_topic(name)

    async def test_subscribers_are_counted(self, address, topic):
        async with freud.connect(address) as client:
            with pytest.raises(DoesNotExist):
                await client.count_subscribers(topic)
            await client.create_topic(topic)
            assert await client.count_subscribers(topic) == 0
            async with await client.subscribe(topic), await client.subscribe(topic):
                assert await client.count_subscribers(topic) == 2
            assert await client.count_subscribers(topic) == 0

    async def test_missing_topic_raises_does_not_exist(self, address, topic):
        async with freud.connect(address) as client:
            for request in (client.produce(topic, b""), client.subscribe(topic)):
                with pytest.raises(DoesNotExist, match=r"\[(asyncio|uvloop)\]'.*does not exist"):
                    await request
            assert client.is_connected


class TestProducing:
    async def test_produce_without_a_subscriber_returns_none_and_uses_no_id(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            assert await client.produce(topic, b"unheard") is None
            assert await client.produce_many(topic, [b"unheard"] * 3) == [None] * 3
            async with await client.subscribe(topic) as subscription:
                assert await client.produce(topic, b"heard") == 0
                assert await client.produce_many(topic, [b"a", bytearray(b"b")]) == [1, 2]
                assert bodies(await subscription.get_many(9)) == [b"heard", b"a", b"b"]

    @pytest.mark.parametrize("shape", [list, tuple, iter], ids=["list", "tuple", "iterator"])
    async def test_produce_many_keeps_the_order_of_mixed_sizes(self, address, topic, shape):
        sizes = itertools.cycle([0, 1, 128, 5000])
        sent = [b"%d" % n + bytes(size) for n, size in zip(range(5000), sizes, strict=False)]
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                assert await client.produce_many(topic, shape(sent)) == list(range(5000))
                assert await read(subscription, 5000) == sent

    async def test_largest_body_is_delivered(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            largest = os.urandom(16) * MIB
            largest = largest[: codec.max_body(topic.encode())]
            async with await client.subscribe(topic) as subscription:
                await client.produce(topic, largest)
                assert bodies(await subscription.get_many(1)) == [largest]
                await client.produce_many(topic, [b"small", largest, b"small"])
                assert await read(subscription, 3) == [b"small", largest, b"small"]
                for request in (
                    client.produce(topic, largest + b"!"),
                    client.produce_many(topic, [b"before", largest + b"!", b"after"]),
                ):
                    with pytest.raises(TooLarge):
                        await request
                assert await read(subscription, 1) == [b"before"]

    async def test_produce_many_rejects_a_single_body(self, address, topic):
        async with freud.connect(address) as client:
            for wrong in (b"bytes", "text"):
                with pytest.raises(TypeError, match="produce"):
                    await client.produce_many(topic, wrong)  # type: ignore[arg-type]

    async def test_error_of_produce_many_notes_how_many_were_accepted(self, address, topic):
        max_frame_bytes = FreudLimits().max_frame_bytes
        async with freud.connect(address, max_frame_bytes=2 * max_frame_bytes) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                with pytest.raises(MalformedRequest, match="max_frame_bytes") as caught:
                    await client.produce_many(topic, [b"a", b"b", bytes(max_frame_bytes)])
                assert caught.value.__notes__ == ["2 messages of this call were accepted"]
                assert bodies(await subscription.get_many(9)) == [b"a", b"b"]

    async def test_detached_subscription_is_continued_by_its_id(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            subscription = await client.subscribe(topic)
            await client.produce_many(topic, [b"1", b"2"])
            assert bodies(await subscription.get_many(1)) == [b"1"]
            assert await subscription.get(timeout_s=0) is not None
            # A Get that waits at the bus consumes nothing once the client has detached.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await subscription.get()
            key = await subscription.detach()
            with pytest.raises(UsageError, match="was detached"):
                await subscription.get()
            assert await subscription.detach() == key
        async with freud.connect(address) as client:
            assert await client.count_subscribers(topic) == 1
            await client.produce_many(topic, [b"3", b"4"])
            again = await client.attach(key)
            assert (again.id, again.topic) == (key, "")
            with pytest.raises(UsageError, match="is open in this client"):
                await client.attach(key)
            assert bodies(await again.get_many(9)) == [b"3", b"4"]
            await client.delete_topic(topic)
            with pytest.raises(TopicDeleted, match=re.escape(repr(topic))):
                await again.get()

    async def test_unknown_subscription_does_not_exist(self, address):
        async with freud.connect(address) as client:
            unknown = await client.attach(bytes(range(16)))
            with pytest.raises(DoesNotExist, match="000102"):
                await unknown.get(timeout_s=0)
            with pytest.raises(UsageError, match="16 bytes"):
                await client.attach(b"short")

    async def test_produce_many_stops_sending_after_an_error(self, address, topic):
        produced = itertools.count()
        async with freud.connect(address) as client:
            with pytest.raises(DoesNotExist):
                await client.produce_many(topic, (bytes(1000) for _ in produced))
        assert next(produced) < 1_000_000

    async def test_concurrent_tasks_each_get_their_own_answer(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                ids = await asyncio.gather(*(client.produce(topic, b"%d" % n) for n in range(500)))
                got = {
                    record.body: record.message_id for record in await subscription.get_many(999)
                }
                assert sorted(got.values()) == list(range(500))
                assert [got[b"%d" % n] for n in range(500)] == ids

    async def test_unanswered_requests_are_bounded(self, address, topic, monkeypatch):
        monkeypatch.setattr("polybus.dialects.freud.client.freud_connection.MAX_EXPECTED", 10)
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            link, most = client._require_connection(), 0
            send = link.send

            def counted_send(*args: Any) -> None:
                nonlocal most
                send(*args)
                most = max(most, link._unanswered)

            monkeypatch.setattr(link, "send", counted_send)
            await asyncio.gather(*(client.produce(topic, b"x") for _ in range(200)))
            assert most == 10

    async def test_cancelled_request_does_not_shift_later_answers(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            for _ in range(20):
                calls = [asyncio.create_task(client.list_topics()) for _ in range(3)]
                await asyncio.sleep(0)
                calls[1].cancel()
                assert await client.count_subscribers(topic) == 0
                assert topic in await calls[0]
                assert topic in await calls[2]


class TestReading:
    async def test_records_have_ids_and_timestamps(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            before = time.time_ns()
            async with await client.subscribe(topic) as subscription:
                assert len(subscription.id) == 16
                assert subscription.topic == topic
                for number in range(3):
                    await client.produce(topic, b"%d" % number)
                records = await subscription.get_many(10)
            after = time.time_ns()
            assert [record.message_id for record in records] == [0, 1, 2]
            times = [record.timestamp_ns for record in records]
            assert [before, *times, after] == sorted([before, *times, after])

    async def test_each_subscription_reads_all_messages_since_its_start(self, address, topic):
        async with freud.connect(address) as one, freud.connect(address) as two:
            await one.create_topic(topic)
            first = await one.subscribe(topic)
            await one.produce(topic, b"a")
            second, third = await one.subscribe(topic), await two.subscribe(topic)
            await two.produce(topic, b"b")
            assert bodies(await first.get_many(9)) == [b"a", b"b"]
            assert bodies(await second.get_many(9)) == [b"b"]
            assert bodies(await third.get_many(9)) == [b"b"]
            assert len({first.id, second.id, third.id}) == 3

    async def test_get_returns_one_record_within_its_timeout(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                for timeout_s in (0, 0.01, -1):
                    assert await subscription.get(timeout_s) is None
                await client.produce_many(topic, [b"a", b"b", b"c", b"d"])
                got = [await subscription.get(timeout_s) for timeout_s in (0, 0.01, 5, None)]
                assert [record.body for record in got if record] == [b"a", b"b", b"c", b"d"]

    async def test_get_returns_none_only_if_the_topic_has_no_unread_message(
        self, bus, address, topic
    ):
        """Also after a timeout that left a Get pending at the bus."""
        with stranger.connect(bus.address("freud")) as other:  # holds up our loop while it works
            async with freud.connect(address) as client:
                await client.create_topic(topic)
                async with await client.subscribe(topic) as subscription:
                    for number in range(30):
                        assert await subscription.get(0.001) is None
                        body = b"%d" % number
                        assert other.ask(stranger.produce(topic.encode(), body)).code == stranger.OK
                        record = await subscription.get(0)
                        assert record is not None
                        assert record.body == body

    async def test_produce_wakes_a_waiting_get(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                waiting = asyncio.create_task(subscription.get())
                await asyncio.sleep(0.02)
                await client.produce(topic, b"woken")
                record = await waiting
                assert record is not None
                assert record.body == b"woken"

    async def test_cancelled_get_loses_no_message(self, address, topic):
        count = 300
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:

                async def produce() -> None:
                    for number in range(count):
                        await client.produce(topic, b"%d" % number)

                producing = asyncio.create_task(produce())
                got: list[bytes] = []
                while len(got) < count:
                    task = asyncio.create_task(subscription.get())
                    await asyncio.sleep(0.0002)
                    if task.cancel():
                        await asyncio.wait([task])
                    if not task.cancelled() and (record := task.result()) is not None:
                        got.append(record.body)
                    if producing.done() and not task.cancelled():
                        got += bodies(await subscription.get_many(count, 0))
                await producing
                assert got == [b"%d" % number for number in range(count)]

    async def test_cancelled_iteration_continues_at_the_next_message(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                for number in range(5):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(anext(subscription), 0.005)
                    await client.produce(topic, b"%d" % number)
                    assert (await asyncio.wait_for(anext(subscription), 20)).body == b"%d" % number

    async def test_get_many_returns_at_most_max_messages_records(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                await client.produce_many(topic, [b"%d" % n for n in range(10_000)])
                assert len(await subscription.get_many(3)) == 3
                assert len(await subscription.get_many(100, 0)) == 100
                rest: list[bytes] = []
                while some := await subscription.get_many(10_000, 0):
                    assert len(some) <= pull_subscription.MAX_ROUND_GETS
                    rest += bodies(some)
                assert rest == [b"%d" % n for n in range(103, 10_000)]
                await client.produce_many(topic, [bytes(1000)] * 3000)
                assert len(await subscription.get_many(5000)) == 3000
                with pytest.raises(UsageError, match="must be >= 1"):
                    await subscription.get_many(0)

    @pytest.mark.parametrize("prefetch", [1, 2, 256])
    async def test_iteration_prefetches_at_most_prefetch_records(self, address, topic, prefetch):
        sent = [b"%d" % number for number in range(1000)]
        async with freud.connect(address, prefetch=prefetch) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                await client.produce_many(topic, sent)
                got = []
                async for record in subscription:
                    got.append(record.body)
                    assert len(subscription.inbox.records) < prefetch
                    if len(got) == len(sent):
                        break
                assert got == sent

    async def test_waiting_get_does_not_block_other_requests(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            subscriptions = [await client.subscribe(topic) for _ in range(10)]
            waiting = [asyncio.create_task(one.get()) for one in subscriptions]
            await client.produce(topic, b"for all")
            assert [record.body for record in await asyncio.gather(*waiting) if record] == [
                b"for all"
            ] * 10

    async def test_concurrent_get_of_one_subscription_is_rejected(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            async with await client.subscribe(topic) as subscription:
                waiting = asyncio.create_task(subscription.get())
                await asyncio.sleep(0)
                with pytest.raises(UsageError, match="another task"):
                    await subscription.get()
                await client.produce(topic, b"x")
                assert await waiting is not None


class TestEnds:
    async def test_unsubscribe_ends_waiting_gets(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            waiting, looping = await client.subscribe(topic), await client.subscribe(topic)
            get = asyncio.create_task(waiting.get())
            loop = asyncio.create_task(rest_of(looping))
            await asyncio.sleep(0.02)
            await waiting.unsubscribe()
            await looping.unsubscribe()
            with pytest.raises(DoesNotExist, match="unsubscribed"):
                await get
            with pytest.raises(StopAsyncIteration):
                await anext(looping)
            assert await loop == []
            assert await client.count_subscribers(topic) == 0
            await waiting.unsubscribe()  # once more changes nothing

    async def test_unsubscribe_discards_unread_records(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            subscription = await client.subscribe(topic)
            await client.produce_many(topic, [b"x"] * 100)
            await anext(subscription)
            await anext(subscription)
            await subscription.unsubscribe()
            assert await rest_of(subscription) == []

    async def test_close_unsubscribes(self, address, topic):
        async with freud.connect(address) as other:
            await other.create_topic(topic)
            async with freud.connect(address) as client:
                subscriptions = [await client.subscribe(topic) for _ in range(3)]
                waiting = asyncio.create_task(subscriptions[0].get())
                await asyncio.sleep(0.02)
                assert await other.count_subscribers(topic) == 3
            assert await other.count_subscribers(topic) == 0
            with pytest.raises(DoesNotExist):
                await waiting
            with pytest.raises(NotConnected, match="closed"):
                await client.list_topics()

    async def test_client_keeps_no_ended_subscriptions(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            left, deleted = await client.subscribe(topic), await client.subscribe(topic)
            await left.unsubscribe()
            await client.delete_topic(topic)
            assert await rest_of(deleted) == []
            assert client._subscriptions == {}
