"""Freud's frames as bytes, written out from docs/spec/freud.md.

They are not taken from polybus itself: a benchmark that checks every byte should not learn from the
code it checks what the bytes are.
"""

import struct

from bench.freud.contract import NUMBER_BYTES, SIZE
from bench.freud.dialogues import Counter

CREATE, DELETE, SUBSCRIBE, UNSUBSCRIBE, PRODUCE, GET = range(6)
OK = 0
HEADER_BYTES = 8
ID_BYTES = 8
FOR_EVER = -1


def frame(number: int, payload: bytes = b"") -> bytes:
    return struct.pack("<II", number, len(payload)) + payload


def named(topic: bytes) -> bytes:
    return struct.pack("<I", len(topic)) + topic


def produce(topic: bytes, body: bytes) -> bytes:
    return frame(PRODUCE, named(topic) + body)


def produced(message_id: int = 0) -> bytes:
    return frame(OK, struct.pack("<Q", message_id))


def get(subscriber: bytes) -> bytes:
    return frame(GET, subscriber + struct.pack("<i", FOR_EVER))


def got(body: bytes) -> bytes:
    return frame(OK, body)


# Where the counters are: in a Produce from its end, as the name is in front of the body.
NUMBER = Counter(HEADER_BYTES, NUMBER_BYTES)  # in the answer to a Get
MESSAGE_ID = Counter(HEADER_BYTES, ID_BYTES)  # in the answer to a Produce


def number_in(message: bytes) -> Counter:
    return Counter(len(message) - SIZE, NUMBER_BYTES)
