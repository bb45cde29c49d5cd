"""The async client at work: services, calls, streams, topics."""

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
    async def test_the_example_of_the_spec(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("greeter")
            async def greet(call):
                return {"hello": call.data["name"]}

            @bus.service("greeter/many")
            async def many(call):
                for number in range(call.data["n"]):
                    yield number

            assert await bus.call("greeter", {"name": "Ada"}) == {"hello": "Ada"}
            assert [one async for one in bus.stream("greeter/many", {"n": 3})] == [0, 1, 2]
            assert bus.open_calls == 0

    @pytest.mark.parametrize(
        "value",
        [
            *(None, 0, -1, 2**63, 1.5, True, "", "text", "한글", b"", b"bytes", [], [1, [2]], {}),
            *({"a": {1: [None]}}, {"k" * 300: b"v" * 70_000}, b"x" * 3_000_000),
        ],
        ids=lambda value: repr(value)[:20],
    )
    async def test_values_come_back_as_they_are(self, address, value):
        async with gsb.connect(address) as bus:

            @bus.service("echo")
            async def echo(call):
                return call.data

            @bus.service("items")
            async def items(call):
                yield call.data
                yield call.data

            assert await bus.call("echo", value) == value
            assert [one async for one in bus.stream("items", value)] == [value, value]

    async def test_what_a_handler_is_told(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("a/b")
            async def echo(call):
                return [call.address, call.method, call.service_id, call.caller]

            address_, method, service_id, caller = await bus.call("/local/a/b/c/d")
            assert (address_, method, service_id) == ("a/b/c/d", "c/d", "a/b")
            assert caller.startswith("local:")

    async def test_many_at_once_each_get_their_own(self, address):
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

    async def test_a_service_may_call_others_while_it_answers(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("inner")
            async def inner(call):
                return call.data + 1

            @bus.service("outer")
            async def outer(call):
                return await bus.call("inner", call.data) * 10

            assert await asyncio.gather(*(bus.call("outer", one) for one in range(20))) == [
                (one + 1) * 10 for one in range(20)
            ]

    async def test_the_buses_own_services(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("mine")
            async def mine(call):
                return None

            await bus.call("mine")
            found = await bus.call("sys/services")
            assert [(one["id"], one["calls"], one["pending"]) for one in found] == [("mine", 1, 0)]
            assert await bus.call("/local/sys/ping", [1, 2]) == [1, 2]
            assert "gsb" in await bus.call("sys/stats")
            assert 0 < await bus.ping() < 10_000


class TestFailures:
    async def test_each_has_a_type(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("fails")
            async def fails(call):
                raise KeyError("which")

            @bus.service("chooses")
            async def chooses(call):
                raise ServiceFailed("no such item", 404)

            with pytest.raises(DoesNotExist, match="nobody"):
                await bus.call("nobody")
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

    async def test_what_cannot_be_sent(self, address):
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

    async def test_a_handler_that_finds_something_cancelled(self, address):
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
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(one) for one in found] == [ServiceFailed, int] * 2
            assert await bus.call("well", 2) == 2

    async def test_a_call_at_the_limit_of_the_bus(self, address):
        """What a service gets has more around its data than the bus received."""
        limit = gsb.ClientOptions().max_packet_bytes
        async with gsb.connect(address) as bus:
            news = await bus.subscribe("news")

            @bus.service("size")
            async def size(call):
                return len(call.data)

            await bus.registered()
            with plain(Address.parse(address)) as stranger:
                data = b"\xc6" + (limit - 27).to_bytes(4, "big") + bytes(limit - 27)
                largest = packet("service_call_request", address="size", request_id="1", data=data)
                broadcast = packet("broadcast_request", topic="news", data=data)
                assert limit - 10 < len(broadcast) <= len(largest) <= limit
                await asyncio.to_thread(stranger.send, largest)
                answer = await asyncio.to_thread(stranger.reply)
                assert answer.data == b"\xce" + (limit - 27).to_bytes(4, "big")
                await asyncio.to_thread(stranger.send, broadcast)
                assert len((await anext(news)).body) == len(data)
            assert bus.reconnects == 0

    async def test_a_call_is_not_for_a_stream(self, address):
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

    async def test_a_stream_of_one_value(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("one")
            async def one(call):
                return call.data

            assert [item async for item in bus.stream("one", 7)] == [7]
            assert [item async for item in bus.stream("one")] == []

    async def test_a_failure_after_some_items_comes_behind_them(self, address):
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

    async def test_names_that_are_taken_or_cannot_be(self, address):
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

    async def test_a_refusal_is_told_once(self, address):
        async with gsb.connect(address) as bus, gsb.connect(address) as other:

            async def handler(call):
                return 1

            await bus.register("mine", handler)
            with pytest.raises(Conflict):
                await other.register("mine", handler)
            await other.register("theirs", handler)
            await other.registered()

    async def test_a_service_that_is_added_while_the_client_connects(self, address):
        bus = gsb.connect(address)

        async def handler(call):
            return 1

        opening = asyncio.ensure_future(bus.open())
        while bus._host.connection is None:  # noqa: ASYNC110  what was there is on its way then
            await asyncio.sleep(0)
        assert not bus.is_connected
        bus.service("late")(handler)
        await opening
        assert await bus.call("late") == 1
        await bus.close()

    async def test_services_that_were_there_before_the_connection(self, address):
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
    async def test_the_deadline_of_the_hello(self, address):
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
            await eventually(lambda: not server.open_calls, "it is over at the service")

    async def test_a_timeout_of_one_call(self, address):
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
            await eventually(lambda: not bus.open_calls, "nothing is open")

    async def test_a_task_that_is_cancelled_cancels_its_call(self, address):
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
    async def test_a_stream_that_is_left_is_cancelled(self, address, way):
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
            await eventually(lambda: not bus.open_calls, "nothing is open")

    async def test_a_service_that_goes_away(self, address):
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

    async def test_a_client_that_is_closed(self, address):
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

    async def test_nobody_listens(self):
        with pytest.raises(NotConnected):
            await gsb.connect("tcp://127.0.0.1:1").open()
        with pytest.raises(NotConnected):
            await gsb.connect("ipc:///tmp/no/such.sock").open()

    async def test_a_service_is_busy(self, address):
        async with gsb.connect(address, max_calls=2) as server, gsb.connect(address) as bus:
            gate = asyncio.Event()

            async def waits(call):
                await gate.wait()
                return call.data

            await server.register("waits", waits)
            calls = [asyncio.ensure_future(bus.call("waits", one)) for one in range(3)]
            with pytest.raises(ServiceFailed, match="busy"):
                await calls[2]
            gate.set()
            assert await asyncio.gather(*calls[:2]) == [0, 1]

    async def test_a_cancel_by_the_bus_is_an_error_of_its_own(self, address):
        from polybus.dialects.gsb.codec import error_from_reply, pack_failure

        found = error_from_reply(pack_failure(499, "gone", "bus"), "x")
        assert isinstance(found, CallCancelled)


class TestPressure:
    async def test_a_stream_that_is_not_read_makes_its_service_wait(self, address):
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
            while made > before:  # until nothing moves any more
                before = made
                for _ in range(10):
                    await bus.call("sys/ping")
                await asyncio.sleep(0.1)
            assert made < 4500  # what the sockets between them may hold is the kernel's affair
            count = 1
            async for _item in stream:
                count += 1
            assert count == 6000

    async def test_calls_go_on_while_a_stream_is_not_read(self, address):
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

    async def test_a_stream_that_is_never_read_is_cut_when_others_wait(self, address):
        """Streams that share a connection, because there are no more."""
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

    async def test_streams_have_connections_of_their_own(self, address):
        async with gsb.connect(address) as bus:

            @bus.service("items")
            async def items(call):
                for number in range(call.data):
                    yield number, bytes(100_000)

            streams = [bus.stream("items", 200) for _ in range(5)]
            for number in range(200):  # 20 MB each, in step
                assert [(await anext(one))[0] for one in streams] == [number] * 5
            for one in streams:
                assert [item async for item in one] == []
            await eventually(lambda: not bus.open_calls, "all have ended")


class TestPlainFunctions:
    async def test_they_run_in_threads(self, address):
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
            assert [one async for one in bus.stream("numbers", 1000)] == list(range(1000))
            stream = bus.stream("fails")
            assert await anext(stream) == 1
            with pytest.raises(ServiceFailed, match="here"):
                await anext(stream)

    async def test_streams_that_are_not_read_keep_no_threads(self, address):
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

    async def test_a_generator_is_closed_when_its_stream_is_left(self, address):
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
            await eventually(closed.is_set, "it is closed")


class TestTopics:
    async def test_everybody_hears_a_broadcast_the_sender_too(self, address):
        async with gsb.connect(address) as one, gsb.connect(address) as two:
            mine, again = await one.subscribe("news"), await one.subscribe("news")
            theirs = await two.subscribe("news")
            await one.broadcast("news", {"n": 1})
            for subscription in (mine, again, theirs):
                message = await anext(subscription)
                assert (message.topic, message.data) == ("news", {"n": 1})
                assert message.caller.startswith("local:")
            await mine.unsubscribe()
            assert [message async for message in mine] == []
            await two.broadcast("news", body=b"\xc1 no msgpack")
            heard = await again.get(10)
            assert heard is not None
            assert heard.body == b"\xc1 no msgpack"
            with pytest.raises(ValueError, match=r".*"):
                _ = heard.data
            assert await again.get(0.05) is None
            await again.unsubscribe()
            await theirs.unsubscribe()

    async def test_it_meets_rqueue(self, address, bus):
        from polybus import rqueue

        async with gsb.connect(address) as one, rqueue.connect(bus.address("rqueue")) as other:
            await other.subscribe("both")
            async with await one.subscribe("both") as both:
                await other.publish("both", b"from rqueue")
                assert (await anext(both)).body == b"from rqueue"
                await one.broadcast("both", body=b"from gsb")
                assert [(await anext(other)).content for _ in range(2)] == [
                    b"from rqueue",
                    b"from gsb",
                ]

    async def test_a_refusal_is_told_to_all_who_subscribe(self, address):
        async with gsb.connect(address) as bus:
            both = (bus.subscribe("no*topic"), bus.subscribe("no*topic"))
            found = await asyncio.gather(*both, return_exceptions=True)
            assert [type(one) for one in found] == [MalformedRequest] * 2

    async def test_who_does_not_read_loses(self, address):
        async with gsb.connect(address, max_unread_bytes=1000) as bus:
            news = await bus.subscribe("news")
            for number in range(20):
                await bus.broadcast("news", bytes([number]) * 100)
            assert news.lost > 0
            assert (await anext(news)).data == bytes([0]) * 100


def test_services_may_be_declared_where_no_loop_runs(address):
    bus = gsb.connect(address)

    @bus.service("early")
    async def early(call):
        return "here"

    async def main():
        async with bus:
            return await bus.call("early")

    assert asyncio.run(main()) == "here"


def test_a_failure_in_the_middle_of_a_stream_ends_it(address):
    """Of a service that is no client of ours: nobody else says so with a PARTIAL."""
    from tests.rig.gsb_peer import partial

    with gsb.blocking.connect(address) as bus, plain(Address.parse(address)) as stranger:
        stranger.register("theirs")
        found: list[object] = []

        def ask() -> None:
            stream = bus.stream("theirs")
            found.append(next(stream))
            try:
                next(stream)
            except ServiceFailed as error:
                found.append(error.data)

        thread = threading.Thread(target=ask)
        thread.start()
        request = stranger.call()
        stranger.send(partial(request.request_id, b"\x01"))
        stranger.send(reply(request.request_id, b"\x02", code=500, kind=1))
        assert stranger.next("cancel").request_id == request.request_id
        thread.join()
        assert found == [1, 2]


def test_replies_of_our_client_reach_a_stranger(address):
    """A service of ours, a caller that knows only nng and protobuf."""
    from tests.rig.gsb_peer import call

    with gsb.blocking.connect(address) as bus, plain(Address.parse(address)) as stranger:

        @bus.service("echo")
        def echo(one):
            return one.data

        stranger.send(call("echo", "1", b"\x01"))
        assert stranger.reply().data == b"\x01"
        stranger.send(call("echo", "2", b"\xc1"))  # no msgpack
        assert stranger.reply().code == 500
        stranger.register("theirs")
        answer = []

        def ask():
            answer.append(bus.call("theirs", 5))

        thread = threading.Thread(target=ask)
        thread.start()
        request = stranger.call()
        stranger.send(reply(request.request_id, b"\x07"))
        thread.join()
        assert answer == [7]
