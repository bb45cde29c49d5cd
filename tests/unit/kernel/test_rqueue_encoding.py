"""rqueue frames as encoded for readers: exact limits, and unique message ids."""

from __future__ import annotations

import struct
from array import array

import pytest

from polybus.dialects.rqueue.server.rqueue_framing import RqueueEncoding
from polybus.kernel.fanout import Fanout, Source
from tests.property.kernel import frames
from tests.rig.oracle.rqueue import Encoding


def encoded(encoding: RqueueEncoding, topic: bytes, body: bytes) -> bytes:
    """Return the bytes for a reader of this encoding; empty if it gets none."""
    fanout, source = Fanout(lambda identity, topic: True), Source(0)
    reader = fanout.add_subscriber("reader", encoding)
    fanout.subscribe(reader, topic)
    routed = fanout.publish(source, topic, array("i", [0, len(body)]), body)
    assert routed.consumed == 1
    whole = b"".join(data for _, data in routed.outputs)
    assert fanout.sent_totals(reader) == (1 if whole else 0, len(whole))
    return whole


@pytest.mark.parametrize("number", [-1, 32, 1000])
def test_encoding_number_must_be_0_to_31(number: int) -> None:
    for encoding in (RqueueEncoding, Encoding):
        with pytest.raises(ValueError, match="number"):
            encoding(number, 2048)


@pytest.mark.parametrize("max_payload", [-1, 0, 281, 2**32])
def test_invalid_max_payload_is_rejected(max_payload: int) -> None:
    for encoding in (RqueueEncoding, Encoding):
        with pytest.raises(ValueError, match="max_payload"):
            encoding(0, max_payload)


@pytest.mark.parametrize("max_payload", [282, 2**32 - 1])
def test_max_payload_at_its_bounds_is_accepted(max_payload: int) -> None:
    for encoding in (RqueueEncoding, Encoding):
        assert encoding(31, max_payload).max_payload == max_payload


@pytest.mark.parametrize("topic", [b"t", b"topic", b"t" * 255])
def test_largest_message_in_one_frame(topic: bytes) -> None:
    """With a topic of T bytes content is at most 2042 - T."""
    encoding, body = RqueueEncoding(0, 2048), frames.filler(2042 - len(topic))
    assert encoded(encoding, topic, body) == frames.notification(topic, body)
    one_more = encoded(encoding, topic, body + b"!")
    assert one_more[4] == 8
    assert struct.unpack_from(">HH", one_more, 22 + len(topic)) == (0, 2)


@pytest.mark.parametrize("topic", [b"t", b"topic", b"t" * 255])
def test_largest_chunk_of_a_part(topic: bytes) -> None:
    """A PART's chunk is at most 2022 - T: two of them full, or a third with one byte."""
    encoding, room = RqueueEncoding(0, 2048), 2022 - len(topic)
    body = frames.filler(2 * room)
    data = encoded(encoding, topic, body)
    message_id = data[6 + len(topic) : 22 + len(topic)]
    assert data == frames.part(topic, 0, 2, body[:room], message_id) + frames.part(
        topic, 1, 2, body[room:], message_id
    )
    longer = encoded(encoding, topic, body + b"!")
    assert longer.endswith(frames.part(topic, 2, 3, b"!")[-5:])
    assert len(longer) == len(data) + 27 + len(topic)


def test_message_needing_more_than_65535_parts_is_not_sent() -> None:
    """One byte per PART: a message of more than 65535 PARTs is not sent."""
    encoding, topic = RqueueEncoding(0, 282), b"t" * 255
    body = frames.filler(65535)
    data = encoded(encoding, topic, body)
    assert len(data) == 65535 * 282
    assert data[281::282] == body
    assert struct.unpack_from(">HH", data, 65534 * 282 + 277) == (65534, 65535)
    assert encoded(encoding, topic, body + b"!") == b""


def test_oversized_message_does_not_affect_others() -> None:
    """It is not counted as delivered, but as too large, once per reader."""
    encoding, topic = RqueueEncoding(0, 282), b"t" * 255
    fanout = Fanout(lambda identity, topic: True)
    reader = fanout.add_subscriber("reader", encoding)
    fanout.subscribe(reader, topic)
    body = b"1" + bytes(65536) + b"2"
    routed = fanout.publish(Source(0), topic, array("i", [0, 1, 65537, 65538]), body)
    both = frames.notification(topic, b"1") + frames.notification(topic, b"2")
    assert routed.outputs == [("reader", both)]
    assert fanout.sent_totals(reader) == (2, len(both))
    assert (fanout.delivered, fanout.too_large) == (2, 1)
    other = fanout.add_subscriber("other", encoding)
    fanout.add_subscriber("of another topic", encoding)
    fanout.subscribe(other, topic)
    assert fanout.publish(Source(0), topic, array("i", [1, 65537]), body).outputs == []
    assert fanout.too_large == 3
    assert (
        fanout.encode_for(other, topic, array("i", [1, 65537, 65538]), body)
        == both[-len(both) // 2 :]
    )
    assert fanout.too_large == 4


def test_oversized_message_reaches_encodings_that_fit_it() -> None:
    small, large, topic = RqueueEncoding(0, 282), RqueueEncoding(1, 2048), b"t" * 255
    fanout = Fanout(lambda identity, topic: True)
    for name, encoding in (("small", small), ("large", large)):
        fanout.subscribe(fanout.add_subscriber(name, encoding), topic)
    routed = fanout.publish(Source(0), topic, array("i", [0, 65536]), bytes(65536))
    assert [name for name, _ in routed.outputs] == ["large"]
    assert (fanout.delivered, fanout.too_large) == (1, 1)


def test_part_message_ids_are_unique() -> None:
    one, other = RqueueEncoding(0, 282), RqueueEncoding(0, 282)
    ids = [encoded(encoding, b"t", bytes(300))[7:23] for encoding in (one, other) * 500]
    assert len(set(ids)) == 1000


def test_partially_sent_frames_are_counted() -> None:
    encoding = RqueueEncoding(0, 2048)
    data = frames.notification(b"t", b"12") * 3
    size = len(data) // 3
    sent = [encoding.count(data, at) for at in (0, 1, size - 1, size, size + 1, 3 * size, 999)]
    assert sent == [3, 3, 3, 2, 2, 0, 0]
    assert encoding.count(b"", 0) == 0
    assert encoding.count(data[:-1], 0) == 2


def test_message_in_parts_counts_once_at_its_last_part() -> None:
    encoding = RqueueEncoding(0, 2048)
    parts = [frames.part(b"t", index, 3, b"12") for index in range(3)]
    data = b"".join(parts) + frames.notification(b"t", b"12")
    whole = sum(map(len, parts))
    sent = [encoding.count(data, at) for at in (0, len(parts[0]), whole - 1, whole, len(data))]
    assert sent == [2, 2, 2, 1, 0]
    assert encoding.count(b"".join(parts[:2]), 0) == 0  # the rest has yet to come


def test_count_accepts_bytes_only() -> None:
    with pytest.raises(TypeError):
        RqueueEncoding(0, 2048).count(None, 0)  # type: ignore[arg-type]
