"""A GSB peer of a bus in memory. It encodes and decodes with protobuf, not with the kernel.

service, caller = MemoryPeer(bus), MemoryPeer(bus)
service.register("greeter")
caller.call("greeter", "1", b"data")
request = service.called()                    # the CallRequest
service.reply(request.request_id, b"hello")
assert caller.replies() == [("1", 0, 0, b"hello")]

On a bus with `gsb_padding=UNKNOWN_FIELD`, each packet has a field that the bus does not know. So it
does not have the usual form, and the bus must have protobuf decode it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb import sp
from polybus.model.identity import ANONYMOUS, Identity
from tests.rig.gsb_wire import StreamFrames, read_failure
from tests.rig.memory_bus import MemoryBus

MAX_BYTES = 1 << 30
UNKNOWN_FIELD = b"\xc0\x3e\x01"  # number 1000


class Reply(NamedTuple):
    request_id: str
    code: int
    type: int
    data: bytes


class MemoryPeer:
    """One connection. `hello` are the fields of its hello; without fields it sends none."""

    def __init__(
        self,
        bus: MemoryBus,
        *,
        identity: Identity = ANONYMOUS,
        appetite: int | None = None,
        is_unix: bool = False,
        **hello: Any,
    ) -> None:
        self.bus = bus
        self.form = sp.Form(is_unix)
        self.pipe = bus.connect_gsb(appetite, identity, is_unix=is_unix)
        self.session: Any = self.pipe.session
        self._frames = StreamFrames(self.form, MAX_BYTES)
        self._read = 0
        self._packets: list[pb.Packet] = []
        self.pipe.deliver(sp.GREETING)
        if hello:
            self.send(hello=pb.Hello(**hello))

    # --- sending

    def send(self, **kind: Any) -> None:
        self.send_payload(self.encode(pb.Packet(**kind)))

    def encode(self, packet: pb.Packet) -> bytes:
        kind = packet.WhichOneof("kind")
        if self.bus.gsb_padding and kind is not None:
            getattr(packet, kind).MergeFromString(self.bus.gsb_padding)
        return packet.SerializeToString()

    def send_payload(self, payload: bytes) -> None:
        self.pipe.deliver(sp.frame(payload, self.form))
        self.bus.turn()

    def register(self, name: str) -> int:
        self.send(register_request=pb.RegisterRequest(service_id=name))
        return int(self.next("register_reply").code)

    def unregister(self, name: str) -> int:
        self.send(unregister_request=pb.UnregisterRequest(service_id=name))
        return int(self.next("unregister_reply").code)

    def subscribe(self, topic: str) -> int:
        self.send(subscribe_request=pb.SubscribeRequest(topic=topic))
        return int(self.next("subscribe_reply").code)

    def broadcast(self, topic: str, data: bytes = b"x", caller: str = "") -> None:
        request = pb.BroadcastRequest(topic=topic, data=data, caller=caller)
        self.send(broadcast_request=request)

    def call(self, address: str, request_id: str = "1", data: bytes = b"") -> None:
        request = pb.ServiceCallRequest(address=address, request_id=request_id, data=data)
        self.send(service_call_request=request)

    def cancel(self, request_id: str = "1") -> None:
        self.send(cancel=pb.Cancel(request_id=request_id))

    def reply(
        self, call_id: str, data: bytes = b"", *, partial: bool = False, code: int = 0
    ) -> None:
        reply = pb.CallReply(request_id=call_id, data=data)
        reply.type = pb.PARTIAL if partial else pb.FULL
        reply.code = code  # type: ignore[assignment]
        self.send(call_reply=reply)

    # --- reading

    def packets(self) -> list[pb.Packet]:
        """Return the packets received since the last call."""
        self.bus.turn()
        data = bytes(self.pipe.taken[self._read :])
        self._read += len(data)
        received = [pb.Packet.FromString(payload) for payload in self._frames.feed(data)]
        before, self._packets = self._packets, []
        return before + received

    def next(self, kind: str) -> Any:
        """Return the next packet, which must be of this kind."""
        packets = self.packets()
        assert packets, f"no {kind} arrived"
        self._packets = packets[1:]
        assert packets[0].WhichOneof("kind") == kind, packets[0]
        return getattr(packets[0], kind)

    def called(self) -> Any:
        return self.next("call_request")

    def kinds(self) -> list[str]:
        return [packet.WhichOneof("kind") or "" for packet in self.packets()]

    def replies(self) -> list[Reply]:
        """Return all received packets, which must be replies."""
        return [_reply(packet) for packet in self.packets()]

    def failure(self) -> tuple[str, int]:
        """Return request id and code of the next packet, which must be a FULL with a failure."""
        reply = _reply_of(self.next("call_reply"))
        assert (reply.code, reply.type) == (500, 0)
        failure = read_failure(reply.data)
        assert failure.origin == "bus"
        return reply.request_id, failure.code

    @property
    def is_read(self) -> bool:
        return self.pipe.reading


def _reply(packet: pb.Packet) -> Reply:
    assert packet.WhichOneof("kind") == "call_reply", packet
    return _reply_of(packet.call_reply)


def _reply_of(reply: pb.CallReply) -> Reply:
    return Reply(reply.request_id, int(reply.code), int(reply.type), reply.data)
