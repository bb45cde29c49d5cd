"""Callers and services that come, go, stream, cancel, hang and misbehave, all at random.

Whatever they do: a caller that stays hears of each of its calls exactly one FULL, items
before it in order and nothing behind it, with a code that says what happened; and when
all have gone the bus has nothing left of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.testing.bus_process import BusProcess
from tests.faults.gsb_live import check_nothing_is_left, serving, tables
from tests.rig.gsb_peer import FULL, call, cancel, hello, packet, partial, reply
from tests.rig.gsb_wire import StreamFrames, read_failure
from tests.rig.observer import eventually

DEADLINE_MS = 400
NAMES = ("echo", "many", "hangs", "twice", "dies", "nobody")
# What may become of a call: the bus's codes, and 0 and 500 of services.
CODES = {0, 404, 499, 500, 503, 504}
ROUND_S = 60.0  # only ever reached when something is wrong


class Party:
    """One connection on asyncio's streams."""

    everyone: ClassVar[list[Party]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._frames = StreamFrames(sp.Form.TCP, 1 << 24)

    @classmethod
    async def dial(cls, port: int, **fields: Any) -> Party:
        made = cls(*await asyncio.open_connection("127.0.0.1", port))
        made.writer.write(sp.GREETING)
        made.send(hello(**fields))
        cls.everyone.append(made)
        return made

    def send(self, *payloads: bytes) -> None:
        for payload in payloads:
            self.writer.write(sp.frame(payload, sp.Form.TCP))

    async def packets(self) -> Any:
        while data := await self.reader.read(65536):
            for payload in self._frames.feed(data):
                yield pb.Packet.FromString(payload)

    async def hang_up(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:
            pass


class Caller:
    """Makes calls, cancels some, and writes down what it hears."""

    def __init__(self, party: Party, chance: random.Random) -> None:
        self._party = party
        self._chance = chance
        self.open: dict[str, int] = {}  # id → items so far
        self.codes: list[int] = []
        self.left = False

    async def work(self, calls: int) -> None:
        listening = asyncio.ensure_future(self._listen())
        for number in range(calls):
            name = self._chance.choice(NAMES)
            self.open[f"{number}"] = 0
            self._party.send(
                call(f"{name}/{number}", f"{number}", b"%d" % self._chance.randrange(9))
            )
            await self._party.writer.drain()
            if self._chance.random() < 0.2:
                self._party.send(cancel(self._chance.choice([*self.open, "never made"])))
            if self._chance.random() < 0.02:
                await self._leave(listening)
                return
            await asyncio.sleep(self._chance.choice((0, 0, 0.002)))
        await eventually(lambda: not self.open or listening.done(), "all its calls end")
        await self._leave(listening)

    async def _leave(self, listening: asyncio.Future[None]) -> None:
        self.left = True
        await self._party.hang_up()
        listening.cancel()
        await asyncio.wait([listening])
        if not listening.cancelled():
            listening.result()

    async def _listen(self) -> None:
        async for found in self._party.packets():
            assert found.WhichOneof("kind") == "call_reply", found
            self._hear(found.call_reply)

    def _hear(self, heard: pb.CallReply) -> None:
        assert heard.request_id in self.open, f"{heard} belongs to no open call"
        if heard.type != FULL:
            assert heard.data == b"%d" % self.open[heard.request_id], "items out of order"
            self.open[heard.request_id] += 1
            return
        del self.open[heard.request_id]
        self.codes.append(read_failure(heard.data).code if heard.code else 0)


class Service:
    """Registers all names that are free, and treats each call as its name says."""

    def __init__(self, party: Party, chance: random.Random, keeps_credits: bool) -> None:
        self._party = party
        self._chance = chance
        self._keeps_credits = keeps_credits

    async def work(self) -> None:
        for name in NAMES[:-1]:
            self._party.send(packet("register_request", service_id=name))
        async for found in self._party.packets():
            if found.WhichOneof("kind") == "call_request" and not self._answer(found.call_request):
                break
            await self._party.writer.drain()
        await self._party.hang_up()

    def _answer(self, asked: pb.CallRequest) -> bool:
        """False: it goes, in the middle of everything."""
        name, items = asked.address.partition("/")[0], int(asked.data)
        if name == "hangs":
            return True
        if name in ("many", "dies"):
            self._party.send(*(partial(asked.request_id, b"%d" % at) for at in range(items)))
        if name == "dies" and self._chance.random() < 0.2:
            return False
        failed = codec.pack_failure(500, "as told", "service")
        ended = reply(asked.request_id, failed, code=500) if items == 7 else reply(asked.request_id)
        self._party.send(ended)
        if name == "twice":
            self._party.send(reply(asked.request_id), partial(asked.request_id), ended)
        return True


async def services(port: int, chance: random.Random, stop: asyncio.Event) -> None:
    """One after another, for as long as there are callers."""
    while not stop.is_set():
        keeps_credits = chance.random() < 0.5
        party = await Party.dial(port, credits=keeps_credits)
        working = asyncio.ensure_future(Service(party, chance, keeps_credits).work())
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
            await party.hang_up()
        elif working.exception() is not None and not isinstance(working.exception(), OSError):
            raise working.exception() or AssertionError


async def end_all(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Also after a failure nothing of the round stays."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for party in Party.everyone:
        party.writer.transport.abort()
    Party.everyone.clear()
    await asyncio.sleep(0)


async def round_of(port: int, seed: int, calls: int) -> list[int]:
    chance, stop = random.Random(seed), asyncio.Event()
    serving_them = [asyncio.ensure_future(services(port, chance, stop)) for _ in range(3)]
    callers = [
        Caller(await Party.dial(port, deadline_ms=DEADLINE_MS), random.Random(seed + at))
        for at in range(8)
    ]
    try:
        async with asyncio.timeout(ROUND_S):
            await asyncio.gather(*(one.work(calls) for one in callers))
            stop.set()
            await asyncio.gather(*serving_them)
    finally:
        await end_all(serving_them)
    for one in callers:
        assert one.left
    return [code for one in callers for code in one.codes]


@pytest.fixture
def bus() -> Iterator[BusProcess]:
    with serving() as running:
        yield running


def run(bus: BusProcess, seed: int, calls: int) -> list[int]:
    codes = asyncio.run(round_of(bus.address("gsb").port, seed, calls))
    assert set(codes) <= CODES, (seed, set(codes))
    check_nothing_is_left(bus)
    ended = {int(code): count for code, count in tables(bus)["ended"].items()}
    assert sum(ended.values()) >= len(codes)
    return codes


@pytest.mark.sabotage("gone-off", expects="in vain: all its calls end")
def test_every_call_ends_once_whatever_happens(bus):
    codes = [code for seed in (1, 2) for code in run(bus, seed, 120)]
    assert {0, 404, 499} <= set(codes)


@pytest.mark.soak
def test_every_call_ends_once_for_long(bus):
    for seed in range(100, 160):
        run(bus, seed, 400)
