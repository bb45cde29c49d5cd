"""dialects/gsb/client/packet_scanner against its oracle, on values and on errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.gsb import gsb_pb2 as pb
from polybus.dialects.gsb.client import packet_scanner as kernel
from tests.rig.oracle import gsb_client as oracle

CAP = 600

texts = st.text(max_size=20)
datas = st.binary(max_size=200)
numbers = st.integers(0, 2**31 - 1)


@st.composite
def packets(draw: Any) -> bytes:
    """Draw a packet of any kind that a bus may send, encoded by the library."""
    packet = pb.Packet()
    kind = draw(st.sampled_from(["call_reply", "call_request", "pong", "credit", "register_reply"]))
    message = getattr(packet, kind)
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        if draw(st.booleans()):
            values = {9: texts, 12: datas, 14: st.sampled_from([0, 1, 400, 500])}
            setattr(message, field.name, draw(values.get(field.type, numbers)))
    return packet.SerializeToString()


# Unusual packets: repeated, split and unknown fields, and bytes that protobuf refuses.
odd = st.one_of(
    st.binary(max_size=30),
    st.tuples(packets(), packets()).map(b"".join),
    st.tuples(packets(), st.binary(max_size=4)).map(b"".join),
    st.builds(
        lambda tag, inner: tag + bytes([len(inner)]) + inner,
        st.sampled_from([b"\x3a", b"\x82\x01", b"\xba\x00", b"\x32"]),
        st.binary(max_size=60)
        | st.lists(
            st.sampled_from(
                [b"\x0a\x01a", b"\x12\x01b", b"\x10\x01", b"\x18\x01", b"\x22\x02cd", b"\x1a\x01e",
                 b"\x0a\x02\xff\xfe", b"\x22\x02\xff\xfe", b"\x28\x07", b"\x8a\x00\x01x"]
            ),
            max_size=6,
        ).map(b"".join),
    ),
)  # fmt: skip


def frame(payload: bytes, is_ipc: bool) -> bytes:
    return b"\1" * is_ipc + len(payload).to_bytes(8, "big") + payload


def shown(packet: tuple[Any, ...]) -> Any:
    """Return a packet in the oracle's form. Kernel packets of type OTHER are not decoded yet."""
    return oracle.value(packet[1]) if packet[0] == kernel.OTHER else tuple(packet)


def scanned(data: bytes, start: int, end: int, is_ipc: bool) -> Any:
    try:
        consumed, found, wanted = kernel.scan(bytearray(data), start, end, is_ipc, CAP)
    except ValueError as error:
        return str(error)
    return consumed, [shown(one) for one in found], wanted


@given(st.lists(packets() | odd, max_size=6), st.booleans(), st.binary(max_size=12), st.data())
def test_scan_agrees_with_the_library(payloads, is_ipc, tail, data):
    stream = b"".join(frame(one, is_ipc) for one in payloads) + tail
    start = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(start, len(stream)))
    for low, high in ((0, len(stream)), (0, end), (start, end)):
        expected = oracle.scan(stream, low, high, is_ipc, CAP)
        assert scanned(stream, low, high, is_ipc) == expected


@given(packets() | odd, st.booleans())
def test_a_frame_alone_reads_the_same(payload, is_ipc):
    if payload:
        found = kernel.read_packet(bytearray(frame(payload, is_ipc)), is_ipc)
        assert shown(found) == oracle.value(payload)


@pytest.mark.parametrize("is_ipc", [False, True])
def test_large_data_alone_is_not_copied(is_ipc):
    written = bytearray(kernel.encode_reply(is_ipc, b"7", 0, True, bytes(100_000)))
    _, request_id, code, kind, data = kernel.read_packet(written, is_ipc)
    assert (request_id, code, kind, len(data)) == (b"7", 0, 1, 100_000)
    assert isinstance(data, memoryview)
    assert data.obj is written


@given(st.booleans(), texts, texts, datas)
def test_calls_are_written_as_the_library_does(is_ipc, address, request_id, data):
    given = (is_ipc, address.encode(), request_id.encode())
    assert kernel.encode_call(*given, data) == oracle.encode_call(*given, data)
    if data:
        assert kernel.encode_call(*given, len(data)) + data == oracle.encode_call(*given, data)


@given(st.booleans(), texts, st.sampled_from([0, 1, 500, 2**31 - 1]), st.booleans(), datas)
def test_replies_are_written_as_the_library_does(is_ipc, request_id, code, partial, data):
    given = (is_ipc, request_id.encode(), code, partial)
    assert kernel.encode_reply(*given, data) == oracle.encode_reply(*given, data)
    if data:
        assert kernel.encode_reply(*given, len(data)) + data == oracle.encode_reply(*given, data)


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, 300_000])
def test_sizes_around_the_steps_of_varints(size):
    data = b"d" * size
    assert kernel.encode_call(False, b"a", b"1", data) == oracle.encode_call(
        False, b"a", b"1", data
    )
    assert kernel.encode_reply(True, b"1", 0, True, data) == oracle.encode_reply(
        True, b"1", 0, True, data
    )


@pytest.mark.parametrize("size", [0, -1, 1 << 40])
def test_a_size_that_cannot_be(size):
    with pytest.raises(ValueError, match="size"):
        kernel.encode_call(False, b"a", b"1", size)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 99)])
def test_a_region_outside_of_the_buffer(start, end):
    with pytest.raises(ValueError, match="within the buffer"):
        kernel.scan(bytearray(10), start, end, False, CAP)
