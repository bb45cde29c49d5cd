"""A plain version of dialects/gsb/client/packet_scanner, on the protobuf library.

Packets are shown as values: a tuple for a call or a reply, the message itself for
all else, `NO_PACKET` for bytes that the library refuses.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from polybus.dialects.gsb import gsb_pb2 as pb

NO_PACKET = "no packet"


def scan(
    data: bytes, start: int, end: int, is_ipc: bool, max_packet_bytes: int
) -> tuple[int, list[Any], int] | str:
    """Return the bytes consumed, the packets and the size of an incomplete frame, or an error."""
    rest, header = data[start:end], 9 if is_ipc else 8
    found: list[Any] = []
    consumed = 0
    while len(rest) >= header:
        if is_ipc and rest[0] != 1:
            return "ipc_mark"
        size = int.from_bytes(rest[header - 8 : header], "big")
        if size > max_packet_bytes:
            return "packet_too_large"
        if len(rest) < header + size:
            return consumed, found, header + size
        found.append(value(rest[header : header + size]))
        consumed += header + size
        rest = rest[header + size :]
    return consumed, found, 0


def value(payload: bytes) -> Any:
    try:
        packet = pb.Packet.FromString(payload)
    except DecodeError:
        return NO_PACKET
    if packet.WhichOneof("kind") == "call_reply":
        reply = packet.call_reply
        return (7, reply.request_id.encode(), reply.code, reply.type, reply.data)
    if packet.WhichOneof("kind") == "call_request":
        call = packet.call_request
        return (16, call.request_id.encode(), call.data, call.caller, call.address)
    return packet


def encode_call(is_ipc: bool, address: bytes, request_id: bytes, data: bytes) -> bytes:
    packet = pb.Packet()
    packet.service_call_request.SetInParent()
    packet.service_call_request.address = address.decode()
    packet.service_call_request.request_id = request_id.decode()
    packet.service_call_request.data = data
    return _frame(is_ipc, packet)


def encode_reply(is_ipc: bool, request_id: bytes, code: int, partial: bool, data: bytes) -> bytes:
    packet = pb.Packet()
    packet.call_reply.SetInParent()
    packet.call_reply.request_id = request_id.decode()
    packet.call_reply.code = code  # type: ignore[assignment]
    packet.call_reply.type = pb.PARTIAL if partial else pb.FULL
    packet.call_reply.data = data
    return _frame(is_ipc, packet)


def _frame(is_ipc: bool, packet: pb.Packet) -> bytes:
    payload = packet.SerializeToString()
    return b"\1" * is_ipc + len(payload).to_bytes(8, "big") + payload
