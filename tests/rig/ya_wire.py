"""A client of the deployed GSB framing, written from ya.proto and the framing rule alone.

It has its own protobuf encoder, for the few forms that those packets have, and imports nothing of
polybus. A packet is its kind's number and a dict of fields by number:

    frame(CALL, {2: "/local/greeter", 3: "17", 4: b"data"})
    number, fields = Frames().feed(data)[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

HELLO, REGISTER, REGISTER_REPLY, UNREGISTER, UNREGISTER_REPLY = 1, 2, 3, 4, 5
CALL, REPLY = 6, 7
SUBSCRIBE, SUBSCRIBE_REPLY, UNSUBSCRIBE, UNSUBSCRIBE_REPLY = 8, 9, 10, 11
BROADCAST, BROADCAST_REPLY, PING, PONG = 12, 13, 14, 15
FULL, PARTIAL = 0, 1
VARINT, LENGTH = 0, 2

Value = int | bytes | str


class Packet(NamedTuple):
    kind: int
    fields: dict[int, int | bytes]

    def text(self, number: int) -> str:
        value = self.fields.get(number, b"")
        assert isinstance(value, bytes)
        return value.decode()

    def data(self, number: int) -> bytes:
        value = self.fields.get(number, b"")
        assert isinstance(value, bytes)
        return value

    def number(self, number: int) -> int:
        value = self.fields.get(number, 0)
        assert isinstance(value, int)
        return value


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | LENGTH) + varint(len(data)) + data


def frame(kind: int, fields: Mapping[int, Value] | None = None) -> bytes:
    inner = b"".join(field(number, value) for number, value in (fields or {}).items() if value)
    payload = field(kind, inner)
    return len(payload).to_bytes(4, "big") + payload


def hello(instance: bytes = b"") -> bytes:
    return frame(HELLO, {1: "test", 2: "0.1", 3: instance})


def call(address: str, request_id: str, data: bytes = b"", no_reply: int = 0) -> bytes:
    return frame(CALL, {1: "me", 2: address, 3: request_id, 4: data, 5: no_reply})


def reply(request_id: str, data: bytes = b"", code: int = 0, kind: int = FULL) -> bytes:
    return frame(REPLY, {1: request_id, 2: code, 3: kind, 4: data})


def parse_fields(data: bytes) -> dict[int, int | bytes]:
    fields: dict[int, int | bytes] = {}
    at = 0
    while at < len(data):
        tag, at = parse_varint(data, at)
        value, at = parse_varint(data, at)
        if tag & 7 == LENGTH:
            assert at + value <= len(data)
            fields[tag >> 3] = data[at : at + value]
            at += value
        else:
            assert tag & 7 == VARINT
            fields[tag >> 3] = value
    return fields


def parse_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


class Frames:
    """Split received bytes into packets."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[Packet]:
        self._held += data
        packets = []
        while len(self._held) >= 4:
            size = int.from_bytes(self._held[:4], "big")
            if len(self._held) < 4 + size:
                break
            ((kind, inner),) = parse_fields(self._held[4 : 4 + size]).items()
            assert isinstance(inner, bytes)
            packets.append(Packet(kind, parse_fields(inner)))
            self._held = self._held[4 + size :]
        return packets
