"""The pump's transport: writes go to the socket at once, and in order with queued bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from polybus.kernel.outbox import LoopTurn
from polybus.kernel.pump import Pump, SocketTransport
from polybus.kernel.receive_buffer import ReceiveBuffer, SharedBuffer

DEADLINE_S = 10.0


class Recorder(ReceiveBuffer):
    """A protocol that records the calls of its transport."""

    def __init__(self, shared: SharedBuffer) -> None:
        super().__init__(shared)
        self.calls: list[str] = []
        self.keeps_open = False  # after the end of the peer's bytes
        self.lost = asyncio.Event()
        self.drained = asyncio.Event()

    def connection_made(self, transport: SocketTransport) -> None:
        self.transport = transport

    def pause_writing(self) -> None:
        self.calls.append("pause_writing")

    def resume_writing(self) -> None:
        self.calls.append("resume_writing")
        self.drained.set()

    def eof_received(self) -> bool:
        self.calls.append("eof_received")
        return self.keeps_open

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append(f"connection_lost {type(error).__name__}")
        self.lost.set()


@contextlib.asynccontextmanager
async def pumped() -> AsyncIterator[tuple[Recorder, SocketTransport, socket.socket]]:
    loop = asyncio.get_running_loop()
    shared = SharedBuffer(64)
    pump = Pump(loop, LoopTurn(loop.call_soon), shared)
    near, far = socket.socketpair()
    far.setblocking(False)
    recorder = Recorder(shared)
    transport = pump.add(near, recorder)
    async with asyncio.timeout(DEADLINE_S):
        try:
            yield recorder, transport, far
        finally:
            far.close()
            transport.abort()
            await recorder.lost.wait()
            pump.close()


def run(test: object) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())  # type: ignore[operator]


async def read(far: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        data += await asyncio.get_running_loop().sock_recv(far, count - len(data))
    return bytes(data)


def test_bytes_that_fit_the_socket_are_not_queued():
    async def check() -> None:
        async with pumped() as (_, transport, far):
            transport.write(b"abc")
            assert (far.recv(9), transport.get_write_buffer_size()) == (b"abc", 0)

    run(check)


def test_rest_and_later_writes_are_sent_in_order():
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            data = bytes(range(256)) * 16384
            transport.write(data)
            assert 0 < transport.get_write_buffer_size() < len(data)
            assert recorder.calls == ["pause_writing"]
            first = far.recv(1 << 16)  # there is room again, but bytes must not overtake the queue
            transport.write(b"last")
            rest = await read(far, len(data) + 4 - len(first))
            assert first + rest == data + b"last"
            await recorder.drained.wait()
            assert recorder.calls == ["pause_writing", "resume_writing"]
            assert transport.get_write_buffer_size() == 0

    run(check)


def test_write_to_a_broken_socket_ends_the_connection():
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            transport.pause_reading()
            far.close()
            transport.write(b"abc")
            await recorder.lost.wait()
            assert recorder.calls == ["connection_lost BrokenPipeError"]

    run(check)


def test_closing_transport_sends_its_queue_and_accepts_no_more():
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            data = bytes(1 << 22)
            transport.write(data)
            transport.close()
            transport.write(b"late")
            assert await read(far, len(data)) == data
            await recorder.lost.wait()
            assert far.recv(9) == b""

    run(check)


@pytest.mark.parametrize("is_paused", [False, True])
def test_end_of_the_peers_bytes_is_reported_once_they_are_read(is_paused: bool):
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            if is_paused:
                transport.pause_reading()
            far.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if is_paused:
                assert recorder.calls == []
                transport.resume_reading()
            await recorder.lost.wait()
            assert recorder.calls == ["eof_received", "connection_lost NoneType"]

    run(check)


def test_connection_may_stay_open_after_the_end_of_the_peers_bytes():
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            recorder.keeps_open = True
            far.shutdown(socket.SHUT_WR)
            for _ in range(5):
                await asyncio.sleep(0)
            transport.write(b"answer")
            assert await read(far, 6) == b"answer"
            assert recorder.calls == ["eof_received"]

    run(check)


def test_reset_connection_is_reported_as_such():
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            transport.write(b"unread")
            far.close()
            await recorder.lost.wait()
            assert recorder.calls == ["connection_lost ConnectionResetError"]

    run(check)


def test_closing_idle_transport_ends_it():
    async def check() -> None:
        async with pumped() as (recorder, transport, _):
            transport.close()
            await recorder.lost.wait()
            assert recorder.calls == ["connection_lost NoneType"]

    run(check)


def test_abort_does_not_wait_for_output():
    async def check() -> None:
        async with pumped() as (recorder, transport, _):
            transport.write(bytes(1 << 22))
            transport.abort()
            await recorder.lost.wait()
            assert recorder.calls == ["pause_writing", "connection_lost NoneType"]

    run(check)


def test_write_to_a_full_socket_waits_for_room():
    async def check() -> None:
        async with pumped() as (recorder, transport, far):
            sock = transport.get_extra_info("socket")
            filled = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    filled += sock.send(bytes(4096))
            transport.write(b"last")
            assert recorder.calls == ["pause_writing"]
            assert (await read(far, filled + 4))[filled:] == b"last"
            await recorder.drained.wait()
            assert recorder.calls == ["pause_writing", "resume_writing"]

    run(check)


@pytest.mark.parametrize("size", [40, 200])  # of the shared buffer's 64 bytes
def test_bytes_that_a_session_leaves_precede_the_next_read(size: int):
    async def check() -> None:
        async with pumped() as (recorder, _, far):
            data = bytes(range(size))
            whole = asyncio.Event()

            def receive(buffer: bytes, start: int, end: int) -> int:
                assert bytes(buffer[start:end]) == data[: end - start]
                if end - start == size:
                    whole.set()
                return 0

            recorder.receive = receive
            for at in range(0, size, 10):
                await asyncio.get_running_loop().sock_sendall(far, data[at : at + 10])
                await asyncio.sleep(0)
            await whole.wait()

    run(check)


def test_error_of_a_session_ends_its_connection_and_is_reported():
    async def check() -> None:
        reports: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))

        def receive(buffer: object, start: int, end: int) -> int:
            raise ZeroDivisionError

        async with pumped() as (recorder, _, far):
            recorder.receive = receive
            far.send(b"a")
            await recorder.lost.wait()
            assert recorder.calls == ["connection_lost ZeroDivisionError"]
            assert [type(one["exception"]) for one in reports] == [ZeroDivisionError]

    run(check)


@contextlib.asynccontextmanager
async def two_pumped() -> AsyncIterator[tuple[Pump, list[str], list[socket.socket]]]:
    """Yield a pump, the bytes that its two sessions got in order, and the peers' sockets."""
    loop = asyncio.get_running_loop()
    shared = SharedBuffer(64)
    pump = Pump(loop, LoopTurn(loop.call_soon), shared)
    got: list[str] = []
    recorders, peers = [], []
    for _ in range(2):
        near, far = socket.socketpair()
        recorder = Recorder(shared)
        pump.add(near, recorder)

        def receive(buffer: bytes, start: int, end: int) -> int:
            got.append(bytes(buffer[start:end]).decode())
            return end - start

        recorder.receive = receive
        recorders.append(recorder)
        peers.append(far)
    async with asyncio.timeout(DEADLINE_S):
        try:
            yield pump, got, peers
        finally:
            for recorder, far in zip(recorders, peers, strict=True):
                far.close()
                recorder.transport.abort()
                await recorder.lost.wait()
            pump.close()


def test_turn_that_ran_a_session_is_the_last_of_its_callback():
    async def check() -> None:
        async with two_pumped() as (pump, got, (first, _)):
            first.send(b"a" * 65)  # the buffer takes 64 of them
            pump.run()
            assert got == ["a" * 64]
            pump.run()
            assert got == ["a" * 64, "a"]

    run(check)


def test_only_busy_socket_is_received_from_before_the_set_is_asked():
    async def check() -> None:
        async with two_pumped() as (pump, got, (first, second)):
            for _ in range(2):
                first.send(b"a")
                pump.run()
            second.send(b"b")
            first.send(b"a")
            pump.run()
            assert got == ["a", "a", "a", "b"]
            # Now two sockets were busy, so they are served in the order of their bytes.
            pump.run()  # the set forgets which it has reported
            first.send(b"a")
            second.send(b"b")
            pump.run()
            assert got[4:] == ["a", "b"]

    run(check)


def test_expected_socket_without_bytes_delays_no_other():
    async def check() -> None:
        async with two_pumped() as (pump, got, (first, second)):
            for _ in range(2):
                first.send(b"a")
                pump.run()
            second.send(b"b")
            pump.run()
            assert got == ["a", "a", "b"]

    run(check)


def test_expected_socket_may_end():
    async def check() -> None:
        async with two_pumped() as (pump, got, (first, second)):
            for _ in range(2):
                first.send(b"a")
                pump.run()
            first.close()
            pump.run()
            second.send(b"b")
            pump.run()
            await asyncio.sleep(0)
            second.send(b"c")
            pump.run()
            assert got == ["a", "a", "b", "c"]

    run(check)


def test_busy_tcp_connection_delays_its_acknowledgements():
    async def check() -> None:
        loop = asyncio.get_running_loop()
        shared = SharedBuffer()
        pump = Pump(loop, LoopTurn(loop.call_soon), shared)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            far = socket.create_connection(listener.getsockname())
            near, _ = listener.accept()
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        recorder = Recorder(shared)
        pump.add(near, recorder)
        is_immediate: list[bool] = []
        received = asyncio.Event()

        def receive(buffer: bytes, start: int, end: int) -> int:
            # Asked at once: the kernel leaves the mode after a pause.
            is_immediate.append(bool(near.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK)))
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            received.set()
            return end - start

        recorder.receive = receive
        async with asyncio.timeout(DEADLINE_S):
            while len(is_immediate) < 64 + 256 + 1024:
                received.clear()
                far.send(b"a")
                await received.wait()
            far.close()
            await recorder.lost.wait()
        pump.close()
        # Each time that the mode was left, it takes four times as many receives.
        delayed = [at + 1 for at, immediate in enumerate(is_immediate) if not immediate]
        assert delayed == [64, 64 + 256, 64 + 256 + 1024]

    run(check)
