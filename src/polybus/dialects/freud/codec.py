"""Freud's frames: values to bytes and back. No I/O, no clock, no randomness.

    request  =  type u32 | length u32 | payload                     (little-endian)
    answer   =  code u32 | length u32 | payload

Lengths count the payload alone. Answers come in the order of the requests and do not
name their request, so a client must remember its requests.

The loops over many requests and answers are compiled: server/request_scanner reads
requests, server/answer_encoder writes answers, client/answer_batch does both for clients.
The whole format, with its reasons, is docs/spec/freud.md.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from enum import IntEnum
from typing import TYPE_CHECKING

from polybus.dialects.freud.client.answer_batch import encode_produces
from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server import request_scanner as requests
from polybus.errors import BadFrame, TooLarge, UsageError
from polybus.model import topic_name
from polybus.model.limits import LARGEST_MESSAGE_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer


class RequestType(IntEnum):
    CREATE_TOPIC = 0
    DELETE_TOPIC = 1
    SUBSCRIBE = 2
    UNSUBSCRIBE = 3
    PRODUCE = 4
    GET_MESSAGE = 5
    LIST_TOPICS = 6
    COUNT_SUBSCRIBERS = 7
    GET_RECORD = 8


class Code(IntEnum):
    """The code of an answer. `label` is its name in messages."""

    OK = 0
    NOTHING_HAPPENED = 1
    NO = 2
    DOESNT_EXIST = 3
    MALFORMED_REQUEST = 4
    SERVER_ERROR = 5

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = {
    Code.OK: "Ok",
    Code.NOTHING_HAPPENED: "Nothing Happened",
    Code.NO: "No",
    Code.DOESNT_EXIST: "Doesn't Exist",
    Code.MALFORMED_REQUEST: "Malformed Request",
    Code.SERVER_ERROR: "Server Error",
}

# The text of a Malformed Request answer, by the stable name of the broken rule.
MALFORMED_TEXTS: dict[str, str] = {
    requests.TOO_LARGE: "the request is longer than max_frame_bytes allows",
    requests.TOO_SHORT: "the length must count the header's 8 bytes on this listener",
    requests.UNKNOWN_TYPE: "no request has this type",
    requests.TRUNCATED: "the payload is shorter than the request needs",
    requests.TRAILING_BYTES: "there are bytes behind the request's last field",
    requests.BAD_NAME: "no topic can have this name",
}

HEADER = struct.Struct("<II")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
RECORD_HEADER = struct.Struct("<QQI")  # message id, timestamp in ns, flags

SUBSCRIBER_ID_BYTES = 16
MAX_U32 = 0xFFFF_FFFF  # lengths have 32 bits
MAX_BLOCKING_S = 0x7FFF_FFFF  # as does max_blocking_secs, with its sign

NOTICE_PREFIX = b"\0FREUD\0DELETED\0"
# In the answer to a Get Message, before a body that starts with `\0FREUD\0`: so no body can
# be taken for a notice, and no content is reserved.
BODY_PREFIX = b"\0FREUD\0BODY\0"
NOTICE_FLAG = 1  # of a record: the deletion notice, not a message

DEFAULT_MAX_FRAME_BYTES = FreudLimits().max_frame_bytes
# A Produce of one byte under the longest name must fit.
MIN_MAX_FRAME_BYTES = U32.size + topic_name.MAX_NAME_BYTES + 1
# Offsets in compiled columns are signed 32-bit integers.
MAX_MAX_FRAME_BYTES = 0x7FFF_FFFF
# Answers may be longer than requests: the largest message of another dialect, in a record.
DEFAULT_MAX_ANSWER_BYTES = LARGEST_MESSAGE_BYTES + RECORD_HEADER.size


def check_max_frame_bytes(max_frame_bytes: int) -> int:
    """Return the cap. Raises UsageError if it is out of range."""
    if not MIN_MAX_FRAME_BYTES <= max_frame_bytes <= MAX_MAX_FRAME_BYTES:
        raise UsageError(
            f"max_frame_bytes is {MIN_MAX_FRAME_BYTES} to {MAX_MAX_FRAME_BYTES},"
            f" not {max_frame_bytes}"
        )
    return max_frame_bytes


def max_body(name: bytes, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> int:
    """Return the size of the largest body of a Produce to this topic."""
    return max_frame_bytes - U32.size - len(name)


def deletion_notice(name: bytes) -> bytes:
    """Return the body of the deletion notice of a topic."""
    return NOTICE_PREFIX + name


# --- requests ----------------------------------------------------------------
# Names are bytes that passed `polybus.model.topic_name.check`.


def create_topic(name: bytes) -> bytes:
    return _frame(RequestType.CREATE_TOPIC, _prefixed(name))


def delete_topic(name: bytes) -> bytes:
    return _frame(RequestType.DELETE_TOPIC, _prefixed(name))


def subscribe(name: bytes) -> bytes:
    return _frame(RequestType.SUBSCRIBE, _prefixed(name))


def unsubscribe(subscriber: bytes) -> bytes:
    return _frame(RequestType.UNSUBSCRIBE, check_subscriber(subscriber))


def produce(name: bytes, body: Buffer, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> bytes:
    """Encode one Produce request. Raises TooLarge if the body does not fit."""
    try:
        return encode_produces(name, (body,), max_frame_bytes)
    except OverflowError as error:
        raise TooLarge(str(error)) from None


def list_topics() -> bytes:
    return _frame(RequestType.LIST_TOPICS, b"")


def count_subscribers(name: bytes) -> bytes:
    return _frame(RequestType.COUNT_SUBSCRIBERS, _prefixed(name))


# --- payloads of Ok answers --------------------------------------------------
# server/answer_encoder puts headers before them, and encodes the answers to Produce and Get.


def escaped_body(body: bytes) -> bytes:
    """Encode the payload of a Get Message whose message starts with `\\0FREUD\\0`."""
    return BODY_PREFIX + body


def topic_list(names: Collection[bytes]) -> bytes:
    """Encode the payload of the answer to List Topics."""
    return b"".join((U32.pack(len(names)), *map(_prefixed, names)))


def subscriber_count(count: int) -> bytes:
    """Encode the payload of the answer to Count Subscribers."""
    return U32.pack(count)


# The readers raise BadFrame if the payload does not fit the request.


def read_subscriber(payload: bytes) -> bytes:
    if len(payload) != SUBSCRIBER_ID_BYTES:
        raise BadFrame("subscriber_id")
    return payload


def read_message_id(payload: bytes) -> int:
    if len(payload) != U64.size:
        raise BadFrame("message_id")
    return int(U64.unpack(payload)[0])


def read_count(payload: bytes) -> int:
    if len(payload) != U32.size:
        raise BadFrame("count")
    return int(U32.unpack(payload)[0])


def read_topics(payload: bytes) -> list[bytes]:
    try:
        (count,) = U32.unpack_from(payload)
        found, at = [], U32.size
        for _ in range(count):
            (size,) = U32.unpack_from(payload, at)
            at += U32.size + size
            found.append(payload[at - size : at])
    except struct.error:
        raise BadFrame("topics") from None
    if at != len(payload):
        raise BadFrame("topics")
    return found


def _frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


def _prefixed(name: bytes) -> bytes:
    return U32.pack(len(name)) + name


def check_subscriber(subscriber: bytes) -> bytes:
    """Return the subscriber id. Raises UsageError if it cannot be one."""
    if len(subscriber) != SUBSCRIBER_ID_BYTES:
        raise UsageError(f"a subscriber id has {SUBSCRIBER_ID_BYTES} bytes, not {len(subscriber)}")
    return subscriber
