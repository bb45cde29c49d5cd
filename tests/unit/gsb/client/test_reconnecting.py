"""Reconnects of the client, and the registrations that it repeats."""

from __future__ import annotations

import asyncio

import pytest

from polybus import gsb
from polybus.dialects.gsb.client.gsb_connection import GsbConnection, dial
from polybus.errors import Conflict, ConnectionLost, Denied, DoesNotExist, NotConnected
from tests.rig.gsb_peer import connect as plain
from tests.rig.observer import eventually


def lose_connection(client: gsb.Client) -> GsbConnection:
    """End the client's connection as a network failure would."""
    link = client._reconnector.connection
    assert link is not None
    link.abort()
    link._closing = False
    return link


class TestReconnecting:
    async def test_reconnect_restores_services_and_subscriptions(self, start):
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

    async def test_taken_name_is_registered_again_after_a_reconnect(self, address, bus):
        with plain(bus.address("gsb")) as other_owner:
            client = gsb.connect(address, backoff_max_s=0.1)

            @client.service("mine")
            async def mine(call):
                return "mine"

            await client.open()
            # The connection is lost, and another peer registers the name before the reconnect.
            assert other_owner.register("mine") == 409
            lose_connection(client)
            await eventually(lambda: other_owner.register("mine") == 0, "the name is free")
            await eventually(lambda: client.reconnects == 1, "the client reconnects")
            other_owner.close()
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

    async def test_unregister_ends_the_retries_of_a_taken_name(self, address, bus, caplog):
        async def handler(call): ...

        async with gsb.connect(address, backoff_max_s=0.1) as client:
            await client.register("mine", handler)
            with plain(bus.address("gsb")) as other_owner:
                lose_connection(client)
                await eventually(lambda: other_owner.register("mine") == 0, "the name is free")
                await eventually(lambda: "still registered" in caplog.text, "the client retries")
                await client.unregister("mine")
                with pytest.raises(DoesNotExist):
                    await client.unregister("mine")
                retries = client._registrations._tasks
                await eventually(lambda: not retries, "the retries end")

    async def test_denied_socket_is_retried_after_a_loss_but_not_at_open(
        self, address, monkeypatch
    ):
        dialled = []

        async def forbidden(link):
            dialled.append(link)
            raise PermissionError

        async with gsb.connect(address, backoff_max_s=0.1) as client:
            with monkeypatch.context() as patch:
                patch.setattr("polybus.dialects.gsb.client.client.dial", forbidden)
                lose_connection(client)
                await eventually(lambda: len(dialled) > 1, "the client has dialled twice")
            assert await client.call("sys/ping", 1) == 1
            with monkeypatch.context() as patch:
                patch.setattr("polybus.dialects.gsb.client.client.dial", forbidden)
                with pytest.raises(Denied):
                    await gsb.connect(address).open()

    async def test_stream_opened_while_the_client_closes_leaves_no_state(
        self, address, monkeypatch
    ):
        """The fixture `address` checks that the bus has no state left."""
        begun, proceed = asyncio.Event(), asyncio.Event()

        async def slow(link):
            begun.set()
            await proceed.wait()
            await dial(link)

        client = gsb.connect(address)
        await client.open()
        monkeypatch.setattr("polybus.dialects.gsb.client.client.dial", slow)
        stream = asyncio.ensure_future(anext(client.stream("sys/ping", 1)))
        await begun.wait()
        await client.close()
        proceed.set()
        with pytest.raises(NotConnected):
            await stream

    async def test_register_waits_for_the_connection(self, address):
        async def handler(call):
            return 1

        async with gsb.connect(address) as bus, gsb.connect(address) as other:
            await other.register("theirs", handler)
            for name in ("mine", "theirs"):
                await lose_connection(bus).ended.wait()
                assert not bus.is_connected
                if name == "theirs":
                    with pytest.raises(Conflict):
                        await bus.register(name, handler)
                else:
                    await bus.register(name, handler)
                    assert await other.call(name) == 1

    async def test_peer_that_is_not_a_bus_is_refused(self):
        async def answer(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Exception, match="bad_greeting"):
            await gsb.connect(f"tcp://127.0.0.1:{port}").open()
        server.close()
        await server.wait_closed()
