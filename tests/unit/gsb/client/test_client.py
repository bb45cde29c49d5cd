"""The asyncio client: services, calls, streams, topics."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from polybus import gsb
from polybus.errors import (
    CallCancelled,
    Conflict,
    DeadlinePassed,
    DoesNotExist,
    LimitReached,
    MalformedRequest,
    NotConnected,
    ServiceFailed,
    ServiceGone,
    TooLarge,
    UsageError,
)
from polybus.model.address import Address
from tests.rig.gsb_peer import connect as plain
from tests.rig.gsb_peer import packet, reply
from tests.rig.observer import eventually


class TestCalls:
    async def test_call_and_stream_of_one_client(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("greeter")
            async def greet(call):
                return {"hello": call.data["name"]}

            @bus.service("greeter/many")
            async def many(call):
                for number in range(call.data["n"]):
                    yield number

            assert await bus.call("greeter", {"name": "Ada"}) == {"hello": "Ada"}
            assert [item async for item in bus.stream("greeter/many", {"n": 3})] == [0, 1, 2]
            assert bus.open_calls == 0

    @pytest.mark.parametrize(
        "value",
        [
            *(None, 0, -1, 2**63, 1.5, True, "", "text", "한글", b"", b"bytes", [], [1, [2]], {}),
            *({"a": {1: [None]}}, {"k" * 300: b"v" * 70_000}, b"x" * 3_000_000),
        ],
        ids=lambda value: repr(value)[:20],
    )
    async def test_values_survive_a_round_trip(self, address, value):
        async with gsb.connect(address) as bus:

            @bus.service("echo")
            async def echo(call):
                return call.data

            @bus.service("items")
            async def items(call):
                yield call.data
                yield call.data

            assert await bus.call("echo", value) == value
            assert [item async for item in bus.stream("items", value)] == [value, value]

    async def test_handler_receives_address_method_service_and_caller(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("a/b")
            async def echo(call):
                return [call.address, call.method, call.service_id, call.caller]

            address_, method, service_id, caller = await bus.call("/local/a/b/c/d")
            assert (address_, method, service_id) == ("a/b/c/d", "c/d", "a/b")
            assert caller.startswith("local:")

    async def test_concurrent_calls_receive_their_own_replies(self, address):
        async with gsb.connect(address) as server, gsb.connect(address) as bus:
            gate = asyncio.Event()

            async def echo(call):
                if call.data % 3 == 0:
                    await gate.wait()
                return call.data

            await server.register("echo", echo)
            calls = [asyncio.ensure_future(bus.call("echo", number)) for number in range(300)]
            await asyncio.wait(calls, return_when="FIRST_COMPLETED")
            gate.set()
            assert await asyncio.gather(*calls) == list(range(300))

    async def test_handler_may_call_other_services(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("inner")
            async def inner(call):
                return call.data + 1

            @bus.service("outer")
            async def outer(call):
                return await bus.call("inner", call.data) * 10

            assert await asyncio.gather(*(bus.call("outer", n) for n in range(20))) == [
                (n + 1) * 10 for n in range(20)
            ]

    async def test_built_in_services(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("mine")
            async def mine(call):
                return None

            await bus.call("mine")
            rows = await bus.call("sys/services")
            assert [(row["id"], row["calls"], row["pending"]) for row in rows] == [("mine", 1, 0)]
            assert await bus.call("/local/sys/ping", [1, 2]) == [1, 2]
            assert "gsb" in await bus.call("sys/stats")
            assert 0 < await bus.ping() < 10_000


class TestFailures:
    async def test_each_failure_has_its_error_type(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("fails")
            async def fails(call):
                raise KeyError("which")

            @bus.service("chooses")
            async def chooses(call):
                raise ServiceFailed("no such item", 404)

            with pytest.raises(DoesNotExist, match="unknown"):
                await bus.call("unknown")
            with pytest.raises(MalformedRequest):
                await bus.call("/no/such")
            with pytest.raises(ServiceFailed, match="KeyError: 'which'") as failed:
                await bus.call("fails")
            assert failed.value.status == 500
            with pytest.raises(ServiceFailed, match="no such item") as failed:
                await bus.call("chooses")
            assert failed.value.status == 404
            with pytest.raises(ServiceFailed):
                await anext(bus.stream("fails"))

    async def test_data_that_cannot_be_sent_is_refused(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("bad")
            async def bad(call):
                return object()

            @bus.service("large")
            async def large(call):
                return bytes(17 << 20)

            with pytest.raises(UsageError, match="msgpack"):
                await bus.call("bad", object())
            with pytest.raises(UsageError):
                await bus.call(b"bytes")  # type: ignore[arg-type]
            with pytest.raises(TooLarge):
                await bus.call("bad", bytes(17 << 20))
            with pytest.raises(ServiceFailed, match="object"):
                await bus.call("bad")
            with pytest.raises(ServiceFailed, match="max_packet_bytes"):
                await bus.call("large")
            assert bus.open_calls == 0

    async def test_handler_that_awaits_a_cancelled_future_fails_its_call_only(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("cancelled")
            async def cancelled(call):
                never = asyncio.get_running_loop().create_future()
                never.cancel()
                await never

            @bus.service("well")
            async def well(call):
                return call.data

            calls = [bus.call(name, 1) for name in ("cancelled", "well", "cancelled", "well")]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [ServiceFailed, int] * 2
            assert await bus.call("well", 2) == 2

    async def test_client_receives_packets_of_the_largest_size(self, address):
        """A call that the bus forwards has more fields than the call it received."""
        limit = gsb.ClientOptions().max_packet_bytes
        async with gsb.connect(address) as bus:
            news = await bus.subscribe("news")

            @bus.service("size")
            async def size(call):
                return len(call.data)

            await bus.registered()
            with plain(Address.parse(address)) as peer:
                data = b"\xc6" + (limit - 27).to_bytes(4, "big") + bytes(limit - 27)
                largest = packet("service_call_request", address="size", request_id="1", data=data)
                broadcast = packet("broadcast_request", topic="news", data=data)
                assert limit - 10 < len(broadcast) <= len(largest) <= limit
                await asyncio.to_thread(peer.send, largest)
                answer = await asyncio.to_thread(peer.reply)
                assert answer.data == b"\xce" + (limit - 27).to_bytes(4, "big")
                await asyncio.to_thread(peer.send, broadcast)
                assert len((await anext(news)).body) == len(data)
            assert bus.reconnects == 0

    async def test_call_of_a_streaming_service_is_an_error_and_cancelled(self, address):
        async with gsb.connect(address) as bus:
            closed = asyncio.Event()

            @bus.service("many")
            async def many(call):
                try:
                    while True:
                        yield 1
                finally:
                    closed.set()

            with pytest.raises(UsageError, match="use stream"):
                await bus.call("many")
            await closed.wait()

    async def test_stream_of_a_single_reply_has_one_item(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("single")
            async def single(call):
                return call.data

            assert [item async for item in bus.stream("single", 7)] == [7]
            assert [item async for item in bus.stream("single")] == []

    async def test_failure_of_a_stream_is_raised_after_its_items(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("half")
            async def half(call):
                yield 1
                yield 2
                raise ValueError("enough")

            stream = bus.stream("half")
            assert [await anext(stream), await anext(stream)] == [1, 2]
            with pytest.raises(ServiceFailed, match="enough"):
                await anext(stream)

    async def test_taken_or_invalid_name_is_refused(self, address):
        async with gsb.connect(address) as bus, gsb.connect(address) as other:

            async def handler(call):
                return 1

            await bus.register("mine", handler)
            with pytest.raises(Conflict):
                await bus.register("mine", handler)
            with pytest.raises(Conflict):
                await other.register("mine", handler)
            with pytest.raises(MalformedRequest):
                await other.register("sys/mine", handler)
            other.service("mine")(handler)
            with pytest.raises(Conflict):
                await other.registered()
            await bus.unregister("mine")
            with pytest.raises(DoesNotExist):
                await bus.unregister("mine")
            await other.register("mine", handler)
            assert await bus.call("mine") == 1

    async def test_refused_registration_is_raised_once(self, address):
        async with gsb.connect(address) as bus, gsb.connect(address) as other:

            async def handler(call):
                return 1

            await bus.register("mine", handler)
            with pytest.raises(Conflict):
                await other.register("mine", handler)
            await other.register("theirs", handler)
            await other.registered()

    async def test_service_added_during_the_handshake_is_registered(self, address):
        bus = gsb.connect(address)

        async def handler(call):
            return 1

        opening = asyncio.ensure_future(bus.open())
        while bus._host.connection is None:  # noqa: ASYNC110  earlier services are sent then
            await asyncio.sleep(0)
        assert not bus.is_connected
        bus.service("late")(handler)
        await opening
        assert await bus.call("late") == 1
        await bus.close()

    async def test_services_added_before_open_are_registered(self, address):
        bus = gsb.connect(address)

        @bus.service("early")
        async def early(call):
            return "here"

        async with bus:
            assert await bus.call("early") == "here"
        taken = gsb.connect(address)
        taken.service("sys/x")(early)
        with pytest.raises(MalformedRequest):
            await taken.open()
        await taken.close()


class TestEndings:
    async def test_deadline_of_the_client_ends_a_call(self, address):
        async with gsb.connect(address) as server, gsb.connect(address, deadline_s=0.1) as bus:
            cancelled = asyncio.Event()

            async def hangs(call):
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

            await server.register("hangs", hangs)
            with pytest.raises(DeadlinePassed):
                await bus.call("hangs")
            await cancelled.wait()
            await eventually(lambda: not server.open_calls, "the call ends at the service")

    async def test_timeout_of_a_call_cancels_it(self, address):
        async with gsb.connect(address) as bus:
            cancelled = asyncio.Event()

            @bus.service("hangs")
            async def hangs(call):
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

            with pytest.raises(DeadlinePassed):
                await bus.call("hangs", timeout_s=0.05)
            await cancelled.wait()
            with pytest.raises(DeadlinePassed):
                await anext(bus.stream("hangs", timeout_s=0.05))
            await eventually(lambda: not bus.open_calls, "no call is open")

    async def test_cancelled_task_cancels_its_call(self, address):
        async with gsb.connect(address) as bus:
            begun, cancelled = asyncio.Event(), asyncio.Event()

            @bus.service("hangs")
            async def hangs(call):
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()

            task = asyncio.ensure_future(bus.call("hangs"))
            await begun.wait()
            task.cancel()
            await cancelled.wait()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert bus.open_calls == 0

    @pytest.mark.parametrize("way", ["break", "aclose", "with", "dropped"])
    async def test_abandoned_stream_is_cancelled(self, address, way):
        async with gsb.connect(address) as bus:
            closed = asyncio.Event()

            @bus.service("endless")
            async def endless(call):
                try:
                    number = 0
                    while True:
                        yield number
                        number += 1
                finally:
                    closed.set()

            if way == "break":
                async for item in bus.stream("endless"):
                    if item == 100:
                        break
            elif way == "with":
                async with bus.stream("endless") as items:
                    assert await anext(items) == 0
            else:
                items = bus.stream("endless")
                assert [await anext(items) for _ in range(5)] == [0, 1, 2, 3, 4]
                if way == "aclose":
                    await items.aclose()
                    assert [item async for item in items] == []
                del items
                gc.collect()
            await closed.wait()
            await eventually(lambda: not bus.open_calls, "no call is open")

    async def test_lost_service_fails_its_calls(self, address):
        async with gsb.connect(address) as bus:
            async with gsb.connect(address) as server:

                @server.service("many")
                async def many(call):
                    yield 1
                    await asyncio.Event().wait()

                await server.registered()
                stream = bus.stream("many")
                assert await anext(stream) == 1
                call = asyncio.ensure_future(bus.call("many"))
                await asyncio.sleep(0)
            with pytest.raises(ServiceGone):
                await anext(stream)
            with pytest.raises((UsageError, ServiceGone, DoesNotExist)):
                await call

    async def test_closed_client_refuses_calls(self, address):
        bus = gsb.connect(address)
        with pytest.raises(UsageError, match="not open"):
            await bus.call("x")
        async with bus:
            pass
        with pytest.raises(NotConnected):
            await bus.call("x")
        with pytest.raises(UsageError):
            await bus.open()
        await bus.close()

    async def test_open_without_a_bus_raises_not_connected(self):
        with pytest.raises(NotConnected):
            await gsb.connect("tcp://127.0.0.1:1").open()
        with pytest.raises(NotConnected):
            await gsb.connect("ipc:///tmp/no/such.sock").open()

    async def test_calls_over_max_calls_are_refused_as_busy(self, address):
        async with gsb.connect(address, max_calls=2) as server, gsb.connect(address) as bus:
            gate = asyncio.Event()

            async def waits(call):
                await gate.wait()
                return call.data

            await server.register("waits", waits)
            calls = [asyncio.ensure_future(bus.call("waits", n)) for n in range(3)]
            with pytest.raises(ServiceFailed, match="busy"):
                await calls[2]
            gate.set()
            assert await asyncio.gather(*calls[:2]) == [0, 1]

    async def test_cancel_by_the_bus_raises_call_cancelled(self, address):
        from polybus.dialects.gsb.codec import error_from_reply, pack_failure

        error = error_from_reply(pack_failure(499, "gone", "bus"), "x")
        assert isinstance(error, CallCancelled)


class TestPressure:
    async def test_unread_stream_halts_its_service(self, address):
        async with gsb.connect(address) as server, gsb.connect(address) as bus:
            made = 0

            async def items(call):
                nonlocal made
                while made < call.data:
                    made += 1
                    yield bytes(10_000)

            await server.register("items", items)
            stream = bus.stream("items", 6000)  # 60 MB
            await anext(stream)
            before = -1
            while made > before:  # until the service is halted
                before = made
                for _ in range(10):
                    await bus.call("sys/ping")
                await asyncio.sleep(0.1)
            assert made < 4500  # the rest is in socket buffers, whose size the kernel chooses
            count = 1
            async for _item in stream:
                count += 1
            assert count == 6000

    async def test_calls_continue_while_a_stream_is_not_read(self, address):
        async with gsb.connect(address) as server, gsb.connect(address) as bus:

            async def items(call):
                for _ in range(call.data):
                    yield bytes(100_000)

            await server.register("items", items)
            stream = bus.stream("items", 400)
            count = 0
            async for _item in stream:
                count += 1
                if count % 20 == 0:
                    assert await bus.call("sys/ping", count) == count
            assert count == 400

    async def test_unread_stream_on_a_shared_connection_is_cut_when_others_wait(self, address):
        """The streams share a connection because `stream_connections` is 1."""
        bus = gsb.connect(
            address, max_unread_bytes=100_000, cut_unread_bytes=300_000, stream_connections=1
        )
        async with gsb.connect(address) as server, bus:

            async def items(call):
                for _ in range(call.data):
                    yield bytes(10_000)

            async def slow(call):
                await asyncio.sleep(0.3)
                return "done"

            await server.register("items", items)
            await server.register("slow", slow)
            stream = bus.stream("items", 1000)
            await anext(stream)
            assert [item async for item in bus.stream("slow")] == ["done"]
            with pytest.raises(LimitReached):
                async for _item in stream:
                    pass
            assert bus.open_calls == 0

    async def test_streams_use_separate_connections(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("items")
            async def items(call):
                for number in range(call.data):
                    yield number, bytes(100_000)

            streams = [bus.stream("items", 200) for _ in range(5)]
            for number in range(200):  # 20 MB each, in step
                assert [(await anext(stream))[0] for stream in streams] == [number] * 5
            for stream in streams:
                assert [item async for item in stream] == []
            await eventually(lambda: not bus.open_calls, "all streams end")


class TestPlainFunctions:
    async def test_plain_functions_run_in_threads(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("plain")
            def plain_function(call):
                return threading.current_thread() is threading.main_thread(), call.data

            @bus.service("numbers")
            def numbers(call):
                yield from range(call.data)

            @bus.service("fails")
            def fails(call):
                yield 1
                raise ValueError("here")

            assert await bus.call("plain", 7) == [False, 7]
            assert [item async for item in bus.stream("numbers", 1000)] == list(range(1000))
            stream = bus.stream("fails")
            assert await anext(stream) == 1
            with pytest.raises(ServiceFailed, match="here"):
                await anext(stream)

    async def test_unread_generators_hold_no_threads(self, address):
        closed = threading.Event()

        def items(call):
            try:
                for number in range(call.data):
                    yield [number, bytes(20_000)]
            finally:
                closed.set()

        reader = gsb.connect(address, max_unread_bytes=1000)
        async with gsb.connect(address, threads=1) as server, reader as bus:
            await server.register("items", items)
            await server.register("plain", lambda call: "here")
            left, read = bus.stream("items", 10_000), bus.stream("items", 1000)
            assert ((await anext(left))[0], (await anext(read))[0]) == (0, 0)
            assert await bus.call("plain") == "here"
            assert [item[0] async for item in read] == list(range(1, 1000))
            closed.clear()
            await left.aclose()
            await eventually(closed.is_set, "the generator is closed")

    async def test_generator_of_an_abandoned_stream_is_closed(self, address):
        async with gsb.connect(address) as bus:
            closed = threading.Event()

            @bus.service("endless")
            def endless(call):
                try:
                    while True:
                        yield 1
                finally:
                    closed.set()

            async with bus.stream("endless") as items:
                await anext(items)
            await eventually(closed.is_set, "the generator is closed")


class TestTopics:
    async def test_broadcast_reaches_every_subscription_including_the_senders(self, address):
        async with gsb.connect(address) as sender, gsb.connect(address) as other:
            mine, again = await sender.subscribe("news"), await sender.subscribe("news")
            theirs = await other.subscribe("news")
            await sender.broadcast("news", {"n": 1})
            for subscription in (mine, again, theirs):
                message = await anext(subscription)
                assert (message.topic, message.data) == ("news", {"n": 1})
                assert message.caller.startswith("local:")
            await mine.unsubscribe()
            assert [message async for message in mine] == []
            await other.broadcast("news", body=b"\xc1 no msgpack")
            raw = await again.get(10)
            assert raw is not None
            assert raw.body == b"\xc1 no msgpack"
            with pytest.raises(ValueError, match=r".*"):
                _ = raw.data
            assert await again.get(0.05) is None
            await again.unsubscribe()
            await theirs.unsubscribe()

    @pytest.mark.needs(dialect="rqueue")
    async def test_topics_are_shared_with_rqueue(self, address, bus):
        from polybus import rqueue

        async with gsb.connect(address) as client, rqueue.connect(bus.address("rqueue")) as other:
            await other.subscribe("both")
            async with await client.subscribe("both") as both:
                await other.publish("both", b"from rqueue")
                assert (await anext(both)).body == b"from rqueue"
                await client.broadcast("both", body=b"from gsb")
                assert [(await anext(other)).content for _ in range(2)] == [
                    b"from rqueue",
                    b"from gsb",
                ]

    async def test_refused_topic_fails_every_subscribe(self, address):
        async with gsb.connect(address) as bus:
            both = (bus.subscribe("no*topic"), bus.subscribe("no*topic"))
            results = await asyncio.gather(*both, return_exceptions=True)
            assert [type(result) for result in results] == [MalformedRequest] * 2

    async def test_slow_subscription_drops_and_counts_messages(self, address):
        async with gsb.connect(address, max_unread_bytes=1000) as bus:
            news = await bus.subscribe("news")
            for number in range(20):
                await bus.broadcast("news", bytes([number]) * 100)
            assert news.lost > 0
            assert (await anext(news)).data == bytes([0]) * 100


def test_services_may_be_added_without_a_running_loop(address):
    bus = gsb.connect(address)

    @bus.service("early")
    async def early(call):
        return "here"

    async def main():
        async with bus:
            return await bus.call("early")

    assert asyncio.run(main()) == "here"


def test_failed_partial_ends_the_stream_and_cancels_the_call(address):
    """The service is a plain peer, because the client never fails with a PARTIAL."""
    from tests.rig.gsb_peer import partial

    with gsb.blocking.connect(address) as bus, plain(Address.parse(address)) as peer:
        peer.register("theirs")
        received: list[object] = []

        def ask() -> None:
            stream = bus.stream("theirs")
            received.append(next(stream))
            try:
                next(stream)
            except ServiceFailed as error:
                received.append(error.data)

        thread = threading.Thread(target=ask)
        thread.start()
        request = peer.call()
        peer.send(partial(request.request_id, b"\x01"))
        peer.send(reply(request.request_id, b"\x02", code=500, kind=1))
        assert peer.next("cancel").request_id == request.request_id
        thread.join()
        assert received == [1, 2]


def test_client_and_plain_peer_call_each_other(address):
    """The peer uses a plain socket and protobuf."""
    from tests.rig.gsb_peer import call

    with gsb.blocking.connect(address) as bus, plain(Address.parse(address)) as peer:

        @bus.service("echo")
        def echo(call):
            return call.data

        peer.send(call("echo", "1", b"\x01"))
        assert peer.reply().data == b"\x01"
        peer.send(call("echo", "2", b"\xc1"))  # not msgpack
        assert peer.reply().code == 500
        peer.register("theirs")
        answer = []

        def ask():
            answer.append(bus.call("theirs", 5))

        thread = threading.Thread(target=ask)
        thread.start()
        request = peer.call()
        peer.send(reply(request.request_id, b"\x07"))
        thread.join()
        assert answer == [7]
