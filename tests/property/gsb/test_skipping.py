"""Oversized packets: the fields extracted while skipping equal those of the protobuf library."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.server.oversized_packet import CALL_REPLY, SERVICE_CALL, OversizedPacket
from polybus.dialects.gsb.ya import ya_pb2 as ya_pb
from polybus.errors import BadFrame

Fields = tuple[int, bytes, bytes, int]

text = st.text("aü/", max_size=5)
data = st.binary(max_size=300)
calls = st.builds(pb.ServiceCallRequest, address=text, request_id=text, data=data)
replies = st.builds(pb.CallReply, request_id=text, data=data, code=st.sampled_from([0, 500]))
ya_calls = st.builds(
    ya_pb.CallRequest, caller=text, address=text, request_id=text, data=data, no_reply=st.booleans()
)
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


def packets(call: st.SearchStrategy[Message]) -> st.SearchStrategy[bytes]:
    parts = st.one_of(
        kinds(SERVICE_CALL, call.map(lambda one: one.SerializeToString())),
        kinds(CALL_REPLY, replies.map(pb.CallReply.SerializeToString)),
        strays,
    )
    return st.lists(parts, min_size=1, max_size=3).map(b"".join)


# Replies have the same fields in both framings.
FRAMINGS = {"sp": (pb.Packet, packets(calls)), "ya": (ya_pb.Packet, packets(ya_calls))}


def extract(packet_type: type[Message], payload: bytes, step: int) -> Fields | None:
    skipping = OversizedPacket(len(payload), 1000, packet_type)
    try:
        for at in range(0, len(payload), step):
            skipping.feed(memoryview(payload)[at : at + step])
    except BadFrame:
        return None
    return skipping.kind, skipping.request_id, skipping.address, skipping.data_bytes


def expected(packet_type: type[Message], payload: bytes) -> Fields | None:
    try:
        packet = packet_type.FromString(payload)
    except DecodeError:
        return None
    kind = packet.WhichOneof("kind")
    if kind is None:
        return None
    message = getattr(packet, kind)
    address = getattr(message, "address", "").encode()
    number = packet_type.DESCRIPTOR.fields_by_name[kind].number
    return number, message.request_id.encode(), address, len(message.data)


@pytest.mark.parametrize("framing", FRAMINGS)
@given(source=st.data())
def test_extracted_fields_equal_protobufs(framing, source):
    packet_type, payloads = FRAMINGS[framing]
    payload, step = source.draw(payloads), source.draw(st.integers(1, 400))
    if payload:
        assert extract(packet_type, payload, step) == expected(packet_type, payload)


@pytest.mark.parametrize("framing", FRAMINGS)
@given(source=st.data())
def test_truncated_packets_are_read_as_by_protobuf(framing, source):
    packet_type, payloads = FRAMINGS[framing]
    payload = source.draw(payloads)
    cut = payload[: source.draw(st.integers(1, max(1, len(payload))))]
    if cut:
        assert extract(packet_type, cut, 1) == expected(packet_type, cut)
