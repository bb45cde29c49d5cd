"""Connections that fail and end, and the errors that the client raises."""

from __future__ import annotations

import asyncio
import signal
import socket
import struct

import pytest

from polybus import freud
from polybus.dialects.freud import codec
from polybus.dialects.freud.client.client import default_address
from polybus.dialects.freud.server.answer_encoder import encode_answers
from polybus.errors import (
    AddressError,
    BadFrame,
    ConnectionLost,
    MalformedRequest,
    NotConnected,
    PeerError,
    TooLarge,
    UsageError,
)
from polybus.model import socket_path
from tests.rig.fake_server import Serve, listening

CREATED = encode_answers(codec.Code.OK, 1)
DOESNT_EXIST = encode_answers(codec.Code.DOESNT_EXIST, 1)
TOPIC = "news"


def answering(*answers: bytes) -> Serve:
    """Greets as a bus does, then answers each request with the next of these."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (DOESNT_EXIST, *answers):
            _type, length = struct.unpack("<II", await reader.readexactly(8))
            await reader.readexactly(length)
            writer.write(answer)
        await reader.read()

    return serve


class TestConnecting:
    async def test_missing_socket_raises_at_once(self, tmp_path):
        for path in (tmp_path / "none.sock", tmp_path / "no" / "folder.sock"):
            with pytest.raises(NotConnected, match=r"no bus answers at unix:.*polybus serve"):
                await freud.connect(f"unix:{path}").open()
        (tmp_path / "file").write_text("no socket")
        with pytest.raises(NotConnected):
            await freud.connect(f"unix:{tmp_path}/file").open()

    async def test_stale_socket_file_raises_not_connected(self, tmp_path):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "dead.sock"))
        with pytest.raises(NotConnected, match="no bus answers"):
            await freud.connect(f"unix:{tmp_path}/dead.sock").open()

    async def test_silent_server_raises_not_connected_after_the_timeout(self, tmp_path):
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        async with listening(folder=tmp_path, serve=silent) as address:
            with pytest.raises(NotConnected, match="no answer"):
                await freud.connect(address, connect_timeout_s=0.05).open()

    async def test_full_backlog_raises_not_connected_after_the_timeout(self, tmp_path):
        path = tmp_path / "busy.sock"
        with socket.socket(socket.AF_UNIX) as busy:
            busy.bind(str(path))
            busy.listen(0)
            clients = [freud.connect(f"unix:{path}", connect_timeout_s=0.2) for _ in range(5)]
            done = await asyncio.gather(*(c.open() for c in clients), return_exceptions=True)
        assert all(isinstance(error, NotConnected) for error in done), done
        assert any("backlog is full" in str(error) for error in done), done

    async def test_server_that_closes_at_once_raises_not_connected(self, tmp_path):
        async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with listening(folder=tmp_path, serve=rude) as address:
            with pytest.raises(NotConnected, match="closed the connection"):
                await freud.connect(address).open()

    async def test_server_of_another_protocol_raises_bad_frame(self, tmp_path):
        async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()

        async with listening(folder=tmp_path, serve=web) as address:
            with pytest.raises(BadFrame, match="too_large"):
                await freud.connect(address).open()

    @pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "ipc:///tmp/x"])
    async def test_other_address_schemes_are_rejected(self, address):
        with pytest.raises(AddressError, match="unix:"):
            await freud.connect(address).open()

    async def test_invalid_options_are_rejected_before_connecting(self):
        with pytest.raises(AddressError):
            freud.connect("/tmp/no-scheme")
        for wrong in ({"prefetch": 0}, {"answer_timeout_s": 0.0}, {"max_frame_bytes": 1}):
            with pytest.raises(UsageError):
                freud.connect("unix:/tmp/x", **wrong)

    async def test_client_must_be_opened_once_and_before_use(self, address):
        client = freud.connect(address)
        with pytest.raises(UsageError, match="not open"):
            await client.list_topics()
        await client.open()
        with pytest.raises(UsageError, match="once"):
            await client.open()
        await client.close()
        await client.close()
        with pytest.raises(NotConnected, match="closed"):
            await client.list_topics()


class TestDefaultAddress:
    def test_default_address_prefers_the_socket_of_the_user(self, tmp_path, monkeypatch):
        own, shared = tmp_path / "own", tmp_path / "shared"
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
        monkeypatch.setattr(socket_path, "ROOT_RUNTIME", shared)
        mine = own / "polybus" / "freud.sock"
        assert default_address().path == str(mine)
        shared.mkdir()
        (shared / "freud.sock").touch()
        assert default_address().path == str(shared / "freud.sock")
        mine.parent.mkdir(parents=True)
        mine.touch()
        assert default_address().path == str(mine)
        assert freud.connect().address == default_address()


class TestBadAnswers:
    @pytest.mark.parametrize(
        ("answer", "reason"),
        [
            (struct.pack("<II", 0, 0xFFFF_FFFF), "too_large"),
            (encode_answers(codec.Code.OK, 1, b"1234567"), "message_id"),
            (struct.pack("<II", 9, 0), "unexpected_code"),
        ],
    )
    async def test_invalid_answer_to_produce_raises_bad_frame(self, tmp_path, answer, reason):
        async with (
            listening(folder=tmp_path, serve=answering(answer)) as address,
            freud.connect(address) as client,
        ):
            with pytest.raises(BadFrame, match=reason):
                await client.produce(TOPIC, b"x")

    async def test_invalid_answer_to_produce_many_raises_bad_frame(self, tmp_path):
        async with (
            listening(
                folder=tmp_path, serve=answering(encode_answers(codec.Code.OK, 1, b"1234567"))
            ) as address,
            freud.connect(address) as client,
        ):
            with pytest.raises(BadFrame, match="payload"):
                await client.produce_many(TOPIC, [b"x"])
            with pytest.raises(BadFrame):
                await client.list_topics()

    async def test_unrequested_answer_raises_bad_frame(self, tmp_path):
        async with (
            listening(
                folder=tmp_path, serve=answering(encode_answers(codec.Code.OK, 2))
            ) as address,
            freud.connect(address) as client,
        ):
            assert await client.create_topic(TOPIC) is True
            with pytest.raises(BadFrame, match="unasked_answer"):
                await client.list_topics()

    async def test_server_error_raises_peer_error_and_keeps_the_connection(self, tmp_path):
        failed = encode_answers(codec.Code.SERVER_ERROR, 1, b"the dog ate it")
        async with (
            listening(folder=tmp_path, serve=answering(failed)) as address,
            freud.connect(address) as client,
        ):
            with pytest.raises(PeerError, match="the dog ate it"):
                await client.produce(TOPIC, b"x")
            assert client.is_connected

    async def test_missing_answer_raises_not_connected_after_the_timeout(self, tmp_path):
        async with (
            listening(folder=tmp_path, serve=answering(b"")) as address,
            freud.connect(address, answer_timeout_s=0.05) as client,
        ):
            for request in (client.produce(TOPIC, b"x"), client.produce_many(TOPIC, [b"x"])):
                with pytest.raises(NotConnected, match="no answer"):
                    await request


class TestLosingTheBus:
    async def test_oversized_request_raises_malformed_request_and_ends_the_connection(self, start):
        with start(freud_max_frame_bytes="1000") as bus:
            address = str(bus.address("freud"))
            large = bytes(100_000)
            for many in (False, True):
                async with freud.connect(address) as client:
                    await client.create_topic(TOPIC)
                    with pytest.raises(MalformedRequest, match="max_frame_bytes"):
                        await (
                            client.produce_many(TOPIC, [b"a", large, b"b"])
                            if many
                            else client.produce(TOPIC, large)
                        )
                    with pytest.raises(ConnectionLost, match="max_frame_bytes"):
                        await client.produce(TOPIC, b"small")
            async with freud.connect(address, max_frame_bytes=1000) as client:
                with pytest.raises(TooLarge):
                    await client.produce(TOPIC, large)

    async def test_bus_restart_ends_all_subscriptions_with_an_error(self, start, tmp_path_factory):
        folder = tmp_path_factory.mktemp("f", numbered=True)
        with start(folder) as bus:
            address = str(bus.address("freud"))
            client = await freud.connect(address).__aenter__()
            await client.create_topic(TOPIC)
            idle, waiting, looping = [await client.subscribe(TOPIC) for _ in range(3)]
            await client.produce_many(TOPIC, [b"a", b"b"])
            assert await waiting.get_many(5) != []
            assert await anext(looping) is not None
            get = asyncio.create_task(waiting.get())
            await asyncio.sleep(0.02)
            bus.signal(signal.SIGKILL)
            with pytest.raises(ConnectionLost, match=r"a restart loses topics, subscriptions"):
                await get
        with start(folder):
            for request in (client.list_topics(), client.subscribe(TOPIC), idle.get()):
                with pytest.raises(ConnectionLost):
                    await request
            with pytest.raises(ConnectionLost):
                assert [record async for record in looping] == []
            assert not client.is_connected
            await client.close()
            async with freud.connect(address) as fresh:
                assert await fresh.list_topics() == []

    async def test_clean_stop_ends_waiting_gets_with_connection_lost(self, start):
        with start() as bus:
            async with freud.connect(str(bus.address("freud"))) as client:
                await client.create_topic(TOPIC)
                reader = await client.subscribe(TOPIC)
                get = asyncio.create_task(reader.get())
                await asyncio.sleep(0.02)
                assert bus.stop() == 0
                with pytest.raises(ConnectionLost):
                    await get
                with pytest.raises(ConnectionLost):
                    await client.produce(TOPIC, b"x")
                await reader.unsubscribe()

    async def test_killed_bus_fails_produce_many_with_connection_lost(self, start):
        with start() as bus:
            async with freud.connect(str(bus.address("freud"))) as client:
                await client.create_topic(TOPIC)

                def bodies() -> object:
                    for number in range(10**9):
                        if number == 200_000:
                            bus.signal(signal.SIGKILL)
                        yield b"%d" % number

                with pytest.raises(ConnectionLost):
                    await client.produce_many(TOPIC, bodies())  # type: ignore[arg-type]
