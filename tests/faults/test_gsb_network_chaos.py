"""Calls, streams and broadcasts between all nodes, while links and nodes fail.

Links are cut, held up, delayed and made lossy; nodes are killed. Every call of a caller that stays
connected ends in exactly one FULL reply. A reply that succeeds is of the called node, and the items
of a stream are in order and complete. A broadcast is of the node whose topic was subscribed, and
none arrives twice or out of order. When the network has healed, every node reaches every other and
gets its broadcasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from polybus import gsb
from polybus.dialects.gsb import codec, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.errors import PolybusError
from tests.rig.gsb_network import GsbNetwork
from tests.rig.gsb_peer import call, hello
from tests.rig.gsb_wire import StreamFrames, read_failure
from tests.rig.relay import Relay
from tests.rig.soak_runs import SoakRun

WHO, COUNT, NEWS = "public/who", "public/count", "public/news"
OPEN_TO_NODES = "allow node:* call,subscribe public/*"
BROADCAST_EVERY_S = 0.05
DELAY_S = 0.05  # of each piece on a slow link
LOSS = 0.3  # of the pieces on a lossy link
ITEMS = 20
OUTSTANDING = 6  # calls of each caller
STREAMS = 0.2  # of the calls
DEADLINE_MS = 4000
# Of a call that the network ends: the node is not known yet after a restart, or its service is not
# registered yet; the path is broken; no reply in time.
CODES = {404, 503, 504}
SHORT_FAULTS = 8
SOAK_NODES, SOAK_EDGES = 16, 28
SOAK_FAULTS = int(os.environ.get("POLYBUS_NETWORK_FAULTS", "120"))
HEAL_S = 60.0
END_S = 12.0  # for the last calls, whose deadline is shorter


class Caller:
    """Calls random nodes over a connection of its own, and checks every reply."""

    def __init__(self, net: GsbNetwork, name: str, chance: random.Random) -> None:
        self._net, self._name, self._chance = net, name, chance
        self._ids = count()
        self._open: dict[str, tuple[str, str, int]] = {}  # id → node, service, items so far
        self.ended: dict[int, int] = {}  # code → calls
        self.faults: list[str] = []
        self.may_call = True
        self.done = asyncio.Event()

    @property
    def open_calls(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Call until the connection ends, or until no call is open and none may begin."""
        address = self._net.client_address(self._name)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
        except OSError:
            return
        writer.write(sp.GREETING)
        writer.write(sp.frame(hello(deadline_ms=DEADLINE_MS), sp.Form.TCP))
        frames = StreamFrames(sp.Form.TCP, 1 << 24)
        self._open.clear()
        self._call_more(writer)
        try:
            while self._open and (data := await reader.read(65536)):
                for payload in frames.feed(data):
                    self._take(pb.Packet.FromString(payload).call_reply)
                self._call_more(writer)
        except OSError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _call_more(self, writer: asyncio.StreamWriter) -> None:
        others = [name for name in self._net.ids if name != self._name]
        while self.may_call and len(self._open) < OUTSTANDING:
            node = self._chance.choice(others)
            service = COUNT if self._chance.random() < STREAMS else WHO
            number = str(next(self._ids))
            self._open[number] = node, service, 0
            request = call(self._net.remote(node, service), number)
            writer.write(sp.frame(request, sp.Form.TCP))

    def _take(self, reply: pb.CallReply) -> None:
        opened = self._open.get(reply.request_id)
        if opened is None:
            self.faults.append(f"a reply after the end of call {reply.request_id}")
            return
        node, service, items = opened
        if reply.type == 1:
            if codec.unpack(reply.data) != [node, items]:
                self.faults.append(f"item {items} of {node} is {codec.unpack(reply.data)}")
            self._open[reply.request_id] = node, service, items + 1
            return
        del self._open[reply.request_id]
        code = read_failure(reply.data).code if reply.code else 0
        self.ended[code] = self.ended.get(code, 0) + 1
        if code and code not in CODES:
            self.faults.append(f"{node} {service}: {read_failure(reply.data)}")
        elif not code and service == COUNT and items != ITEMS:
            self.faults.append(f"a stream of {node} ended after {items} items")
        elif not code and service == WHO and codec.unpack(reply.data) != node:
            self.faults.append(f"{node} was called, {codec.unpack(reply.data)} answered")


class Reader:
    """Reads the broadcasts of one node at another, and checks them."""

    def __init__(self, net: GsbNetwork, node: str) -> None:
        self._net, self._node = net, node
        self.broadcasts = 0
        self.has_read = asyncio.Event()
        self.faults: list[str] = []
        self.newest: tuple[int, int] = (0, 0)  # the run of the node, the number

    async def run(self, client: gsb.Client) -> None:
        while True:
            # A node that has restarted may not know the other one yet.
            with contextlib.suppress(PolybusError):
                subscription = await client.subscribe(self._net.remote(self._node, NEWS))
                async for message in subscription:
                    self._take(message)
            await asyncio.sleep(0.1)

    def _take(self, message: gsb.Broadcast) -> None:
        node, run, number = message.data
        self.broadcasts += 1
        self.has_read.set()
        if node != self._node or message.caller != self._net.ids[node]:
            self.faults.append(f"a broadcast of {node} as one of {self._node}")
        elif (run, number) <= self.newest:
            self.faults.append(f"broadcast {run, number} of {node} after {self.newest}")
        self.newest = run, number


class Line:
    """The relay of a link, and what is wrong with it."""

    def __init__(self, port: int) -> None:
        self.relay = Relay(port, change=self._change)
        self.is_slow = self.is_lossy = False

    def _change(self, piece: bytes) -> bytes:
        if self.is_slow:
            time.sleep(DELAY_S)
        return b"" if self.is_lossy and random.random() < LOSS else piece

    async def fail(self, fault: str, seconds: float) -> None:
        if fault == "cut":
            self.relay.cut()
            return
        if fault == "hold":
            self.relay.hold()
        self.is_slow, self.is_lossy = fault == "slow", fault == "lossy"
        await asyncio.sleep(seconds)
        self.relay.release()
        self.is_slow = self.is_lossy = False


class ChaoticNetwork:
    """Nodes whose links go through relays, with a service and a caller each."""

    def __init__(self, seed: int, nodes: int, edges: list[tuple[int, int]]) -> None:
        self.chance = random.Random(seed)
        self.net = GsbNetwork(acl=OPEN_TO_NODES)
        self.names = [f"n{number}" for number in range(nodes)]
        self.edges = edges
        self.lines: dict[tuple[int, int], Line] = {}
        self.callers: list[Caller] = []
        self.readers: list[Reader] = []
        self._services: dict[str, gsb.Client] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._callers: dict[str, Caller] = {}  # of the running nodes
        self._readers: dict[str, list[Reader]] = {}
        self._runs = count(1)
        self.kills = self.cuts = 0

    def links_of(self, number: int) -> list[str]:
        """The addresses that a node dials: the relays to nodes with lower numbers."""
        ids = self.net.ids
        return [
            f"tls+tcp://127.0.0.1:{self.lines[edge].relay.port}#{ids[self.names[edge[0]]]}"
            for edge in self.edges
            if edge[1] == number
        ]

    async def start(self, number: int) -> None:
        name = self.names[number]
        links = self.links_of(number)
        await asyncio.to_thread(self.net.start, name, POLYBUS_GSB_LINKS=",".join(links))
        for edge in self.edges:
            if edge[0] == number and edge not in self.lines:
                self.lines[edge] = Line(self.net.link_port(name))

    def go_live(self, name: str) -> None:
        """Serve and call at a node."""
        self._tasks[name] = asyncio.ensure_future(self._live(name))

    async def _live(self, name: str) -> None:
        address = str(self.net.client_address(name))
        async with gsb.connect(address, reconnect=False) as client, asyncio.TaskGroup() as tasks:

            @client.service(WHO)
            async def who(call: gsb.Call) -> object:
                return name

            @client.service(COUNT)
            async def items(call: gsb.Call) -> object:
                for number in range(ITEMS):
                    yield [name, number]

            readers = [Reader(self.net, other) for other in self.names if other != name]
            self.readers += readers
            self._readers[name] = readers
            for reader in readers:
                tasks.create_task(reader.run(client))
            tasks.create_task(self._broadcast(client, name))
            caller = Caller(self.net, name, self.chance)
            self.callers.append(caller)
            self._callers[name] = caller
            await caller.run()
            caller.done.set()
            await asyncio.Event().wait()  # others may still call the services

    async def _broadcast(self, client: gsb.Client, name: str) -> None:
        run = next(self._runs)
        with contextlib.suppress(PolybusError):  # the node was killed
            for number in count():
                await client.broadcast(NEWS, [name, run, number])
                await asyncio.sleep(BROADCAST_EVERY_S)

    async def disturb(self) -> None:
        fault = self.chance.choice(("cut", "cut", "hold", "slow", "lossy", "kill"))
        if fault == "kill":
            number = self.chance.randrange(len(self.names))
            name = self.names[number]
            self.kills += 1
            await asyncio.to_thread(self.net.kill, name)
            await self._end(name)
            await self.start(number)
            self.go_live(name)
        else:
            self.cuts += 1
            line = self.chance.choice(list(self.lines.values()))
            await line.fail(fault, self.chance.uniform(0.1, 1.0))
        await asyncio.sleep(self.chance.uniform(0.1, 0.6))

    async def _end(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])

    async def finish(self) -> None:
        """Stop calling, and wait for the end of all calls. Then every node reaches every other."""
        for caller in self._callers.values():
            caller.may_call = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                for caller in self._callers.values():
                    await caller.done.wait()
        open_calls = sum(caller.open_calls for caller in self._callers.values())
        assert not open_calls, f"{open_calls} calls have not ended"
        await asyncio.to_thread(self.net.await_nodes, len(self.names))
        async with asyncio.timeout(HEAL_S):
            for reader in [one for readers in self._readers.values() for one in readers]:
                reader.has_read.clear()
                await reader.has_read.wait()
        for name in list(self._tasks):
            await self._end(name)


@contextmanager
def chaotic(seed: int, nodes: int, edges: list[tuple[int, int]]) -> Iterator[ChaoticNetwork]:
    chaos = ChaoticNetwork(seed, nodes, edges)
    with chaos.net:
        try:
            yield chaos
        finally:
            for line in chaos.lines.values():
                line.relay.close()


async def disturb_and_judge(chaos: ChaoticNetwork, faults: int) -> int:
    for number in range(len(chaos.names)):
        await chaos.start(number)
    for name in chaos.names:
        chaos.go_live(name)
    await asyncio.to_thread(chaos.net.await_nodes, len(chaos.names))
    for _ in range(faults):
        await chaos.disturb()
    await chaos.finish()
    found = [fault for caller in chaos.callers for fault in caller.faults]
    found += [fault for reader in chaos.readers for fault in reader.faults]
    assert not found, f"{len(found)} faults: {found[:5]}"
    done = sum(caller.ended.get(0, 0) for caller in chaos.callers)
    assert done, "no call succeeded"
    return sum(sum(caller.ended.values()) for caller in chaos.callers)


@pytest.mark.timeout(170)
@pytest.mark.sabotage("gone-off", expects="calls have not ended")
def test_calls_end_once_in_a_ring_of_five():
    seed = random.randrange(1 << 32)
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)]
    with chaotic(seed, 5, edges) as chaos:
        calls = asyncio.run(disturb_and_judge(chaos, SHORT_FAULTS))
    print(f"seed {seed}: {calls} calls, {chaos.kills} kills, {chaos.cuts} cuts")  # noqa: T201


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_calls_end_once_among_sixteen_nodes(capsys):
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    line = [(number - 1, number) for number in range(1, SOAK_NODES)]
    others = {tuple(sorted(chance.sample(range(SOAK_NODES), 2))) for _ in range(SOAK_EDGES)}
    edges = [*line, *sorted((a, b) for a, b in others - set(line))]
    run = SoakRun("faults/test_gsb_network_chaos.py", seed)
    with chaotic(seed, SOAK_NODES, edges) as chaos:
        calls = asyncio.run(disturb_and_judge(chaos, SOAK_FAULTS))
    broadcasts = sum(reader.broadcasts for reader in chaos.readers)
    counts = {"calls": calls, "broadcasts": broadcasts, "kills": chaos.kills, "cuts": chaos.cuts}
    run.record(**counts, faults=0)
