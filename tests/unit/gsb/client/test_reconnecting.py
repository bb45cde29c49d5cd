"""The client's connection: lost and made again, and what is registered then."""

from __future__ import annotations

import asyncio

import pytest

from polybus import gsb
from polybus.dialects.gsb.client.gsb_connection import GsbConnection, dial
from polybus.errors import Conflict, ConnectionLost, Denied, DoesNotExist, NotConnected
from tests.rig.gsb_peer import connect as plain
from tests.rig.observer import eventually


def break_off(client: gsb.Client) -> GsbConnection:
    """Ends its connection as if the network had done it."""
    link = client._reconnector.connection
    assert link is not None
    link.abort()
    link._closing = False
    return link


class TestReconnecting:
    async def test_services_and_topics_are_there_again_if_so_wanted(self, start):
        with start("--engine", "memory:") as first:
            port = first.address("gsb").port
            address = f"tcp://127.0.0.1:{port}"
            bus = gsb.connect(address, backoff_max_s=0.1)

            @bus.service("echo")
            async def echo(call):
                if call.data == "hang":
                    await asyncio.Event().wait()
                return call.data

            await bus.open()
            news = await bus.subscribe("news")
            once = gsb.connect(address, reconnect=False)
            await once.open()
            hanging = asyncio.ensure_future(bus.call("echo", "hang"))
            assert await bus.call("echo", 1) == 1
            first.process.kill()
            with pytest.raises(ConnectionLost):
                await hanging
            with pytest.raises(ConnectionLost):
                await once.serve()
            with pytest.raises(ConnectionLost):
                await once.call("x")
            await once.close()
        with start("--engine", "memory:", port=port):
            assert await bus.call("echo", 2) == 2
            assert bus.reconnects == 1
            async with gsb.connect(address) as other:
                assert await other.call("echo", 3) == 3
                await other.broadcast("news", "again")
            assert (await anext(news)).data == "again"
            await bus.close()

    async def test_a_name_that_is_still_taken_is_tried_again(self, address, bus):
        with plain(bus.address("gsb")) as thief:
            client = gsb.connect(address, backoff_max_s=0.1)

            @client.service("mine")
            async def mine(call):
                return "mine"

            await client.open()
            # The connection is lost, and somebody takes the name before we are back.
            assert thief.register("mine") == 409
            break_off(client)
            await eventually(lambda: thief.register("mine") == 0, "the name is free")
            await eventually(lambda: client.reconnects == 1, "it is back")
            thief.close()
            async with gsb.connect(address) as other:

                async def served() -> bool:
                    try:
                        return await other.call("mine") == "mine"
                    except DoesNotExist:
                        return False

                for _ in range(200):
                    if await served():
                        break
                    await asyncio.sleep(0.05)
                assert await served()
            await client.close()

    async def test_a_name_that_is_still_taken_may_be_given_up(self, address, bus, caplog):
        async def handler(call): ...

        async with gsb.connect(address, backoff_max_s=0.1) as client:
            await client.register("mine", handler)
            with plain(bus.address("gsb")) as thief:
                break_off(client)
                await eventually(lambda: thief.register("mine") == 0, "the name is free")
                await eventually(lambda: "still registered" in caplog.text, "it retries")
                await client.unregister("mine")
                with pytest.raises(DoesNotExist):
                    await client.unregister("mine")
                trying = client._registrations._tasks
                await eventually(lambda: not trying, "it retries no more")

    async def test_a_socket_that_may_not_be_used_for_a_while(self, address, monkeypatch):
        dialled = []

        async def forbidden(link):
            dialled.append(link)
            raise PermissionError

        async with gsb.connect(address, backoff_max_s=0.1) as client:
            with monkeypatch.context() as patch:
                patch.setattr("polybus.dialects.gsb.client.client.dial", forbidden)
                break_off(client)
                await eventually(lambda: len(dialled) > 1, "it has tried twice")
            assert await client.call("sys/ping", 1) == 1
            with monkeypatch.context() as patch:
                patch.setattr("polybus.dialects.gsb.client.client.dial", forbidden)
                with pytest.raises(Denied):
                    await gsb.connect(address).open()

    async def test_a_stream_that_begins_while_the_client_closes(self, address, monkeypatch):
        """Nothing of it is left: the bus of these tests looks."""
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(link):
            begun.set()
            await go_on.wait()
            await dial(link)

        client = gsb.connect(address)
        await client.open()
        monkeypatch.setattr("polybus.dialects.gsb.client.client.dial", slow)
        stream = asyncio.ensure_future(anext(client.stream("sys/ping", 1)))
        await begun.wait()
        await client.close()
        go_on.set()
        with pytest.raises(NotConnected):
            await stream

    async def test_registering_waits_for_the_connection(self, address):
        async def handler(call):
            return 1

        async with gsb.connect(address) as bus, gsb.connect(address) as other:
            await other.register("theirs", handler)
            for name in ("mine", "theirs"):
                await break_off(bus).ended.wait()
                assert not bus.is_connected
                if name == "theirs":
                    with pytest.raises(Conflict):
                        await bus.register(name, handler)
                else:
                    await bus.register(name, handler)
                    assert await other.call(name) == 1

    async def test_what_is_no_bus(self):
        async def talk(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Exception, match="bad_greeting"):
            await gsb.connect(f"tcp://127.0.0.1:{port}").open()
        server.close()
        await server.wait_closed()
