"""Topics with several clients: notices, recreation, timeouts, rules, quotas, rqueue."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator

import pytest

from polybus import freud
from polybus.dialects.freud import codec
from polybus.errors import Denied, DoesNotExist, LimitReached, NotConnected, Refused, TopicDeleted
from polybus.testing.bus_process import BusProcess
from tests.rig.observer import count, eventually, stats
from tests.unit.freud.conftest import running

PATIENCE_S = 20.0
SUBSCRIBER_TIMEOUT_S = 0.3
QUOTAS = {
    "quotas_quota_bytes": "1000",
    "quotas_quota_topics": "2",
    "quotas_quota_subscriptions": "3",
    "quotas_quota_connections": "8",
}


@pytest.fixture(scope="module")
def strict() -> Iterator[BusProcess]:
    """A bus with rules, small quotas and short timeouts."""
    me = f"user:{os.getuid()}"
    rules = [f"deny {me} create no-create", f"deny {me} produce no-produce"]
    rules += [f"deny {me} subscribe no-subscribe"]
    patience = {
        "freud_subscriber_timeout_s": str(SUBSCRIBER_TIMEOUT_S),
        "freud_detached_subscription_s": str(SUBSCRIBER_TIMEOUT_S),
    }
    with running(None, acl=";".join(rules), **patience, **QUOTAS) as one:
        yield one


@pytest.fixture
def strict_address(strict: BusProcess) -> str:
    return str(strict.address("freud"))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 - conditions of the bus, which has no events
            await asyncio.sleep(0.01)


async def rest_of(subscription: freud.Subscription) -> list[bytes]:
    return [record.body async for record in subscription]


def dropped(bus: BusProcess, reason: str) -> int:
    count: int = stats(bus)["dropped"].get(reason, 0)
    return count


class TestDeletion:
    async def test_each_reader_reads_its_unread_messages_then_the_notice(self, address, topic):
        async with freud.connect(address) as one, freud.connect(address) as two:
            await one.create_topic(topic)
            first, second = await one.subscribe(topic), await two.subscribe(topic)
            await one.produce_many(topic, [b"a", b"b"])
            assert await first.get_many(9) != []
            await one.delete_topic(topic)
            assert first.notice is None
            with pytest.raises(TopicDeleted, match="was deleted"):
                await first.get()
            assert await rest_of(second) == [b"a", b"b"]
            for reader in (first, second):
                assert reader.notice is not None
                assert reader.notice.message_id == 2
                assert reader.notice.is_notice
                assert reader.notice.body == codec.deletion_notice(topic.encode())
                for timeout_s in (None, 0, 0.01):
                    with pytest.raises(TopicDeleted):
                        await reader.get_many(5, timeout_s)
            assert topic not in await two.list_topics()

    async def test_deletion_wakes_waiting_readers(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            getting, looping = await client.subscribe(topic), await client.subscribe(topic)
            get = asyncio.create_task(getting.get())
            loop = asyncio.create_task(rest_of(looping))
            await asyncio.sleep(0.02)
            await client.delete_topic(topic)
            with pytest.raises(TopicDeleted):
                await get
            assert await loop == []
            assert looping.notice is not None

    async def test_deleted_topic_is_listed_until_its_notice_is_read(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            reader = await client.subscribe(topic)
            await client.delete_topic(topic)
            assert (await client.list_topics()).count(topic) == 1
            assert await client.count_subscribers(topic) == 1
            for request in (client.produce(topic, b""), client.subscribe(topic)):
                with pytest.raises(DoesNotExist):
                    await request
            await reader.unsubscribe()  # counts as having read it
            assert topic not in await client.list_topics()

    async def test_reader_past_the_deletion_timeout_gets_does_not_exist(
        self, strict_address, topic
    ):
        async with freud.connect(strict_address) as client:
            await client.create_topic(topic)
            late = await client.subscribe(topic)
            await client.produce(topic, b"unread")
            await client.delete_topic(topic)

            async def gone() -> bool:
                return topic not in await client.list_topics()

            await until(gone)
            with pytest.raises(DoesNotExist, match="not read in time") as caught:
                await anext(late)
            assert not isinstance(caught.value, TopicDeleted)
            assert late.notice is None

    async def test_subscriptions_of_a_dead_client_are_removed(self, strict_address, topic):
        async with freud.connect(strict_address) as client:
            await client.create_topic(topic)
            dead = await freud.connect(strict_address).__aenter__()
            reader = await dead.subscribe(topic)
            assert await client.count_subscribers(topic) == 1
            reader.inbox._connection.abort()
            dead._require_connection().abort()

            async def reaped() -> bool:
                return await client.count_subscribers(topic) == 0

            await until(reaped)
            await client.delete_topic(topic)


class TestRecreation:
    async def test_recreated_topic_buffers_messages_until_the_old_readers_are_done(
        self, address, topic
    ):
        async with freud.connect(address) as one, freud.connect(address) as two:
            await one.create_topic(topic)
            old = await one.subscribe(topic)
            await one.produce(topic, b"old")
            await one.delete_topic(topic)
            assert await two.create_topic(topic) is True
            assert await two.create_topic(topic) is False
            assert await two.count_subscribers(topic) == 0
            assert await one.produce(topic, b"new 0") == 0
            new = await two.subscribe(topic)
            assert await one.produce(topic, b"new 1") == 1
            assert await new.get(0) is None
            assert (await one.list_topics()).count(topic) == 1
            assert await rest_of(old) == [b"old"]
            got = await new.get_many(9)
            assert [(r.message_id, r.body) for r in got] == [(0, b"new 0"), (1, b"new 1")]

    async def test_buffer_waits_for_the_first_subscriber(self, address, topic):
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            old = await client.subscribe(topic)
            await client.delete_topic(topic)
            await client.create_topic(topic)
            assert await client.produce(topic, b"0") == 0
            assert await rest_of(old) == []
            assert await client.produce(topic, b"1") == 1
            first, second = await client.subscribe(topic), await client.subscribe(topic)
            assert [record.body for record in await first.get_many(9)] == [b"0", b"1"]
            assert await second.get(0) is None

    async def test_second_delete_cancels_the_recreation(self, bus, address, topic):
        before = dropped(bus, "topic_deleted")
        async with freud.connect(address) as client:
            await client.create_topic(topic)
            old = await client.subscribe(topic)
            await client.delete_topic(topic)
            await client.create_topic(topic)
            new = await client.subscribe(topic)
            await client.produce(topic, b"never read")
            assert await client.delete_topic(topic) is True
            assert await rest_of(new) == []
            assert await client.create_topic(topic) is True
            third = await client.subscribe(topic)
            await client.produce(topic, b"third life")
            assert await third.get(0) is None
            assert await rest_of(old) == []
            record = await third.get()
            assert record is not None
            assert (record.message_id, record.body) == (0, b"third life")
        assert dropped(bus, "topic_deleted") == before + 1


@pytest.mark.needs(dialect="rqueue")
class TestOtherDialects:
    async def test_freud_subscriber_reads_rqueue_publishes(self, bus, address, topic):
        from polybus import rqueue

        sent = [b"one", b"", codec.deletion_notice(topic.encode()), bytes(100_000)]
        async with (
            freud.connect(address) as client,
            rqueue.connect(str(bus.address("rqueue"))) as publisher,
        ):
            await client.create_topic(topic)
            async with await client.subscribe(topic) as reader:
                await publisher.publish_many(topic, sent)
                records = [await anext(reader) for _ in sent]
                assert [record.body for record in records] == sent
                assert [record.message_id for record in records] == [0, 1, 2, 3]
                assert not any(record.is_notice for record in records)
                assert await client.produce(topic, b"its own") == 4

    async def test_rqueue_subscriber_gets_freud_produces(self, bus, address, topic):
        from polybus import rqueue

        sent = [b"one", b"", bytes(100_000)]
        async with (
            freud.connect(address) as client,
            rqueue.connect(str(bus.address("rqueue"))) as subscriber,
        ):
            await client.create_topic(topic)
            await subscriber.subscribe(topic)
            assert await client.count_subscribers(topic) == 1
            assert await client.produce_many(topic, sent) == [0, 1, 2]
            got = [await anext(subscriber) for _ in sent]
            assert [message.content for message in got] == sent
            await client.delete_topic(topic)  # to rqueue that is silence
            assert await subscriber.next_batch(timeout_s=0.01) is None


class TestRefusals:
    async def test_policy_denials_raise_denied(self, strict_address):
        async with freud.connect(strict_address) as client:
            with pytest.raises(Denied, match="not allowed to create topic 'no-create'"):
                await client.create_topic("no-create")
            for name in ("no-produce", "no-subscribe"):
                await client.create_topic(name)
            for attempt in (
                client.produce("no-produce", b"x"),
                client.produce_many("no-produce", [b"x"] * 5),
                client.subscribe("no-subscribe"),
            ):
                with pytest.raises(Denied, match=r"not allowed to (produce|subscribe) to 'no-"):
                    await attempt
            for name in ("no-produce", "no-subscribe"):
                await client.delete_topic(name)
            assert client.is_connected

    async def test_quota_errors_name_the_quota(self, strict_address, topic):
        async with freud.connect(strict_address) as client:
            await client.create_topic(topic)
            await client.create_topic(topic + "2")
            await self.refused("quota_topics", client.create_topic(topic + "3"))
            readers = [await client.subscribe(topic) for _ in range(3)]
            await self.refused("quota_subscriptions", client.subscribe(topic))
            for reader in readers[1:]:
                await reader.unsubscribe()
            await self.refused("quota_bytes", client.produce(topic, bytes(1001)))
            error = await self.refused("quota_bytes", client.produce_many(topic, [bytes(300)] * 5))
            assert error.__notes__ == ["3 messages of this call were accepted"]
            assert len(await readers[0].get_many(9)) == 3
            assert await client.produce(topic, bytes(1000)) == 3
            for name in (topic, topic + "2"):
                await client.delete_topic(name)

    async def test_connection_over_quota_is_closed_with_a_reason(self, strict_address, strict):
        # The bus may not have noticed yet that the clients of the test before have closed.
        await eventually(lambda: count(strict, "connections", "open") == 0, "all are closed")
        clients = [freud.connect(strict_address) for _ in range(9)]
        for client in clients[:8]:
            await client.open()
        with pytest.raises(NotConnected, match="quota_connections"):
            await clients[8].open()
        await clients[0].close()

        async def let_in() -> bool:
            another = freud.connect(strict_address)
            try:
                await another.open()
            except NotConnected:
                return False
            await another.close()
            return True

        await until(let_in)
        for client in clients[1:8]:
            await client.close()
        await eventually(lambda: "quota_connections" in strict.log(), "the log says why")

    async def refused(self, limit: str, request: Awaitable[object]) -> Refused:
        with pytest.raises(LimitReached, match=limit) as caught:
            await request
        assert caught.value.limit == limit
        return caught.value
