"""rqueue's frames: values to bytes and back. No I/O, no clock, no randomness.

    frame  =  payload_length u32 | message_type u8 | payload        (big-endian)

A client sends PUBLISH, SUBSCRIBE, REMOVE and DEREGISTER; it receives
NOTIFICATION and PART. PUBLISH carries one whole NOTIFICATION or PART frame,
which subscribers get byte for byte.

One cap holds for every frame's payload_length, PUBLISH's own included. So with
a topic of T bytes and a cap of 2048, content is at most 2042 - T bytes; larger
content travels as PARTs with chunks of at most 2022 - T bytes.

The loops over many messages (`scan`, `encode_run`) are in client/notification_batch.
The whole format, with its reasons, is docs/spec/rqueue.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.dialects.rqueue.client.notification_batch import encode_publishes
from polybus.dialects.rqueue.limits import RqueueLimits
from polybus.errors import InvalidTopic, TooLarge, UsageError
from polybus.model.topic_name import MAX_NAME_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

PUBLISH = 0
SUBSCRIBE = 1
REMOVE = 2
DEREGISTER = 5
NOTIFICATION = 7
PART = 8

HEADER = struct.Struct(">IB")
PART_HEADER = struct.Struct(">16sHH")  # message id, index, count

MESSAGE_ID_BYTES = 16
MAX_PARTS = 65535  # `count` has 16 bits
DEFAULT_MAX_PAYLOAD = RqueueLimits().max_payload
MAX_MESSAGE_BYTES = RqueueLimits().max_message_bytes

# Bytes of PUBLISH's payload beside topic and content: the inner header and the length of
# the topic.
CONTENT_OVERHEAD = HEADER.size + 1
CHUNK_OVERHEAD = CONTENT_OVERHEAD + PART_HEADER.size
# A PART of one byte under the longest topic must fit.
MIN_MAX_PAYLOAD = CHUNK_OVERHEAD + MAX_NAME_BYTES + 1
MAX_MAX_PAYLOAD = 0xFFFFFFFF  # the length has 32 bits

# PARTs are written in buffers of about this size: large enough for few writes, small
# enough that a 64 MiB message is never in memory twice.
PARTS_BUFFER_BYTES = 256 * 1024


def topic_bytes(topic: str | bytes) -> bytes:
    """Return the topic as wire bytes; text becomes UTF-8. Raises InvalidTopic."""
    if isinstance(topic, str):
        raw = topic.encode("utf-8", "surrogateescape")
    elif isinstance(topic, bytes | bytearray | memoryview):
        raw = bytes(topic)
    else:  # bytes(5) would be five NUL bytes
        raise TypeError(f"a topic is text or bytes, not {type(topic).__name__}")
    if not raw:
        raise InvalidTopic("a topic has at least 1 byte")
    if len(raw) > MAX_NAME_BYTES:
        raise InvalidTopic(f"a topic has at most {MAX_NAME_BYTES} bytes, not {len(raw)}")
    return raw


def check_max_payload(max_payload: int) -> int:
    """Return the cap. Raises UsageError if it is out of range."""
    if not MIN_MAX_PAYLOAD <= max_payload <= MAX_MAX_PAYLOAD:
        raise UsageError(
            f"max_payload is {MIN_MAX_PAYLOAD} to {MAX_MAX_PAYLOAD} bytes, not {max_payload}"
        )
    return max_payload


def max_content(topic: bytes, max_payload: int = DEFAULT_MAX_PAYLOAD) -> int:
    """Return the size of the largest content of a NOTIFICATION."""
    return max_payload - CONTENT_OVERHEAD - len(topic)


def max_chunk(topic: bytes, max_payload: int = DEFAULT_MAX_PAYLOAD) -> int:
    """Return the size of the largest chunk of a PART."""
    return max_payload - CHUNK_OVERHEAD - len(topic)


def max_message(topic: bytes, max_payload: int = DEFAULT_MAX_PAYLOAD) -> int:
    """Return the size of the largest content that can be published, in PARTs."""
    return min(MAX_MESSAGE_BYTES, MAX_PARTS * max_chunk(topic, max_payload))


# --- frames a client sends ---------------------------------------------------


def subscribe(topic: bytes) -> bytes:
    return _frame(SUBSCRIBE, _prefixed(topic))


def remove(topic: bytes) -> bytes:
    return _frame(REMOVE, _prefixed(topic))


def deregister() -> bytes:
    return _frame(DEREGISTER, b"")


def publish(topic: bytes, content: Buffer, max_payload: int = DEFAULT_MAX_PAYLOAD) -> bytes:
    """Encode one PUBLISH frame. Raises TooLarge if the content needs PARTs."""
    try:
        return encode_publishes(topic, (content,), max_payload)
    except OverflowError as error:
        raise TooLarge(f"{error}: send it as PARTs") from None


def publish_part(topic: bytes, message_id: bytes, index: int, count: int, chunk: Buffer) -> bytes:
    """Encode one PART inside its PUBLISH frame."""
    return _frame(PUBLISH, part(topic, message_id, index, count, chunk))


def publish_in_parts(
    topic: bytes, content: Buffer, message_id: bytes, max_payload: int = DEFAULT_MAX_PAYLOAD
) -> Iterator[bytes]:
    """Yield a large message as PUBLISH frames of PARTs, in buffers of about 256 KiB.

    `message_id` is 16 random bytes, new for each message. The size is judged
    at once, before the first buffer is asked for.
    """
    view = memoryview(content).cast("B")
    if len(view) > max_message(topic, max_payload):
        limit = max_message(topic, max_payload)
        raise TooLarge(f"a message has at most {limit} bytes under this topic, not {len(view)}")
    return _parts_buffers(topic, view, message_id, max_chunk(topic, max_payload))


# --- frames a client receives ------------------------------------------------


def notification(topic: bytes, content: Buffer) -> bytes:
    return _frame(NOTIFICATION, _prefixed(topic) + bytes(content))


def part(topic: bytes, message_id: bytes, index: int, count: int, chunk: Buffer) -> bytes:
    if len(message_id) != MESSAGE_ID_BYTES:
        raise UsageError(f"a message id has {MESSAGE_ID_BYTES} bytes, not {len(message_id)}")
    if not 0 <= index < count <= MAX_PARTS:
        raise UsageError(f"no part {index} of {count}: counts are 1 to {MAX_PARTS}")
    head = PART_HEADER.pack(message_id, index, count)
    return _frame(PART, b"".join((_prefixed(topic), head, chunk)))


def _parts_buffers(
    topic: bytes, view: memoryview, message_id: bytes, chunk_bytes: int
) -> Iterator[bytes]:
    count = max(1, -(-len(view) // chunk_bytes))
    frame_bytes = HEADER.size + CHUNK_OVERHEAD + len(topic) + chunk_bytes
    per_buffer = max(1, PARTS_BUFFER_BYTES // frame_bytes)
    for first in range(0, count, per_buffer):
        yield b"".join(
            publish_part(
                topic, message_id, at, count, view[at * chunk_bytes : (at + 1) * chunk_bytes]
            )
            for at in range(first, min(count, first + per_buffer))
        )


def _frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind) + payload


def _prefixed(topic: bytes) -> bytes:
    return bytes((len(topic),)) + topic
