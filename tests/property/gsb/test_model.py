"""Random requests: the bus behaves as the model does, whatever the form of the packets."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb import gsb_pb2 as pb
from tests.rig.gsb_memory_peer import UNKNOWN_FIELD, MemoryPeer
from tests.rig.gsb_wire import read_failure
from tests.rig.memory_bus import MemoryBus
from tests.rig.oracle.gsb import GsbBus, Sent

NODE = "0x" + "ab" * 20
PEERS = 3
NAMES = ["a", "a/b", "b", "sys/x", "net", "a//b", NODE]
ADDRESSES = [
    "a", "a/b", "a/b/c", "a/bc", "b", "/local/a/b", "/local/b", "sys/ping", "sys/none", "",
    "/a", "a/", f"/net/{NODE}/a", f"{NODE}/a", NODE, "/net/a", "grün", "x" * 65,
]  # fmt: skip
peer = st.integers(0, PEERS - 1)
request_id = st.sampled_from(["1", "2", "3", "ü", "", "x" * 256])
# Ids that the bus may have assigned, and others.
call_id = st.sampled_from(["1", "2", "3", "4", "5", "6", "a", "zz", ""])
data = st.sampled_from([b"", b"x", b"y" * 130, b"z" * 70_000])
steps = st.one_of(
    st.tuples(st.just("register"), peer, st.sampled_from(NAMES)),
    st.tuples(st.just("register"), peer, st.sampled_from(["a", "a/b", "b"])),
    st.tuples(st.just("unregister"), peer, st.sampled_from(NAMES)),
    st.tuples(st.just("call"), peer, st.sampled_from(ADDRESSES), request_id, data),
    st.tuples(st.just("call"), peer, st.sampled_from(["a", "a/b", "b"]), request_id, data),
    st.tuples(
        st.just("reply"), peer, call_id, st.sampled_from([0, 500, 7]), st.integers(0, 1), data
    ),
    st.tuples(st.just("cancel"), peer, request_id),
    st.tuples(st.just("leave"), peer),
)


class Real:
    """The bus, with the methods of the model."""

    def __init__(self, *, padding: bytes) -> None:
        self.bus = MemoryBus(gsb_padding=padding)
        self.peers = [MemoryPeer(self.bus, is_unix=number == 1) for number in range(PEERS)]

    def register(self, number: int, name: str) -> None:
        self.peers[number].send(register_request=pb.RegisterRequest(service_id=name))

    def unregister(self, number: int, name: str) -> None:
        self.peers[number].send(unregister_request=pb.UnregisterRequest(service_id=name))

    def call(self, number: int, address: str, request_id: str, data: bytes) -> None:
        self.peers[number].call(address, request_id, data)

    def reply(self, number: int, call_id: str, code: int, kind: int, data: bytes) -> None:
        self.peers[number].reply(call_id, data, partial=kind == 1, code=code)

    def cancel(self, number: int, request_id: str) -> None:
        self.peers[number].cancel(request_id)

    def leave(self, number: int) -> None:
        self.peers[number].pipe.hang_up()
        self.bus.turn()

    def sent(self, number: int) -> list[Sent]:
        return [plain(packet) for packet in self.peers[number].packets()]


def plain(packet: pb.Packet) -> Sent:
    kind = packet.WhichOneof("kind") or ""
    if kind == "call_reply":
        reply = packet.call_reply
        failure = read_failure(reply.data)
        if reply.code == 500 and failure.origin == "bus":
            return "failure", reply.request_id, failure.code
        return kind, reply.request_id, reply.code, reply.type, reply.data
    if kind == "call_request":
        call = packet.call_request
        return kind, call.request_id, call.data, call.caller, call.address
    if kind == "cancel":
        return kind, packet.cancel.request_id
    return kind, getattr(packet, kind).code


def run_program(program: list[tuple[Any, ...]], subject: Any) -> None:
    gone: set[int] = set()
    for verb, number, *rest in program:
        if number in gone:
            continue
        if verb == "leave":
            gone.add(number)
        getattr(subject, verb)(number, *rest)


@given(st.lists(steps, max_size=40))
def test_bus_behaves_as_the_model(program):
    model = GsbBus()
    for number in range(PEERS):
        model.join(number)
    run_program(program, model)
    for padding in (b"", UNKNOWN_FIELD):
        real = Real(padding=padding)
        run_program(program, real)
        for number in range(PEERS):
            if number not in model.gone:
                assert real.sent(number) == model.sent[number]
        stats = real.bus.stats("gsb")
        assert stats["open_calls"] == stats["serving"] == len(model.calls)
        assert stats["services"] == len(model.names)
        assert stats["calls"] == model.opened
        assert real.bus.stats("dropped", "unknown_call") == model.unknown_replies
        assert real.bus.stats("refused", "unknown_cancel") == model.unknown_cancels
