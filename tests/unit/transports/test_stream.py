"""Listeners: TCP, Unix and TLS; the gate; and ends that come too early."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import uvloop
from typing_extensions import Buffer

from polybus.errors import AddressError, AddressInUse
from polybus.kernel.outbox import LoopTurn
from polybus.kernel.pump import Pump
from polybus.kernel.receive_buffer import SharedBuffer
from polybus.model.address import Address
from polybus.transports import tls_connection as tls_module
from polybus.transports.stream_connection import StreamConnection
from polybus.transports.stream_listener import (
    ConnectionLimit,
    ListenOptions,
    StreamListener,
    listen,
)
from tests.rig.certificates import trusting, write_certificate
from tests.rig.observer import eventually

DEADLINE_S = 10.0
ANY_PORT = Address.parse("tcp://127.0.0.1:0")
ANY_TLS_PORT = Address.parse("tls://127.0.0.1:0")


class Echo:
    """Echoes all bytes and records its calls."""

    def __init__(self, pipe: StreamConnection) -> None:
        self.pipe = pipe
        self.events: list[str] = []
        self.received = 0
        self.on_receive: Callable[[], None] = lambda: None

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        self.pipe.write(bytes(memoryview(buffer)[start:end]))
        self.received += end - start
        self.on_receive()
        return end - start

    def on_stalled(self) -> None:
        self.events.append("stalled")
        self.pipe.pause_reading()

    def on_writable(self) -> None:
        self.events.append("writable")
        self.pipe.resume_reading()

    def on_half_closed(self) -> bool:
        self.events.append("half_closed")
        self.pipe.close()
        return False

    def on_ended(self) -> None:
        self.events.append("ended")


class Puppet:
    """A TLS client whose every record is sent when we say so, and looked at when it comes."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    @classmethod
    @asynccontextmanager
    async def calling(
        cls, listener: StreamListener, context: ssl.SSLContext
    ) -> AsyncIterator[Puppet]:
        with socket.create_connection((listener.address.host, listener.address.port)) as sock:
            sock.setblocking(False)
            puppet = cls(sock, context)
            await puppet._shake_hands()
            yield puppet

    async def send(self, *records: bytes) -> None:
        """Send all records in one packet."""
        for record in records:
            self._tls.write(record)
        await self.send_raw(self._outgoing.read())

    async def send_raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def to_the_end(self) -> bytes:
        """Read until the server's close_notify. Raises if the stream ends without one."""
        data = bytearray()
        while True:
            try:
                piece = self._tls.read(65536)
            except ssl.SSLWantReadError:
                await self._fill()
                continue
            if not piece:
                return bytes(data)
            data += piece

    async def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self.send()
                await self._fill()
        await self.send()

    async def _fill(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()


# Whether the pump serves connections without TLS, or the event loop: each test runs on both.
is_pumped = True


@pytest.fixture(autouse=True, params=[True, False], ids=["pump", "loop"])
def serve_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "is_pumped", request.param)


class House:
    """A gate with sessions and clients. Leaving the block closes all of them.

    A connection that a test leaves open would keep its loop from closing, and hang the run.
    """

    def __init__(self, places: int = 100, context: ssl.SSLContext | None = None) -> None:
        self.refused: list[str] = []
        self.gate = ConnectionLimit(places, self.refused.append)
        self.sessions: list[Echo] = []
        self.unshaken: list[str] = []  # why handshakes have failed
        shared = SharedBuffer()
        loop = asyncio.get_running_loop()
        self._pump = Pump(loop, LoopTurn(loop.call_soon), shared)
        self.options = ListenOptions(
            self.gate,
            shared,
            pump=self._pump if is_pumped else None,
            tls=context,
            on_handshake_failed=lambda peer, reason: self.unshaken.append(reason),
        )
        self._listeners: list[StreamListener] = []
        self._callers: list[asyncio.StreamWriter] = []

    def open(self, pipe: StreamConnection) -> Echo:
        self.sessions.append(Echo(pipe))
        return self.sessions[-1]

    async def listen(self, address: Address = ANY_PORT) -> StreamListener:
        self._listeners.append(await listen(address, self.open, self.options))
        return self._listeners[-1]

    async def call(
        self, listener: StreamListener, context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = listener.address
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        self._callers.append(writer)
        return reader, writer

    async def call_unix(self, path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(path)
        self._callers.append(writer)
        return reader, writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for writer in self._callers:
            writer.transport.abort()
        for listener in self._listeners:
            listener.close()
            await asyncio.wait_for(listener.drain(0), DEADLINE_S)
        self._pump.close()
        if error is None:
            assert self.gate.open == 0
            assert all(one.events[-1:] == ["ended"] for one in self.sessions)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, "see the line of the test", DEADLINE_S)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The certificate of the server and the authorities of the client."""
    cert, key = write_certificate(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, trusting(cert)


Certificate = tuple[ssl.SSLContext, ssl.SSLContext]
RECORDS = [bytes(1000)] * 5


# --- addresses ---------------------------------------------------------------


def test_port_0_binds_a_free_port_and_reports_it():
    async def test() -> None:
        async with House() as house:
            listener = await house.listen()
            assert listener.address.port > 0
            reader, writer = await house.call(listener)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"

    run(test)


def test_port_in_use_raises_address_in_use():
    async def test() -> None:
        async with House() as house:
            first = await house.listen()
            with pytest.raises(AddressInUse, match=str(first.address.port)):
                await house.listen(first.address)

    run(test)


def test_foreign_address_raises_address_error():
    async def test() -> None:
        async with House() as house:
            with pytest.raises(AddressError, match="cannot be listened on"):
                await house.listen(Address.parse("tcp://192.0.2.1:0"))

    run(test)


def test_tls_listener_without_a_certificate_raises():
    async def test() -> None:
        async with House() as house:
            with pytest.raises(AddressError, match="certificate"):
                await house.listen(ANY_TLS_PORT)

    run(test)


def test_unix_socket_has_its_mode_and_identifies_its_peer(tmp_path: Path):
    async def test() -> None:
        path = tmp_path / "s"
        async with House() as house:
            await house.listen(Address.parse(f"unix:{path}"))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            reader, writer = await house.call_unix(path)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            pipe = house.sessions[0].pipe
            assert pipe.peer == f"unix:pid={os.getpid()},uid={os.getuid()}"
            assert pipe.identity.uid == os.getuid()

    run(test)


def test_tcp_peer_is_named_by_its_address():
    async def test() -> None:
        async with House() as house:
            listener = await house.listen()
            _, writer = await house.call(listener)
            await until(lambda: house.sessions)
            host, port = writer.get_extra_info("sockname")
            assert house.sessions[0].pipe.peer == f"{host}:{port}"

    run(test)


# --- the gate ----------------------------------------------------------------


def test_connection_limit_is_exact():
    async def test() -> None:
        async with House(places=2) as house:
            listener = await house.listen()
            first, _second = await house.call(listener), await house.call(listener)
            await until(lambda: house.gate.open == 2)
            third_reader, third = await house.call(listener)
            assert await third_reader.read() == b""
            host, port = third.get_extra_info("sockname")
            assert house.refused == [f"{host}:{port}"]
            assert len(house.sessions) == 2
            first[1].transport.abort()
            await until(lambda: house.gate.open == 1)
            reader, fourth = await house.call(listener)
            fourth.write(b"x")
            assert await reader.readexactly(1) == b"x"

    run(test)


def test_listeners_share_a_connection_limit():
    async def test() -> None:
        async with House(places=1) as house:
            listeners = [await house.listen(), await house.listen()]
            _, _first = await house.call(listeners[0])
            await until(lambda: house.gate.open == 1)
            reader, _second = await house.call(listeners[1])
            assert await reader.read() == b""

    run(test)


def test_immediate_hangups_leave_no_connection():
    async def test() -> None:
        async with House() as house:
            listener = await house.listen()
            place = (listener.address.host, listener.address.port)
            for _ in range(50):
                with socket.create_connection(place) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            reader, writer = await house.call(listener)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            await until(lambda: house.gate.open == 1)

    run(test)


def test_drain_waits_for_open_connections():
    async def test() -> None:
        async with House() as house:
            listener = await house.listen()
            reader, writer = await house.call(listener)
            await until(lambda: house.sessions)
            listener.close()
            draining = asyncio.create_task(listener.drain(DEADLINE_S))
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            writer.write_eof()
            await draining
            assert house.sessions[0].events == ["half_closed", "ended"]

    run(test)


def test_drain_aborts_remaining_connections_after_its_timeout():
    async def test() -> None:
        async with House() as house:
            listener = await house.listen()
            reader, writer = await house.call(listener)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            listener.close()
            await listener.drain(0.05)
            assert house.sessions[0].events == ["ended"]
            assert len(listener.connections) == 0
            with pytest.raises(ConnectionRefusedError):
                await house.call(listener)

    run(test)


# --- TLS ---------------------------------------------------------------------


def test_tls_passes_the_same_traffic(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, writer = await house.call(listener, certificate[1])
            for size in (1, 16_384, 16_385, 3_000_000):
                data = os.urandom(size)
                writer.write(data)
                assert await reader.readexactly(size) == data
            assert house.sessions[0].events[-1:] != ["stalled"]

    run(test)


def test_tls_peer_that_does_not_read_stalls_the_session(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, _writer = await house.call(listener, certificate[1])
            await until(lambda: house.sessions)
            session = house.sessions[0]
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            written = 0
            while "stalled" not in session.events:
                session.pipe.write(bytes(100_000))
                written += 100_000
            assert session.pipe.backlog_bytes() > 0
            assert session.pipe.unconfirmed_bytes() > 0
            reader._transport.resume_reading()  # type: ignore[attr-defined]
            await reader.readexactly(written)
            await until(lambda: session.events[-1] == "writable")
            assert session.pipe.backlog_bytes() == 0

    run(test)


def test_tls_paused_session_receives_the_rest_when_it_resumes(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, writer = await house.call(listener, certificate[1])
            await until(lambda: house.sessions)
            session = house.sessions[0]
            session.pipe.pause_reading()
            data = os.urandom(1_000_000)
            writer.write(data)
            other_reader, other = await house.call(listener, certificate[1])
            other.write(b"x")  # its echo proves that the loop has come round
            assert await other_reader.readexactly(1) == b"x"
            assert session.received == 0
            session.pipe.resume_reading()
            assert await reader.readexactly(len(data)) == data

    run(test)


def test_tls_close_is_distinguished_from_a_cut(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, _writer = await house.call(listener, certificate[1])
            await until(lambda: house.sessions)
            house.sessions[0].pipe.write(b"last words")
            house.sessions[0].pipe.close()
            assert await reader.read() == b"last words"
            assert reader.exception() is None
            await until(lambda: house.sessions[0].events[-1:] == ["ended"])

    run(test)


def test_tls_close_notify_half_closes_once(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, writer = await house.call(listener, certificate[1])
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            writer.close()
            await until(lambda: house.sessions[0].events[-1:] == ["ended"])
            assert house.sessions[0].events == ["half_closed", "ended"]

    run(test)


def test_tls_connection_without_handshake_is_counted(certificate: Certificate):
    async def test() -> None:
        async with House(places=1, context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            await house.call(listener)  # without a handshake
            await until(lambda: house.gate.open == 1)
            reader, _writer = await house.call(listener)
            assert await reader.read() == b""
            assert len(house.refused) == 1
            assert house.sessions == []

    run(test)


def test_tls_handshake_timeout_frees_the_slot(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tls_module, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, writer = await house.call(listener)
            writer.write(b"\x16\x03\x01")  # the beginning of a record, and no more
            assert await reader.read() == b""
            await until(lambda: house.gate.open == 0)
            assert house.sessions == []
            assert house.unshaken == ["timeout"]

    run(test)


def test_tls_hangup_during_the_handshake_is_reported(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            _reader, silent = await house.call(listener)
            await until(lambda: house.gate.open == 1)
            silent.close()  # only checked that the port is open
            await until(lambda: house.gate.open == 0)
            _reader, writer = await house.call(listener)
            writer.write(b"\x16\x03\x01")
            writer.close()
            await until(lambda: house.unshaken)
            assert house.unshaken == ["hung_up"]

    run(test)


def test_tls_untrusted_certificate_is_reported(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            with pytest.raises(ssl.SSLError):
                await house.call(listener, ssl.create_default_context())
            await until(lambda: house.unshaken)
            assert len(house.unshaken) == 1  # why, it may say or not
            assert house.sessions == []

    run(test)


@pytest.mark.parametrize("garbage", [b"\0\0\0\5\0hello", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000])
def test_tls_plain_text_peer_is_closed(certificate: Certificate, garbage: bytes):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            reader, writer = await house.call(listener)
            writer.write(garbage)
            await reader.read()  # perhaps an alert; then the end
            await until(lambda: house.gate.open == 0)
            assert house.sessions == []
            assert len(house.unshaken) == 1

    run(test)


def test_tls_invalid_record_ends_the_connection(certificate: Certificate):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            async with Puppet.calling(listener, certificate[1]) as puppet:
                await until(lambda: house.sessions)
                await puppet.send_raw(b"this is no record of TLS at all")
                await until(lambda: house.sessions[0].events == ["ended"])

    run(test)


def test_tls_session_may_pause_within_received_bytes(certificate: Certificate):
    """Several records in one read: those after the pause are delivered when it ends."""

    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            async with Puppet.calling(listener, certificate[1]) as puppet:
                await until(lambda: house.sessions)
                session = house.sessions[0]
                session.on_receive = session.pipe.pause_reading
                await puppet.send(*RECORDS)
                await until(lambda: session.received)
                for number in range(1, len(RECORDS)):
                    assert session.received == number * 1000
                    session.pipe.resume_reading()
                assert session.received == len(RECORDS) * 1000

    run(test)


@pytest.mark.parametrize("way", ["close", "abort"])
def test_tls_nothing_is_received_after_the_end(certificate: Certificate, way: str):
    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            async with Puppet.calling(listener, certificate[1]) as puppet:
                await until(lambda: house.sessions)
                session = house.sessions[0]
                session.on_receive = getattr(session.pipe, way)
                await puppet.send(*RECORDS)
                await until(lambda: session.events == ["ended"])
                assert session.received == 1000

    run(test)


def test_tls_close_sends_close_notify(certificate: Certificate):
    """Without it the peer could not tell the end from an attacker's cut."""

    async def test() -> None:
        async with House(context=certificate[0]) as house:
            listener = await house.listen(ANY_TLS_PORT)
            async with Puppet.calling(listener, certificate[1]) as puppet:
                await until(lambda: house.sessions)
                house.sessions[0].pipe.write(b"last words")
                house.sessions[0].pipe.close()
                assert await puppet.to_the_end() == b"last words"

    run(test)
