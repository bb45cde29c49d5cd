"""GSB in the kernel: nothing leaks, and no byte outside a buffer is accessed."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from polybus.dialects.gsb import gsb_packets
from polybus.dialects.gsb import gsb_pb2 as pb
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.memory_bus import MemoryBus

ROUNDS = 200
SLACK_BYTES = 8192  # a leak is ROUNDS times more
ROOT = Path(__file__).parents[3]


class Conversation:
    """Calls that are answered, fail and are cancelled, on connections that stay."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.service, self.caller = MemoryPeer(self.bus), MemoryPeer(self.bus)
        self.service.register("a")

    def __call__(self) -> None:
        self.caller.call("a", "1", b"x" * 100_000)
        self.caller.call("a", "2", b"x")
        self.caller.call("a", "2", b"x")
        self.caller.call("b", "3", b"x")
        for request in [packet.call_request for packet in self.service.packets()]:
            self.service.reply(request.request_id, b"y" * 70_000, partial=True)
            self.service.reply(request.request_id, b"y")
        self.caller.call("a", "4", b"x")
        self.caller.cancel("4")
        for peer in (self.service, self.caller):
            peer.packets()
            peer.pipe.taken.clear()
            peer.pipe.writes.clear()
            peer._read = 0
        self.bus.log.events.clear()


def read_and_write() -> None:
    reply = pb.CallReply(request_id="1", type=pb.PARTIAL, data=b"x" * 100)
    payload = pb.Packet(call_reply=reply).SerializeToString()
    assert gsb_packets.read(payload, 0, len(payload)) is not None
    assert gsb_packets.read(payload, 0, len(payload) - 1) is None
    with pytest.raises(ValueError, match="within"):
        gsb_packets.read(payload, 0, 1000)


@pytest.mark.parametrize("make", [Conversation, lambda: read_and_write], ids=["calls", "packets"])
def test_nothing_leaks(make: Callable[[], Callable[[], None]]) -> None:
    act = make()
    for _ in range(10):
        act()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(ROUNDS):
            act()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < SLACK_BYTES


def gsb_sessions() -> int:
    gc.collect()
    return sum(type(found).__name__ == "GsbSession" for found in gc.get_objects())


def test_ended_connection_leaves_no_objects() -> None:
    before = gsb_sessions()  # of other tests in this process
    bus = MemoryBus()
    for _ in range(5):
        one = MemoryPeer(bus)
        one.register("a")
        one.call("a", "1")
        one.pipe.hang_up()
        bus.turn()
    del one
    bus._sessions.clear()
    assert gsb_sessions() <= before


def test_no_byte_outside_the_buffer_is_accessed() -> None:
    command = [sys.executable, "-m", "tests.unit.kernel.gsb_forbidden_pages"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "nothing outside was touched\n", done.stderr
