"""A plain version of dialects/rqueue/server/rqueue_framing, from docs/spec/rqueue.md.

`first_frame` reads a client's frame, `Encoding.encode` writes the server's frames to a
reader. Every rule of the spec's "Bad input" is one `raise` here, with the reason's stable
name.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

PUBLISH, SUBSCRIBE, REMOVE, DEREGISTER, NOTIFICATION, PART = 0, 1, 2, 5, 7, 8

HEADER_BYTES = 5
PART_HEADER_BYTES = 20  # message id, index, count
MAX_PARTS = 0xFFFF  # `count` is a u16
MAX_LENGTH = 0xFFFF_FFFF  # `payload_length` is a u32


class Bad(Exception):
    """The frame breaks a rule; the text is the reason's stable name."""


@dataclass(frozen=True)
class Published:
    """`inner` goes to readers of rqueue; a PART's body starts with its id, index and count."""

    size: int
    inner: bytes
    topic: bytes
    body: bytes
    is_part: bool


@dataclass(frozen=True)
class Control:
    """SUBSCRIBE, REMOVE or DEREGISTER."""

    size: int
    kind: int
    topic: bytes


def first_frame(data: bytes, max_payload: int) -> Published | Control | None:
    """Return the first frame of `data`, or None while it is incomplete.

    Raises Bad for an invalid header before the payload has arrived.
    """
    if len(data) < HEADER_BYTES:
        return None
    length, kind = struct.unpack(">IB", data[:HEADER_BYTES])
    _check_header(length, kind, max_payload)
    size = HEADER_BYTES + length
    if len(data) < size:
        return None
    payload = data[HEADER_BYTES:size]
    if kind == PUBLISH:
        return _published(size, payload)
    if kind == DEREGISTER or (kind == REMOVE and not payload):
        return Control(size, DEREGISTER, b"")
    return Control(size, kind, _topic_alone(payload))


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">IB", len(payload), kind) + payload


def named(topic: bytes) -> bytes:
    return bytes([len(topic)]) + topic


class Encoding:
    """How messages are written for readers that take payloads of up to `max_payload` bytes."""

    def __init__(self, number: int, max_payload: int) -> None:
        if not 0 <= number <= 31:
            raise ValueError("number")
        one_byte_in_a_part = frame(PART, named(bytes(255)) + bytes(PART_HEADER_BYTES) + b"x")
        if not len(one_byte_in_a_part) <= max_payload <= MAX_LENGTH:
            raise ValueError("max_payload")
        self.number = number
        self.max_payload = max_payload

    def encode(self, topic: bytes, body: bytes) -> bytes:
        """Return one NOTIFICATION, or PARTs that each fit into a PUBLISH, or nothing."""
        whole = frame(NOTIFICATION, named(topic) + body)
        if len(whole) <= self.max_payload:
            return whole
        empty_part = frame(PART, named(topic) + bytes(PART_HEADER_BYTES))
        room = self.max_payload - len(empty_part)
        chunks = [body[at : at + room] for at in range(0, len(body), room)]
        if len(chunks) > MAX_PARTS:
            return b""
        head = named(topic) + os.urandom(16)
        return b"".join(
            frame(PART, head + struct.pack(">HH", index, len(chunks)) + chunk)
            for index, chunk in enumerate(chunks)
        )

    def count(self, encoded: bytes, sent: int) -> int:
        """Messages whose (last) whole frame does not lie within the first `sent` bytes."""
        whole = _whole_frames(encoded)
        return sum(end > sent and not _is_early_part(one) for end, one in whole.items())


def _whole_frames(encoded: bytes) -> dict[int, bytes]:
    """Return the complete frames by the offset of their end."""
    found: dict[int, bytes] = {}
    start = 0
    while len(encoded) - start >= HEADER_BYTES:
        (length,) = struct.unpack(">I", encoded[start : start + 4])
        end = start + HEADER_BYTES + length
        if end <= len(encoded):
            found[end] = encoded[start:end]
        start = end
    return found


def _is_early_part(one: bytes) -> bool:
    """A PART that is not its message's last one."""
    payload = one[HEADER_BYTES:]
    if one[4] != PART or not payload:
        return False
    head = payload[1 + payload[0] :][:PART_HEADER_BYTES]
    if len(head) < PART_HEADER_BYTES:
        return False
    index, count = struct.unpack(">HH", head[16:])
    return bool(index + 1 < count)


def _check_header(length: int, kind: int, max_payload: int) -> None:
    if length > max_payload:
        raise Bad("payload_too_large")
    if kind not in (PUBLISH, SUBSCRIBE, REMOVE, DEREGISTER, NOTIFICATION, PART):
        raise Bad("unknown_type")
    if kind in (NOTIFICATION, PART):
        raise Bad("not_for_server")
    if kind == DEREGISTER and length > 0:
        raise Bad("deregister_not_empty")


def _topic_alone(payload: bytes) -> bytes:
    topic, rest = _topic_and_rest(payload)
    if rest:
        raise Bad("trailing_bytes")
    return topic


def _published(size: int, inner: bytes) -> Published:
    if len(inner) < HEADER_BYTES:
        raise Bad("inner_length")
    length, kind = struct.unpack(">IB", inner[:HEADER_BYTES])
    if length != len(inner) - HEADER_BYTES:
        raise Bad("inner_length")
    if kind not in (NOTIFICATION, PART):
        raise Bad("inner_type")
    topic, body = _topic_and_rest(inner[HEADER_BYTES:])
    if kind == PART:
        _check_part(body)
    return Published(size, inner, topic, body, kind == PART)


def _check_part(body: bytes) -> None:
    if len(body) < PART_HEADER_BYTES:
        raise Bad("part_length")
    _message_id, index, count = struct.unpack(">16sHH", body[:PART_HEADER_BYTES])
    if count == 0 or index >= count:
        raise Bad("part_index")


def _topic_and_rest(payload: bytes) -> tuple[bytes, bytes]:
    size = payload[0] if payload else 0
    topic, rest = payload[1 : 1 + size], payload[1 + size :]
    if size == 0 or len(topic) < size:
        raise Bad("topic_length")
    return topic, rest
