"""Packets of the deployed framing against recorded bytes, and failures in both protocols."""

from __future__ import annotations

import pytest

from polybus.dialects.gsb import codec as gsb_codec
from polybus.dialects.gsb.service_address import StatusCode
from polybus.dialects.gsb.ya import codec
from polybus.dialects.gsb.ya import ya_pb2 as pb
from polybus.errors import BadFrame
from tests.rig import ya_wire
from tests.vectors import ya as golden


@pytest.mark.parametrize("vector", golden.VECTORS, ids=str)
def test_packets_survive_a_round_trip(vector):
    packet = gsb_codec.decode_as(pb.Packet, vector.payload)
    assert packet.WhichOneof("kind") == vector.kind
    assert codec.frame(packet) == vector.frame


@pytest.mark.parametrize("vector", golden.VECTORS, ids=str)
def test_encoder_of_the_rig_writes_the_same_bytes(vector):
    (packet,) = ya_wire.Frames().feed(vector.frame)
    assert ya_wire.frame(packet.kind, packet.fields) == vector.frame


def test_there_is_a_vector_of_each_kind():
    kinds = {field.name: field.number for field in pb.Packet.DESCRIPTOR.fields}
    assert list(kinds.values()) == list(range(1, 16))
    assert {vector.kind for vector in golden.VECTORS} == set(kinds)


def test_call_has_the_recorded_fields():
    packet = pb.Packet.FromString(golden.BY_NAME["call_request, no reply"].payload).call_request
    assert (packet.caller, packet.address, packet.request_id) == ("me", "/public/market", "17")
    assert (packet.data, packet.no_reply) == (b"x", True)


@pytest.mark.parametrize(
    "payload", [b"", b"\xff\xff", b"\x0a\x05x", b"\x98\x06\x01", b"\x82\x01\0"]
)
def test_payload_that_is_not_a_packet_is_refused(payload):
    """Empty, noise, truncated, and of kinds beyond 15."""
    with pytest.raises(BadFrame) as caught:
        gsb_codec.decode_as(pb.Packet, payload)
    assert caught.value.reason == gsb_codec.NO_PACKET


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("register_request", {0, 400, 409}),
        ("unregister_request", {0, 404}),
        ("subscribe_request", {0, 400}),
        ("unsubscribe_request", {0, 404}),
        ("broadcast_request", {0, 400}),
    ],
)
def test_a_reply_has_a_code_that_its_clients_know(kind, known):
    for code in (StatusCode.OK, StatusCode.BAD_REQUEST, StatusCode.DENIED, StatusCode.CONFLICT):
        if kind.startswith("un") and code:
            code = StatusCode.NOT_FOUND  # the only failure of these
        packet = codec.status_packet(kind, code, "why")
        reply = getattr(packet, kind.replace("request", "reply"))
        assert reply.code in known
        assert bool(reply.code) == bool(code)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (400, 400),
        (403, 400),
        (404, 400),
        (409, 400),
        (413, 400),
        (499, 500),
        (503, 500),
        (504, 500),
    ],
)
def test_failures_of_the_bus_have_a_code_and_a_text(code, expected):
    data = gsb_codec.pack_failure(code, "why", gsb_codec.Origin.BUS)
    assert codec.encode_failure(data) == (expected, f"{code} why".encode())


def test_failures_of_services_keep_their_text():
    data = gsb_codec.pack_failure(500, "café", gsb_codec.Origin.SERVICE)
    assert codec.encode_failure(data) == (500, "café".encode())


@pytest.mark.parametrize("code", [400, 500])
@pytest.mark.parametrize("text", [b"", b"boom", "café".encode(), b"\x80 no UTF-8"])
def test_text_returns_unchanged_if_it_is_utf_8(code, text):
    expected = text.decode(errors="backslashreplace").encode()
    assert codec.encode_failure(codec.decode_failure(code, text)) == (code, expected)


@pytest.mark.parametrize(
    "data", [b"", b"\x83", b"\x81\x90\x01", gsb_codec.pack([1, 2]), gsb_codec.pack({"code": []})]
)
def test_failure_of_any_form_becomes_a_text(data):
    code, text = codec.encode_failure(data)
    assert code == 500
    text.decode()


def test_long_texts_are_cut():
    long = b"x" * (2 * codec.MAX_FAILURE_BYTES)
    assert len(codec.encode_failure(long)[1]) == codec.MAX_FAILURE_BYTES
    assert len(codec.decode_failure(500, long)) < codec.MAX_FAILURE_BYTES + 100
