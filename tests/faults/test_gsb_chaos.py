"""Random callers and services that connect, stream, cancel, hang, misbehave and disconnect.

Every call of a caller that stays connected ends in exactly one FULL reply. Its items come before
it, in order, and no reply comes after it. Its code names the reason. When all peers have
disconnected, the bus has no state of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import check_no_state_left, serving, tables
from tests.rig.gsb_peer import FULL, call, cancel, hello, packet, partial, reply
from tests.rig.gsb_wire import StreamFrames, read_failure
from tests.rig.observer import eventually

DEADLINE_MS = 400
NAMES = ("echo", "many", "hangs", "twice", "dies", "unregistered")
# The codes of the bus, and 0 and 500 of services.
CODES = {0, 404, 499, 500, 503, 504}
ROUND_S = 60.0  # only a failing test reaches it


class Connection:
    """One connection on asyncio's streams."""

    opened: ClassVar[list[Connection]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._frames = StreamFrames(sp.Form.TCP, 1 << 24)

    @classmethod
    async def dial(cls, port: int, **fields: Any) -> Connection:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        connection.writer.write(sp.GREETING)
        connection.send(hello(**fields))
        cls.opened.append(connection)
        return connection

    def send(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.writer.write(sp.frame(payload, sp.Form.TCP))

    async def packets(self) -> AsyncIterator[pb.Packet]:
        while data := await self.reader.read(65536):
            for payload in self._frames.feed(data):
                yield pb.Packet.FromString(payload)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


class Caller:
    """Makes calls, cancels some, and records the replies."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self._connection = connection
        self._chance = chance
        self._reading = asyncio.ensure_future(self._read_replies())
        self._has_pong = False
        self.is_closed = False
        self.open: dict[str, int] = {}  # request id → items received
        self.codes: list[int] = []

    async def make_calls(self, calls: int) -> None:
        """Send calls and cancels. Sometimes disconnect in between."""
        for number in range(calls):
            name = self._chance.choice(NAMES)
            self.open[f"{number}"] = 0
            self._connection.send(
                call(f"{name}/{number}", f"{number}", b"%d" % self._chance.randrange(9))
            )
            await self._connection.writer.drain()
            if self._chance.random() < 0.2:
                self._connection.send(cancel(self._chance.choice([*self.open, "unknown"])))
            if self._chance.random() < 0.02:
                await self._close()
                return
            await asyncio.sleep(self._chance.choice((0, 0, 0.002)))

    async def check_all_ended(self) -> None:
        """Check that each call got its FULL. The bus must have closed all calls before."""
        if self.is_closed:
            return
        # The pong comes after every reply that the bus has sent.
        self._connection.send(packet("ping"))
        await eventually(lambda: self._has_pong or self._reading.done(), "the bus sends a pong")
        await self._close()
        assert not self.open, f"{len(self.open)} calls were closed without a FULL reply"

    async def _close(self) -> None:
        self.is_closed = True
        await self._connection.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])
        if not self._reading.cancelled():
            self._reading.result()

    async def _read_replies(self) -> None:
        async for received in self._connection.packets():
            if received.WhichOneof("kind") == "pong":
                self._has_pong = True
                continue
            assert received.WhichOneof("kind") == "call_reply", received
            reply = received.call_reply
            assert reply.request_id in self.open, f"{reply} belongs to no open call"
            if reply.type == FULL:
                del self.open[reply.request_id]
                self.codes.append(read_failure(reply.data).code if reply.code else 0)
            else:
                assert reply.data == b"%d" % self.open[reply.request_id], "items out of order"
                self.open[reply.request_id] += 1


class Service:
    """Registers all free names, and handles each call by the name of the service."""

    def __init__(self, connection: Connection, chance: random.Random) -> None:
        self._connection = connection
        self._chance = chance

    async def work(self) -> None:
        for name in NAMES[:-1]:
            self._connection.send(packet("register_request", service_id=name))
        async for received in self._connection.packets():
            is_call = received.WhichOneof("kind") == "call_request"
            if is_call and not self._answer(received.call_request):
                break
            await self._connection.writer.drain()
        await self._connection.close()

    def _answer(self, request: pb.CallRequest) -> bool:
        """Reply to a call. Returns False if the service disconnects within it."""
        name, items = request.address.partition("/")[0], int(request.data)
        if name == "hangs":
            return True
        if name in ("many", "dies"):
            self._connection.send(*(partial(request.request_id, b"%d" % at) for at in range(items)))
        if name == "dies" and self._chance.random() < 0.2:
            return False
        failed = codec.pack_failure(500, "seven", "service")
        last = reply(request.request_id, failed, 500) if items == 7 else reply(request.request_id)
        self._connection.send(last)
        if name == "twice":
            self._connection.send(reply(request.request_id), partial(request.request_id), last)
        return True


async def run_services(port: int, chance: random.Random, stop: asyncio.Event) -> None:
    """Run one service after another until `stop` is set."""
    while not stop.is_set():
        connection = await Connection.dial(port, credits=chance.random() < 0.5)
        working = asyncio.ensure_future(Service(connection, chance).work())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
            await connection.close()
        elif working.exception() is not None and not isinstance(working.exception(), OSError):
            raise working.exception() or AssertionError


async def end_all(tasks: Sequence[asyncio.Future[None]]) -> None:
    """End all tasks and connections of a round, also after a failure."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for connection in Connection.opened:
        connection.writer.transport.abort()
    Connection.opened.clear()
    await asyncio.sleep(0)


async def run_round(bus: BusProcess, seed: int, calls: int) -> list[int]:
    port = bus.address("gsb").port
    chance, stop = random.Random(seed), asyncio.Event()
    services = [asyncio.ensure_future(run_services(port, chance, stop)) for _ in range(3)]
    callers = [
        Caller(await Connection.dial(port, deadline_ms=DEADLINE_MS), random.Random(seed + at))
        for at in range(8)
    ]
    try:
        async with asyncio.timeout(ROUND_S):
            await asyncio.gather(*(caller.make_calls(calls) for caller in callers))
            # The bus closes every call by its deadline at the latest.
            while (await asyncio.to_thread(tables, bus))["open_calls"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await asyncio.gather(*(caller.check_all_ended() for caller in callers))
            stop.set()
            await asyncio.gather(*services)
    finally:
        await end_all(services)
    return [code for caller in callers for code in caller.codes]


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serving() as running:
        yield running


def run(bus: BusProcess, seed: int, calls: int) -> list[int]:
    codes = asyncio.run(run_round(bus, seed, calls))
    assert set(codes) <= CODES, (seed, set(codes))
    check_no_state_left(bus)
    ended = {int(code): count for code, count in tables(bus)["ended"].items()}
    assert sum(ended.values()) >= len(codes)
    return codes


@pytest.mark.sabotage("gone-off", expects="[1-9][0-9]* calls were closed without a FULL reply")
def test_every_call_ends_in_exactly_one_full_reply(bus):
    codes = [code for seed in (1, 2) for code in run(bus, seed, 120)]
    assert {0, 404, 499} <= set(codes)


@pytest.mark.soak
def test_every_call_of_many_rounds_ends_in_exactly_one_full_reply(bus):
    for seed in range(100, 160):
        run(bus, seed, 400)
