"""A connection of a thread of the pump: what its thread routes, and what the session gets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding, RqueueFraming
from polybus.kernel.fanout import Fanout, PlainRoute, Source
from polybus.kernel.outbox import LoopTurn, Outbox
from polybus.kernel.pump import Pump
from polybus.kernel.receive_buffer import SharedBuffer
from tests.rig.observer import eventually
from tests.rig.rqueue_client import notification, publish, subscribe
from tests.unit.kernel.test_pump import DEADLINE_S, Recorder, read, run
from tests.unit.kernel.test_pump_outbox import Pipe

MIB = 1 << 20
CONTROL = subscribe(b"other")


class Publisher(Recorder):
    """A session that consumes one control frame at a time, and nothing else."""

    def __init__(self, shared: SharedBuffer) -> None:
        super().__init__(shared)
        self.controls = 0
        self.fanout: Fanout
        self.pauses = False
        self.parked = asyncio.Event()
        self.receive = self.on_bytes
        self.loop_reads = lambda: shared.reads

    def on_bytes(self, buffer: bytes, start: int, end: int) -> int:
        assert bytes(buffer[start : start + len(CONTROL)]) == CONTROL
        self.controls += 1
        if self.pauses:
            self.transport.pause_reading()
        self.parked.set()
        return len(CONTROL)


@contextlib.asynccontextmanager
async def bus() -> AsyncIterator[tuple[Publisher, socket.socket, socket.socket]]:
    """A publisher on a thread, its far end, and the far end of a subscriber of topic t."""
    loop = asyncio.get_running_loop()
    shared, turn = SharedBuffer(), LoopTurn(loop.call_soon)
    fanout = Fanout(lambda identity, topic: True)
    encoding = RqueueEncoding(0, 4 * MIB)
    pump = Pump(loop, turn, shared)
    pump.start_threads(1, fanout)
    near, far = socket.socketpair()
    near_reader, far_reader = socket.socketpair()
    publisher, reader = Publisher(shared), Recorder(shared)
    transport = pump.add(near, publisher)
    outbox = Outbox(Pipe(pump.add(near_reader, reader)), turn, None, 16 * MIB, 16 * MIB)  # type: ignore[arg-type]
    number = fanout.add_subscriber(outbox, encoding)
    fanout.subscribe(number, b"t")
    publisher.fanout = fanout
    for sock in (far, far_reader):
        sock.setblocking(False)
    transport.use_plain_route(PlainRoute(fanout, Source(0, trusted=True), RqueueFraming(encoding)))
    async with asyncio.timeout(DEADLINE_S):
        try:
            yield publisher, far, far_reader
        finally:
            fanout.remove_subscriber(number)
            for recorder in (publisher, reader):
                recorder.transport.abort()
                await recorder.lost.wait()
            pump.close()
            far.close()
            far_reader.close()


async def send(far: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(far, data)


def test_frames_in_pieces_are_routed_without_the_session():
    async def check() -> None:
        async with bus() as (publisher, far, reader):
            data = b"".join(publish(b"t", b"%d" % number) for number in range(50))
            expected = b"".join(notification(b"t", b"%d" % number) for number in range(50))
            for at in range(0, len(data), 7):
                await send(far, data[at : at + 7])
                await asyncio.sleep(0)
            assert await read(reader, len(expected)) == expected
            assert (publisher.controls, publisher.loop_reads()) == (0, 0)

    run(check)


def test_control_frame_parks_and_the_rest_is_routed_afterwards():
    async def check() -> None:
        async with bus() as (publisher, far, reader):
            await send(far, publish(b"t", b"1") + CONTROL + publish(b"t", b"2") + CONTROL)
            await send(far, publish(b"t", b"3"))
            expected = b"".join(notification(b"t", b"%d" % number) for number in (1, 2, 3))
            assert await read(reader, len(expected)) == expected
            assert publisher.controls == 2
            assert publisher.loop_reads() == 2

    run(check)


def test_paused_connection_is_given_back_when_it_resumes():
    async def check() -> None:
        async with bus() as (publisher, far, reader):
            publisher.pauses = True
            await send(far, CONTROL + publish(b"t", b"1"))
            await publisher.parked.wait()
            await asyncio.sleep(0.0)
            assert publisher.held_bytes == len(publish(b"t", b"1"))
            publisher.transport.resume_reading()
            assert await read(reader, len(notification(b"t", b"1"))) == notification(b"t", b"1")

    run(check)


def test_large_frame_is_routed():
    async def check() -> None:
        async with bus() as (publisher, far, reader):
            body = bytes(range(256)) * (3 * MIB // 256)
            expected = notification(b"t", body) + notification(b"t", b"after")
            sending = asyncio.create_task(send(far, publish(b"t", body) + publish(b"t", b"after")))
            assert await read(reader, len(expected)) == expected
            await sending
            assert publisher.controls == 0

    run(check)


def test_end_of_the_peers_bytes_is_reported():
    async def check() -> None:
        async with bus() as (publisher, far, reader):
            await send(far, publish(b"t", b"1"))
            far.close()
            assert await read(reader, len(notification(b"t", b"1"))) == notification(b"t", b"1")
            await publisher.lost.wait()
            assert publisher.calls == ["eof_received", "connection_lost NoneType"]

    run(check)


def test_broken_output_leaves_received_bytes_to_the_thread():
    """Any thread may find the output broken while the connection's own one uses the bytes."""

    async def check() -> None:
        async with bus() as (publisher, far, _):
            half = publish(b"t", b"1")[:5]
            await send(far, half)
            await eventually(lambda: publisher.held_bytes == len(half), "half a frame")
            far.shutdown(socket.SHUT_RD)  # a write fails, and nothing happens to the reads
            publisher.transport.write(b"answer")
            assert publisher.held_head(9) == b""
            await publisher.lost.wait()
            assert publisher.calls == ["connection_lost BrokenPipeError"]

    run(check)


def test_subscriptions_in_one_buffer_share_stops_of_the_threads():
    async def check() -> None:
        async with bus() as (publisher, far, _):
            fanout, count, all_came = publisher.fanout, 2000, asyncio.Event()

            def receive(_buffer: bytes, start: int, end: int) -> int:
                frames = (end - start) // len(CONTROL)
                for _ in range(frames):
                    publisher.controls += 1
                    fanout.subscribe(0, b"%d" % publisher.controls)
                if publisher.controls == count:
                    all_came.set()
                return frames * len(CONTROL)

            publisher.receive = receive
            before = fanout.stops
            await send(far, CONTROL * count)
            await all_came.wait()
            assert 0 < fanout.stops - before < count // 10
            after = fanout.stops
            fanout.subscribe(0, b"alone")
            fanout.unsubscribe(0, b"alone")
            assert fanout.stops == after + 2

    run(check)
