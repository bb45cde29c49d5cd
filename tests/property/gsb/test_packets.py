"""The compiled reader and writer of packets, compared with protobuf's."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb import gsb_packets, sp
from polybus.dialects.gsb import gsb_pb2 as pb
from tests.rig.gsb_memory_peer import MAX_BYTES, MemoryPeer
from tests.rig.gsb_wire import StreamFrames
from tests.rig.memory_bus import MemoryBus

text = st.text(max_size=20)
body = st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes))
number = st.integers(0, 2**31 - 1)


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Return a call or reply as protobuf encodes it, sometimes damaged."""
    if draw(st.booleans()):
        call = pb.ServiceCallRequest(address=draw(text), request_id=draw(text), data=draw(body))
        payload = pb.Packet(service_call_request=call).SerializeToString()
    else:
        reply = pb.CallReply(request_id=draw(text), data=draw(body))
        reply.code = draw(st.one_of(st.just(500), number))  # type: ignore[assignment]
        reply.type = draw(st.integers(0, 3))  # type: ignore[assignment]
        payload = pb.Packet(call_reply=reply).SerializeToString()
    damage = draw(st.sampled_from(["none", "none", "cut", "extra", "flip", "twice"]))
    if damage == "cut":
        return payload[: draw(st.integers(0, len(payload)))]
    if damage == "extra":
        return payload + draw(st.binary(min_size=1, max_size=10))
    if damage == "flip" and payload:
        at = draw(st.integers(0, min(40, len(payload)) - 1))
        return payload[:at] + bytes([draw(st.integers(0, 255))]) + payload[at + 1 :]
    return payload * 2 if damage == "twice" else payload


@given(packets())
def test_packets_read_by_the_kernel_equal_protobufs(payload):
    fields = gsb_packets.read(b"??" + payload + b"?", 2, 2 + len(payload))
    if fields is None:
        return
    try:
        packet = pb.Packet.FromString(payload)
    except DecodeError:
        raise AssertionError("protobuf refuses the packet") from None
    if fields[0] == 6:
        call = packet.service_call_request
        assert fields[1:] == (call.address.encode(), call.request_id.encode(), call.data)
    else:
        reply = packet.call_reply
        assert fields[1:] == (reply.request_id.encode(), reply.code, reply.type, reply.data)
    assert packet.WhichOneof("kind") == {6: "service_call_request", 7: "call_reply"}[fields[0]]


ascii_text = st.text(st.characters(max_codepoint=127), max_size=200)


@given(ascii_text, ascii_text, body)
def test_common_calls_are_read_by_the_kernel(address, request_id, data):
    call = pb.ServiceCallRequest(address=address, request_id=request_id, data=data)
    payload = pb.Packet(service_call_request=call).SerializeToString()
    assert gsb_packets.read(payload, 0, len(payload)) is not None


@given(ascii_text, st.sampled_from([0, 500]), st.integers(0, 1), body)
def test_common_replies_are_read_by_the_kernel(request_id, code, kind, data):
    reply = pb.CallReply(request_id=request_id, data=data)
    reply.code, reply.type = code, kind
    payload = pb.Packet(call_reply=reply).SerializeToString()
    assert gsb_packets.read(payload, 0, len(payload)) == (7, request_id.encode(), code, kind, data)


identifier = st.text(st.characters(max_codepoint=127), min_size=1, max_size=200)
code = st.one_of(st.sampled_from([0, 500]), st.integers(-(2**31), 2**31 - 1))


@given(identifier, body, code, st.integers(0, 1), body, st.booleans())
def test_calls_and_replies_are_written_as_by_protobuf(
    request_id, asked, code, kind, answered, is_unix
):
    bus = MemoryBus()
    service, caller = (MemoryPeer(bus, is_unix=is_unix) for _ in range(2))
    service.register("a")
    caller.call("a/b", request_id, asked)
    frames = StreamFrames(service.form, MAX_BYTES)
    *_, written = frames.feed(bytes(service.pipe.taken))
    fields = {"request_id": "1", "data": asked, "caller": "local:anonymous", "address": "a/b"}
    assert written == pb.Packet(call_request=pb.CallRequest(**fields)).SerializeToString()
    service.reply("1", answered, partial=kind == 1, code=code)
    (written,) = StreamFrames(caller.form, MAX_BYTES).feed(bytes(caller.pipe.taken))
    reply = pb.CallReply(request_id=request_id, data=answered)
    reply.code, reply.type = code, kind
    assert written == pb.Packet(call_reply=reply).SerializeToString()


@given(st.binary(max_size=300), st.booleans())
def test_frames_are_encoded_as_by_the_codec(payload, ipc):
    assert gsb_packets.frame(ipc, payload) == sp.frame(payload, sp.Form(ipc))
