"""Fuzzes GSB's wire: any bytes that a peer sends after its greeting.

The peer serves two open calls and has made one. The first two bytes of the input choose the
cut and the kind of stream; the rest are the bytes that the peer sends next. The invariant,
for any input:

- nothing crashes, and both tables of calls hold the same calls;
- every peer gets the same whether the bytes come at once or in two pieces.
"""

from __future__ import annotations

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb import sp
from polybus.dialects.gsb.limits import GsbLimits
from tests.rig.gsb_memory_peer import MemoryPeer
from tests.rig.memory_bus import MemoryBus
from tests.vectors.gsb import VECTORS

CUT_STEP = 11
LIMITS = GsbLimits(max_packet_bytes=300, free_partials=2, free_bytes=64)


def target(data: bytes) -> None:
    place, choice = (*data[:2], 0, 0)[:2]
    stream, is_unix, with_credits = data[2:], bool(choice & 1), bool(choice & 2)
    cut = place * CUT_STEP
    whole, in_two = (
        run_stream(stream, at, is_unix=is_unix, with_credits=with_credits) for at in (0, cut)
    )
    assert whole == in_two


def run_stream(stream: bytes, cut: int, *, is_unix: bool, with_credits: bool) -> tuple[object, ...]:
    """Return the output of the three peers."""
    bus = MemoryBus(gsb=LIMITS)
    service, caller = MemoryPeer(bus), MemoryPeer(bus, is_unix=True)
    peer = MemoryPeer(bus, is_unix=is_unix, credits=with_credits)
    service.register("a")
    peer.register("f")
    caller.call("f", "1")
    caller.call("f/x", "2")
    peer.call("a", "7")
    peer.pipe.deliver(stream[:cut])
    peer.pipe.deliver(stream[cut:])
    bus.turn()
    stats = bus.stats("gsb")
    assert stats["open_calls"] == stats["serving"]
    return (
        bytes(service.pipe.taken),
        bytes(caller.pipe.taken),
        bytes(peer.pipe.taken),
        peer.pipe.closed,
        bus.stats("connections", "closed"),
        stats,
    )


def _frames(form: sp.Form) -> list[bytes]:
    replies = [
        pb.CallReply(request_id=call_id, type=kind, data=data)  # type: ignore[arg-type]
        for call_id in ("1", "2", "9")
        for kind in (0, 1, 2)
        for data in (b"", b"x" * 40)
    ]
    calls = [
        pb.ServiceCallRequest(address=address, request_id=request_id, data=b"data")
        for address in ("a", "a/b", "/local/f", "unknown", "sys/ping", "/net/x")
        for request_id in ("7", "8", "")
    ]
    payloads = [
        *(pb.Packet(call_reply=reply).SerializeToString() for reply in replies),
        *(pb.Packet(service_call_request=call).SerializeToString() for call in calls),
        pb.Packet(cancel=pb.Cancel(request_id="7")).SerializeToString(),
        pb.Packet(
            service_call_request=pb.ServiceCallRequest(address="a", request_id="8", data=b"x" * 400)
        ).SerializeToString(),
        pb.Packet(call_reply=pb.CallReply(request_id="1", data=b"x" * 400)).SerializeToString(),
    ]
    return [sp.frame(payload, form) for payload in payloads]


FRAMES = {
    form: [*_frames(form), *(getattr(one, form.name.lower()) for one in VECTORS)]
    for form in sp.Form
}
SEEDS = [
    bytes([len(one) // 2 // CUT_STEP, form + 2 * (at % 2)]) + one + frames[at // 2]
    for form, frames in FRAMES.items()
    for at, one in enumerate(frames)
]
WORDS = [one[8:] for one in FRAMES[sp.Form.TCP] if len(one) < 60]
