"""One connection on a socket pair and a real loop: the calls of the session, in order."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from typing_extensions import Buffer

from polybus.kernel.outbox import LoopTurn
from polybus.kernel.pump import Pump, SocketTransport
from polybus.kernel.receive_buffer import SharedBuffer
from polybus.transports import stream_connection as module
from polybus.transports.stream_connection import StreamConnection
from tests.rig.observer import eventually

DEADLINE_S = 10.0
# The transports that serve a connection without TLS: each test runs on both.
PUMP, LOOP = "pump", "loop"
served_by = PUMP


@pytest.fixture(autouse=True, params=[PUMP, LOOP])
def serve_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "served_by", request.param)


class Recorder:
    """A session that records its calls; `take` returns how many bytes it consumes."""

    def __init__(self, pipe: StreamConnection) -> None:
        self.pipe = pipe
        self.events: list[str] = []
        self.data = bytearray()
        self.lost = 0  # bytes that were never sent
        self.take: Callable[[bytes], int] = len

    def receive(self, buffer: Buffer, start: int, end: int) -> int:
        offered = bytes(memoryview(buffer)[start:end])
        taken = self.take(offered)
        self.data += offered[:taken]
        return taken

    def take_one_and_pause(self, offered: bytes) -> int:
        self.pipe.pause_reading()
        return 1

    def take_all_and_close(self, offered: bytes) -> int:
        self.pipe.close()
        return len(offered)

    def on_stalled(self) -> None:
        self.events.append("stalled")

    def on_writable(self) -> None:
        self.events.append("writable")

    def on_half_closed(self) -> bool:
        self.events.append("half_closed")
        self.pipe.close()
        return False

    def on_ended(self) -> None:
        self.events.append("ended")
        self.lost = self.pipe.backlog_bytes()


class RecordingListener:
    """The listener's part: admitted and lost connections."""

    def __init__(self, admits: bool = True) -> None:
        self.admits = admits
        self.entered: list[StreamConnection] = []
        self.left: list[StreamConnection] = []

    def admit(self, one: StreamConnection) -> bool:
        if self.admits:
            self.entered.append(one)
        return self.admits

    def lost(self, one: StreamConnection) -> None:
        self.left.append(one)


class End:
    """The far end: a blocking socket with a deadline, used from a loop that must go on."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send_for_ever(self, data: bytes) -> None:
        while True:
            await self.send(data)
            await asyncio.sleep(0)

    async def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = await asyncio.get_running_loop().sock_recv(self.sock, count - len(data))
            if not piece:
                raise EOFError(f"ended after {len(data)} bytes")
            data += piece
        return bytes(data)

    async def to_the_end(self) -> bytes:
        data = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 20):
            data += piece
        return bytes(data)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


Pair = Callable[[], tuple[socket.socket, socket.socket]]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    return near, far


@asynccontextmanager
async def accepted(
    open_session: Callable[[StreamConnection], Recorder], listener: RecordingListener, pair: Pair
) -> AsyncIterator[End]:
    """A connection and its far end. Left open, it would keep the loop from closing."""
    near, far = pair()
    far.setblocking(False)
    shared = SharedBuffer()
    connection = StreamConnection(open_session, shared, listener.admit, listener.lost)
    if not connection.identify_and_admit(near):
        near.close()
        yield End(far)
        far.close()
        return
    loop = asyncio.get_running_loop()
    pump = Pump(loop, LoopTurn(loop.call_soon), shared)
    transport: asyncio.Transport | SocketTransport
    if served_by == PUMP:
        transport = pump.add(near, connection)
    else:
        transport, _ = await loop.connect_accepted_socket(lambda: connection, near)
    try:
        yield End(far)
    finally:
        far.close()
        transport.abort()
        await eventually(lambda: listener.left == listener.entered, "the connection is lost")
        pump.close()


@asynccontextmanager
async def connected(
    listener: RecordingListener | None = None, pair: Pair = tcp_pair
) -> AsyncIterator[tuple[Recorder, End]]:
    listener = listener or RecordingListener()
    opened: list[Recorder] = []

    def open_session(pipe: StreamConnection) -> Recorder:
        opened.append(Recorder(pipe))
        return opened[-1]

    async with accepted(open_session, listener, pair) as far:
        yield opened[0], far


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await test()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


PAIRS = pytest.mark.parametrize("pair", [tcp_pair, socket.socketpair], ids=["tcp", "unix"])


@PAIRS
def test_bytes_pass_in_both_directions(pair: Pair):
    async def test() -> None:
        async with connected(pair=pair) as (session, far):
            await far.send(b"hello")
            await eventually(lambda: session.data == b"hello", "the session has it")
            session.pipe.write(b"1")
            session.pipe.write_many([b"2", b"3"])
            assert await far.read(3) == b"123"
            assert session.events == []

    run(test)


def test_unconsumed_bytes_are_delivered_with_the_next_read():
    async def test() -> None:
        async with connected() as (session, far):
            session.take = lambda offered: len(offered) // 4 * 4
            await far.send(b"1234ab")
            await eventually(lambda: session.data == b"1234", "the first four")
            await far.send(b"cd")
            await eventually(lambda: session.data == b"1234abcd", "the rest")

    run(test)


def test_paused_session_receives_nothing_until_it_resumes():
    async def test() -> None:
        async with connected() as (session, far):
            session.take = session.take_one_and_pause
            await far.send(b"abc")
            await eventually(lambda: session.data == b"a", "one byte, then it paused")
            await far.send(b"def")
            # The kernel has the bytes. The round trip shows that the loop has run since.
            session.pipe.write(b"x")
            assert await far.read(1) == b"x"
            assert session.data == b"a"
            session.take = len
            session.pipe.resume_reading()
            assert session.data == b"abc"  # held bytes arrive at once
            await eventually(lambda: session.data == b"abcdef", "and then what came since")

    run(test)


def test_a_session_may_pause_again_while_it_resumes():
    async def test() -> None:
        async with connected() as (session, far):
            session.take = session.take_one_and_pause
            await far.send(b"abcd")
            await eventually(lambda: session.data, "the first byte")
            for expected in (b"ab", b"abc", b"abcd"):
                session.pipe.resume_reading()
                assert bytes(session.data) == expected

    run(test)


@PAIRS
def test_a_peer_that_does_not_read_stalls_the_session(
    pair: Pair,
):
    async def test() -> None:
        async with connected(pair=pair) as (session, far):
            written = 0
            while not session.events:
                session.pipe.write(bytes(1 << 20))
                written += 1 << 20
            assert session.events == ["stalled"]
            backlog, in_host = session.pipe.backlog_bytes(), session.pipe.unconfirmed_bytes()
            assert 0 < backlog <= 1 << 20
            assert in_host > 0
            await far.read(written)
            await eventually(lambda: session.events == ["stalled", "writable"], "it goes on")
            assert session.pipe.backlog_bytes() == 0
            await eventually(lambda: session.pipe.unconfirmed_bytes() == 0, "all of it was taken")

    run(test)


def test_unconfirmed_bytes_show_progress_of_a_stalled_socket():
    """The slow-consumer rule stands on this: a long queue hides a reader that is at work."""

    async def test() -> None:
        async with connected() as (session, far):
            while not session.events:
                session.pipe.write(bytes(1 << 20))
            before = session.pipe.unconfirmed_bytes() + session.pipe.backlog_bytes()
            await far.read(1 << 20)
            await eventually(
                lambda: session.pipe.unconfirmed_bytes() + session.pipe.backlog_bytes() < before,
                "progress is visible",
            )

    run(test)


def test_close_sends_written_bytes_first():
    async def test() -> None:
        listener = RecordingListener()
        async with connected(listener) as (session, far):
            session.pipe.write(bytes(8 << 20))
            session.pipe.close()
            assert len(await far.to_the_end()) == 8 << 20
            await eventually(lambda: "ended" in session.events, "the session has ended")
            assert session.events[-1] == "ended"
            assert listener.left == listener.entered

    run(test)


def test_close_aborts_after_linger_s(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LINGER_S", 0.05)

    async def test() -> None:
        async with connected() as (session, _far):
            session.pipe.write(bytes(64 << 20))
            session.pipe.close()
            await eventually(lambda: session.events[-1] == "ended", "it was given up")
            assert session.lost > 0  # it can still be counted

    run(test)


def test_close_is_idempotent():
    async def test() -> None:
        async with connected() as (session, far):
            session.pipe.close()
            session.pipe.close()
            session.pipe.resume_reading()
            session.pipe.pause_reading()
            assert await far.to_the_end() == b""
            session.pipe.close()

    run(test)


def test_abort_ends_the_connection_at_once():
    async def test() -> None:
        async with connected() as (session, _far):
            session.pipe.write(bytes(64 << 20))
            session.pipe.abort()
            await eventually(lambda: session.events[-1] == "ended", "gone")

    run(test)


def test_slot_is_freed_once_if_the_session_retains_it_after_an_abort():
    async def test() -> None:
        listener = RecordingListener()
        async with connected(listener) as (session, _far):
            ended = asyncio.Event()

            def retain() -> None:
                session.pipe.retain_slot()
                ended.set()

            session.on_ended = retain  # type: ignore[method-assign]
            session.pipe.abort()
            await ended.wait()
            session.pipe.abort()  # a stopping bus does not wait for the session
            session.pipe.retain_slot()
            session.pipe.release_slot()
        assert len(listener.left) == 1

    run(test)


def test_nothing_is_received_after_closing():
    async def test() -> None:
        async with connected() as (session, far):
            session.take = session.take_all_and_close
            await far.send(b"first")
            await eventually(lambda: session.data, "it closed at the first bytes")
            with pytest.raises(ConnectionError):
                await far.send_for_ever(b"more")
            await eventually(lambda: "ended" in session.events, "gone")
            assert session.data == b"first"

    run(test)


def test_half_close_is_reported_before_the_end():
    async def test() -> None:
        async with connected() as (session, far):
            far.sock.shutdown(socket.SHUT_WR)
            await eventually(lambda: "ended" in session.events, "gone")
            assert session.events == ["half_closed", "ended"]

    run(test)


@pytest.mark.parametrize("paused", [False, True])
def test_a_reset_ends_the_session_once(paused: bool):
    async def test() -> None:
        listener = RecordingListener()
        async with connected(listener) as (session, far):
            if paused:
                session.pipe.pause_reading()
            far.reset()
            if paused:
                session.pipe.resume_reading()
            await eventually(lambda: "ended" in session.events, "gone")
            assert session.events == ["ended"]
            assert listener.left == listener.entered

    run(test)


def test_calls_after_a_failed_write_are_safe():
    """The loop learns of a broken connection before the session does."""

    async def test() -> None:
        async with connected() as (session, far):
            session.pipe.pause_reading()
            far.reset()
            for _ in range(3):  # the first write fails; the rest go nowhere
                session.pipe.write(b"x")
                session.pipe.write_many([b"y", b"z"])
                session.pipe.resume_reading()
                session.pipe.pause_reading()
                session.pipe.backlog_bytes()
                session.pipe.unconfirmed_bytes()
            await eventually(lambda: "ended" in session.events, "gone")
            session.pipe.resume_reading()
            session.pipe.close()
            assert session.pipe.unconfirmed_bytes() == 0
            assert session.events[-1] == "ended"

    run(test)


def test_connection_over_the_limit_gets_no_session():
    async def test() -> None:
        listener = RecordingListener(admits=False)

        def open_session(pipe: StreamConnection) -> Recorder:
            raise AssertionError("no session for one that is not let in")

        async with accepted(open_session, listener, tcp_pair) as far:
            assert await far.to_the_end() == b""
        assert listener.left == []

    run(test)


def test_failing_session_factory_ends_the_connection():
    async def test() -> None:
        listener = RecordingListener()
        loop = asyncio.get_running_loop()
        faults: list[object] = []
        loop.set_exception_handler(lambda _loop, context: faults.append(context["exception"]))

        def open_session(pipe: StreamConnection) -> Recorder:
            raise RuntimeError("no")

        async with accepted(open_session, listener, tcp_pair) as far:
            assert await far.to_the_end() == b""
            await eventually(lambda: listener.left == listener.entered, "its place is free again")
        assert [str(fault) for fault in faults] == ["no"]

    run(test)
