"""Fuzzes GSB's deployed framing: any bytes that a peer sends after its hello.

The peer serves two open calls and has made one. The first byte of the input chooses the cut; the
rest are the bytes that the peer sends next. The invariant, for any input:

- nothing crashes, and both tables of calls hold the same calls;
- every peer gets the same whether the bytes come at once or in two pieces;
- the peer gets only frames that its clients understand: known codes, and texts in UTF-8.
"""

from __future__ import annotations

from polybus.dialects.gsb.limits import GsbLimits
from tests.rig import ya_wire
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.memory_bus import MemoryBus
from tests.rig.ya_memory_peer import YaMemoryPeer
from tests.rig.ya_wire import REPLY
from tests.vectors.ya import VECTORS

CUT_STEP = 7
LIMITS = GsbLimits(max_packet_bytes=300, free_partials=2, free_bytes=64)
CODES = {3: {0, 400, 409}, 5: {0, 404}, 9: {0, 400}, 11: {0, 404}, 13: {0, 400}}


def target(data: bytes) -> None:
    cut, stream = (data[0] if data else 0) * CUT_STEP, data[1:]
    assert run_stream(stream, 0) == run_stream(stream, cut)


def run_stream(stream: bytes, cut: int) -> tuple[object, ...]:
    """Return the output of the three peers."""
    bus = MemoryBus(gsb=LIMITS)
    service, caller, peer = MemoryPeer(bus), MemoryPeer(bus), YaMemoryPeer(bus)
    service.register("a")
    peer.register("/local/f")
    caller.call("f", "1")
    caller.call("f/x", "2")
    peer.call("/local/a", "7")
    peer.pipe.deliver(stream[:cut])
    peer.pipe.deliver(stream[cut:])
    bus.turn()
    for packet in peer.packets():
        if packet.kind == REPLY:
            assert packet.number(2) in (0, 400, 500)
            assert not packet.number(2) or packet.text(4) is not None
        elif packet.kind in CODES:
            assert packet.number(1) in CODES[packet.kind]
    stats = bus.stats("gsb")
    assert stats["open_calls"] == stats["serving"]
    return (
        bytes(service.pipe.taken),
        bytes(caller.pipe.taken),
        # The instance id in its hello is random.
        [packet for packet in ya_wire.Frames().feed(bytes(peer.pipe.taken)) if packet.kind != 1],
        peer.pipe.closed,
        bus.stats("connections", "closed"),
        stats,
    )


FRAMES = [
    *(vector.frame for vector in VECTORS),
    *(
        ya_wire.reply(call_id, data, code, kind)
        for call_id in ("1", "2", "9")
        for code in (0, 400, 500, 77)
        for kind in (0, 1, 2)
        for data in (b"", b"\xff" * 40)
    ),
    *(
        ya_wire.call(address, request_id, b"data", no_reply)
        for address in ("/local/a", "/local/f/y", "echo", "/net/x", "/local/sys/ping", "")
        for request_id in ("7", "8", "")
        for no_reply in (0, 1)
    ),
    ya_wire.call("/local/a", "8", b"x" * 400),
    ya_wire.reply("1", b"x" * 400),
]
SEEDS = [
    bytes([len(one) // 2 // CUT_STEP]) + one + FRAMES[at // 2] for at, one in enumerate(FRAMES)
]
WORDS = [one[4:] for one in FRAMES if len(one) < 60]
