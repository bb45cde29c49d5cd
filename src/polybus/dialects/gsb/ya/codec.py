"""Packets of the deployed framing: values to bytes and back. No I/O, no clock.

A frame is a length (4 bytes, big-endian) and one protobuf `Packet` (ya.proto).

The failure of a call is a text there, with a code that is 400 or 500: its clients end their
connection when they get another code, or a text that is not UTF-8. On the rest of the bus it is a
map (dialects/gsb/codec.py). The two functions at the end translate; a text that came from that
protocol returns to it unchanged.

docs/spec/gsb.md has the whole format, with its reasons.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from polybus.dialects.gsb import codec
from polybus.dialects.gsb.service_address import StatusCode
from polybus.dialects.gsb.ya import ya_pb2 as pb
from polybus.model.limits import KIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

LENGTH = struct.Struct(">I")
NO_HELLO = "no_hello"  # the first packet is not a hello
BAD_HELLO = "bad_hello"
MAX_INSTANCE_BYTES = 255
# Of a failure's text. Longer ones are cut: they are for people.
MAX_FAILURE_BYTES = 64 * KIB
# Failures that are the request's fault.
REFUSALS = frozenset(
    {
        StatusCode.BAD_REQUEST,
        StatusCode.DENIED,
        StatusCode.NOT_FOUND,
        StatusCode.CONFLICT,
        StatusCode.TOO_LARGE,
    }
)


def frame(packet: pb.Packet) -> bytes:
    payload = packet.SerializeToString()
    return LENGTH.pack(len(payload)) + payload


def status_packet(kind: str, code: int, message: str) -> pb.Packet:
    """Return the reply to a request without an id. A code that it does not have becomes 400."""
    packet = pb.Packet()
    reply = codec.begin_status(packet, kind)
    fields = reply.DESCRIPTOR.fields_by_name
    known = fields["code"].enum_type.values_by_number
    reply.code = code if code in known else StatusCode.BAD_REQUEST
    if "message" in fields:
        reply.message = message
    return packet


def encode_failure(data: Buffer) -> tuple[int, bytes]:
    """Return the code and the text of a failure that the bus has as a map, or in another form."""
    data = bytes(memoryview(data)[:MAX_FAILURE_BYTES])
    try:
        failure = codec.unpack(data)
    except (ValueError, TypeError):
        failure = None
    if not isinstance(failure, dict) or not isinstance(failure.get("message"), str):
        return pb.CALL_FAILURE, data.decode("utf-8", "backslashreplace").encode()
    code, text = failure.get("code"), failure["message"]
    if failure.get("origin") == codec.Origin.BUS:
        text = f"{code} {text}"
    is_refusal = isinstance(code, int) and code in REFUSALS
    return pb.CALL_BAD_REQUEST if is_refusal else pb.CALL_FAILURE, text.encode()


def decode_failure(code: int, data: bytes) -> bytes:
    """Return the map of a service's failure that came as a text."""
    text = data[:MAX_FAILURE_BYTES].decode("utf-8", "backslashreplace")
    status = code if code == StatusCode.BAD_REQUEST else StatusCode.FAILURE
    return codec.pack_failure(status, text, codec.Origin.SERVICE)
