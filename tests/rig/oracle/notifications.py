"""A plain version of dialects/rqueue/client/notification_batch, from docs/spec/rqueue.md.

`scan` returns everything in one list, in the order of the wire, so that a test
can see where PARTs lay among the messages; the kernel keeps the two apart.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class Notification:
    topic: bytes
    content: bytes


@dataclass(frozen=True)
class Part:
    topic: bytes
    message_id: bytes
    index: int
    count: int
    chunk: bytes


class Bad(Exception):
    """The frame breaks a rule; the text is the reason's stable name."""


def scan(
    data: bytes, start: int, end: int, max_payload: int
) -> tuple[int, list[Notification | Part], str | None]:
    """Return the bytes consumed, the frames read, and the next frame's error or None."""
    rest = data[start:end]
    found: list[Notification | Part] = []
    consumed = 0
    while len(rest) >= 5:
        length, kind = struct.unpack(">IB", rest[:5])
        if length > max_payload:
            return consumed, found, "payload_too_large"
        payload = rest[5 : 5 + length]
        if len(payload) < length:
            break
        try:
            if kind == 7:
                found.append(_notification(payload))
            elif kind == 8:
                found.append(_part(payload))
        except Bad as bad:
            return consumed, found, str(bad)
        consumed += 5 + length
        rest = rest[5 + length :]
    return consumed, found, None


def publishes(topic: bytes, contents: Sequence[Buffer], max_payload: int) -> bytes:
    """PUBLISH frames, one for each content; OverflowError if one does not fit."""
    if not 1 <= len(topic) <= 255:
        raise ValueError("topic")
    return b"".join(_publish(topic, bytes(memoryview(one)), max_payload) for one in contents)


def _publish(topic: bytes, content: bytes, max_payload: int) -> bytes:
    inner_payload = bytes([len(topic)]) + topic + content
    inner = struct.pack(">IB", len(inner_payload), 7) + inner_payload
    if len(inner) > max_payload:
        raise OverflowError("content")
    return struct.pack(">IB", len(inner), 0) + inner


def _notification(payload: bytes) -> Notification:
    topic, content = _topic_and_rest(payload)
    return Notification(topic, content)


def _part(payload: bytes) -> Part:
    topic, rest = _topic_and_rest(payload)
    if len(rest) < 20:
        raise Bad("part_length")
    message_id, index, count = struct.unpack(">16sHH", rest[:20])
    if index >= count:
        raise Bad("part_index")
    return Part(topic, message_id, index, count, rest[20:])


def _topic_and_rest(payload: bytes) -> tuple[bytes, bytes]:
    size = payload[0] if payload else 0
    topic, rest = payload[1 : 1 + size], payload[1 + size :]
    if size == 0 or len(topic) < size:
        raise Bad("topic_length")
    return topic, rest
