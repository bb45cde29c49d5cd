"""Frames that rqueue clients send, good and bad, by hand and by chance."""

from __future__ import annotations

import struct

from hypothesis import strategies as st

SMALL_CAP = 282  # the smallest there may be: bodies over it are cheap
MIDDLE_CAP = 400
LARGE_CAP = 2048

# Names that a hash table or a comparison could confuse. They differ in size, in the first byte
# or in the last one, and have sizes around the four and eight bytes that hashing and comparing
# take at a time.
TOPICS = (
    *(b"a", b"b", b"ab", b"\x00\x00"),
    *(b"abcde", b"abcdX", b"Xbcde"),
    *(b"12345678", b"123456789", b"X23456789"),
    *(b"t" * 255, b"t" * 254 + b"X", b"X" + b"t" * 254),
)

# --- by hand -----------------------------------------------------------------


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">IB", len(payload), kind) + payload


def named(topic: bytes) -> bytes:
    return bytes([len(topic)]) + topic


def notification(topic: bytes, body: bytes) -> bytes:
    return frame(7, named(topic) + body)


def part(
    topic: bytes, index: int, count: int, chunk: bytes, message_id: bytes = bytes(16)
) -> bytes:
    return frame(8, named(topic) + message_id + struct.pack(">HH", index, count) + chunk)


def publish(topic: bytes, body: bytes) -> bytes:
    return frame(0, notification(topic, body))


def publish_part(topic: bytes, index: int, count: int, chunk: bytes) -> bytes:
    return frame(0, part(topic, index, count, chunk))


def subscribe(topic: bytes) -> bytes:
    return frame(1, named(topic))


def remove(topic: bytes) -> bytes:
    return frame(2, named(topic))


DEREGISTER = frame(5, b"")
EMPTY_REMOVE = frame(2, b"")  # taken as DEREGISTER


def filler(size: int) -> bytes:
    """Return a body without repeated neighbouring parts, so that a wrong cut shows."""
    return bytes(at * at % 251 for at in range(size))


# --- by chance ---------------------------------------------------------------

topics = st.integers(0, 15).flatmap(
    lambda chance: st.sampled_from(TOPICS) if chance else st.binary(min_size=1, max_size=255)
)


def publish_of_length(topic: bytes, payload_length: int) -> bytes:
    """A PUBLISH whose own payload has this length, or is as short as the topic lets it be."""
    return publish(topic, filler(max(0, payload_length - 6 - len(topic))))


def publishes(max_payload: int) -> st.SearchStrategy[bytes]:
    """Small ones and ones just under the cap."""
    small = st.builds(publish, topics, st.binary(max_size=20))
    large = st.builds(publish_of_length, topics, st.integers(max_payload - 40, max_payload))
    return small | small | large


parts = st.tuples(st.integers(0, 65534), st.integers(1, 65535)).flatmap(
    lambda pair: st.builds(
        publish_part,
        topics,
        st.just(min(pair[0], pair[1] - 1)),
        st.just(pair[1]),
        st.binary(max_size=1),
    )
)
controls = (
    st.builds(subscribe, topics)
    | st.builds(remove, topics)
    | st.sampled_from([DEREGISTER, EMPTY_REMOVE])
)


def frames(max_payload: int) -> st.SearchStrategy[bytes]:
    few = publishes(max_payload)
    return few | few | parts | controls


def damaged(good: bytes, at: int, kind: str, byte: int) -> bytes:
    at %= len(good)
    return {
        "set": good[:at] + bytes([byte]) + good[at + 1 :],
        "cut": good[:at],
        "grow": good[:at] + bytes([byte]) + good[at:],
        "drop": good[:at] + good[at + 1 :],
    }[kind]


def damages(max_payload: int) -> st.SearchStrategy[bytes]:
    """Frames with one error, mostly in the header, where every byte has a meaning."""
    too_large = st.builds(publish_of_length, topics, st.just(max_payload + 1))
    numbers = st.integers(0, 2) | st.just(65535)
    misnumbered = st.builds(publish_part, topics, numbers, numbers, st.binary(max_size=3))
    mangled = st.builds(
        damaged,
        frames(max_payload),
        st.sampled_from((3, 4, 8, 9, 10, 11)) | st.integers(0, 40),
        st.sampled_from(("set", "set", "cut", "grow", "drop")),
        st.integers(0, 9) | st.integers(0, 255),
    )
    return mangled | mangled | mangled | misnumbered | too_large | st.binary(max_size=30)


def streams(max_payload: int) -> st.SearchStrategy[bytes]:
    """Good frames, and in every other stream something bad among them."""
    good = st.lists(frames(max_payload), max_size=10).map(b"".join)
    return good | st.tuples(good, damages(max_payload), good).map(b"".join)
