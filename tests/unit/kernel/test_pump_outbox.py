"""An outbox before a socket of the pump: order, marks, bound and end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from collections.abc import AsyncIterator

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding
from polybus.kernel.fanout import Fanout, Source
from polybus.kernel.outbox import LoopTurn, Outbox, SocketOutput
from polybus.kernel.pump import Pump
from polybus.kernel.receive_buffer import SharedBuffer
from tests.unit.kernel.test_pump import DEADLINE_S, Recorder, read, run

HIGH_WATER = 1 << 20
MAX_BYTES = 4 << 20


class Pipe:
    """What an outbox needs of its connection."""

    def __init__(self, output: SocketOutput) -> None:
        self.output = output

    def unconfirmed_bytes(self) -> int:
        return 0


class Owner:
    def __init__(self) -> None:
        self.words: list[str] = []
        self.room = asyncio.Event()

    def on_filled(self, outbox: Outbox) -> None:
        self.words.append("filled")

    def on_room(self, outbox: Outbox) -> None:
        self.words.append("room")
        self.room.set()

    def on_overflow(self, outbox: Outbox) -> None:
        self.words.append("overflow")


@contextlib.asynccontextmanager
async def outbox() -> AsyncIterator[tuple[Outbox, Owner, Recorder, socket.socket]]:
    loop = asyncio.get_running_loop()
    shared, turn = SharedBuffer(), LoopTurn(loop.call_soon)
    pump = Pump(loop, turn, shared)
    near, far = socket.socketpair()
    far.setblocking(False)
    recorder, owner = Recorder(shared), Owner()
    pipe = Pipe(pump.add(near, recorder))
    box = Outbox(pipe, turn, owner, HIGH_WATER, MAX_BYTES)  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S):
        try:
            yield box, owner, recorder, far
        finally:
            far.close()
            recorder.transport.abort()
            await recorder.lost.wait()
            pump.close()


def test_first_push_of_a_turn_is_sent_at_once_and_later_ones_at_its_end():
    async def check() -> None:
        async with outbox() as (box, _, _, far):
            for byte in (b"a", b"b", b"c"):
                box.push(byte)
            assert far.recv(9) == b"a"
            assert await read(far, 2) == b"bc"

    run(check)


def test_output_of_a_session_is_sent_at_the_end_of_the_pumps_turn():
    async def check() -> None:
        async with outbox() as (box, _, recorder, far):

            def receive(buffer: bytes, start: int, end: int) -> int:
                for byte in (b"a", b"b", b"c"):
                    box.push(byte)
                return end - start

            recorder.receive = receive
            far.send(b"go")
            assert await read(far, 3) == b"abc"

    run(check)


def test_held_output_is_sent_in_order_and_reaches_both_marks():
    async def check() -> None:
        async with outbox() as (box, owner, _, far):
            chunks = [bytes([number]) * 30_000 for number in range(100)]
            for chunk in chunks:
                box.push(chunk)
            assert (box.full, owner.words) == (True, ["filled"])
            assert await read(far, 3_000_000) == b"".join(chunks)
            await owner.room.wait()
            assert (box.full, box.backlog(), owner.words) == (False, 0, ["filled", "room"])

    run(check)


def test_full_reader_can_still_send():
    async def check() -> None:
        async with outbox() as (box, _, recorder, far):
            received = asyncio.Event()

            def receive(buffer: bytes, start: int, end: int) -> int:
                received.set()
                return end - start

            recorder.receive = receive
            box.push(bytes(HIGH_WATER * 2))
            far.send(b"a")
            await received.wait()

    run(check)


def test_socket_over_its_bound_gets_nothing_more():
    async def check() -> None:
        async with outbox() as (box, owner, _, _far):
            box.push(bytes(MAX_BYTES * 2))
            before = box.backlog()
            box.push(b"late")
            assert (box.backlog(), owner.words) == (before, ["overflow"])

    run(check)


def test_closed_outbox_sends_or_drops_what_it_holds():
    async def check(send_held: bool) -> None:
        async with outbox() as (box, _, _, far):
            box.push(bytes(HIGH_WATER))
            held = box.backlog()
            assert held > 0
            box.close(send_held=send_held)
            assert box.backlog() == (held if send_held else 0)
            if send_held:
                assert await read(far, HIGH_WATER) == bytes(HIGH_WATER)

    run(lambda: check(True))
    run(lambda: check(False))


def test_messages_routed_to_a_closed_outbox_are_counted_once():
    async def check() -> None:
        async with outbox() as (box, _, _, _far):
            fanout = Fanout(lambda identity, topic: True)
            fanout.subscribe(fanout.add_subscriber(box, RqueueEncoding(0, 2048)), b"t")
            box.push(bytes(MAX_BYTES * 2))
            before = box.backlog()
            fanout.publish(Source(0, trusted=True), b"t", array("i", [0, 1, 2, 3]), b"abc")
            assert (box.take_dropped(), box.take_dropped()) == (3, 0)
            ((chunk, sent),) = box.close(send_held=False)
            assert (len(chunk) - sent, box.backlog(), box.unsent()) == (before, 0, [])

    run(check)
