"""Oversized packets: the fields extracted while skipping equal those of the protobuf library."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.server.oversized_packet import OversizedPacket
from polybus.errors import BadFrame

Fields = tuple[str, bytes, bytes, int]

text = st.text("aü/", max_size=5)
data = st.binary(max_size=300)
calls = st.builds(pb.ServiceCallRequest, address=text, request_id=text, data=data)
replies = st.builds(pb.CallReply, request_id=text, data=data, code=st.sampled_from([0, 500]))
# Unknown fields, and known ones of another wire type; at both levels, in any order.
unknown = st.sampled_from(
    [b"\x9a\x06\x02hi", b"\xa0\x06\x05", b"\xa5\x06four", b"\xa1\x06eight..."]
)
odd = st.sampled_from([b"\x08\x01", b"\x15four", b"\x30\x05", b"\x39eight..."])
strays = st.lists(st.one_of(unknown, odd), max_size=2).map(b"".join)


def field(number: int, inner: bytes) -> bytes:
    out, size = bytearray([number << 3 | 2]), len(inner)
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(out) + bytes([size]) + inner


def kinds(number: int, messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    inside = st.lists(st.one_of(messages, strays), min_size=1, max_size=3).map(b"".join)
    return inside.map(lambda inner: field(number, inner))


packets = st.lists(
    st.one_of(
        kinds(6, calls.map(pb.ServiceCallRequest.SerializeToString)),
        kinds(7, replies.map(pb.CallReply.SerializeToString)),
        strays,
    ),
    min_size=1,
    max_size=3,
).map(b"".join)


def extract(payload: bytes, step: int) -> Fields | None:
    skipping = OversizedPacket(len(payload), 1000)
    try:
        for at in range(0, len(payload), step):
            skipping.feed(memoryview(payload)[at : at + step])
    except BadFrame:
        return None
    kind = {6: "service_call_request", 7: "call_reply"}[skipping.kind]
    return kind, skipping.request_id, skipping.address, skipping.data_bytes


def expected(payload: bytes) -> Fields | None:
    try:
        packet = pb.Packet.FromString(payload)
    except DecodeError:
        return None
    kind = packet.WhichOneof("kind")
    if kind is None:
        return None
    message = getattr(packet, kind)
    address = getattr(message, "address", "").encode()
    return kind, message.request_id.encode(), address, len(message.data)


@given(packets, st.integers(1, 400))
def test_extracted_fields_equal_protobufs(payload, step):
    if payload:
        assert extract(payload, step) == expected(payload)


@given(packets, st.data())
def test_truncated_packets_are_read_as_by_protobuf(payload, source):
    cut = payload[: source.draw(st.integers(1, max(1, len(payload))))]
    if cut:
        assert extract(cut, 1) == expected(cut)
