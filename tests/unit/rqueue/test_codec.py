"""rqueue's frames: golden vectors in both directions, sizes at their bounds, and errors."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from polybus.dialects.rqueue import codec
from polybus.dialects.rqueue.client.notification_batch import scan
from polybus.errors import InvalidTopic, TooLarge, UsageError
from polybus.model.limits import MIB
from tests.vectors.rqueue import MAX_PAYLOAD, Vector, vectors

ID = bytes(range(16))


def encode(value: dict[str, Any]) -> bytes:
    match value:
        case {"type": "subscribe", "topic": topic}:
            return codec.subscribe(topic)
        case {"type": "remove", "topic": topic}:
            return codec.remove(topic)
        case {"type": "deregister"}:
            return codec.deregister()
        case {"type": "publish", "topic": topic, "content": content}:
            return codec.publish(topic, content)
        case {"type": "notification", "topic": topic, "content": content}:
            return codec.notification(topic, content)
        case {"type": "publish part" | "part" as kind, **fields}:
            return (codec.part if kind == "part" else codec.publish_part)(**fields)
    raise AssertionError(f"no builder for {value}")


def decode(data: bytes, piece_bytes: int) -> tuple[list[dict[str, Any]], int, str | None]:
    """Decode `data` in pieces. Returns the frames, the bytes consumed, and the fault if any."""
    found: list[dict[str, Any]] = []
    consumed = 0
    for end in [*range(piece_bytes, len(data), piece_bytes), len(data)]:
        took, batch, bad = scan(data, consumed, end, MAX_PAYLOAD)
        consumed += took
        found += [
            {"type": "notification", "topic": one.topic, "content": one.content} for one in batch
        ]
        found += [
            {
                "type": "part",
                "topic": one.topic,
                "message_id": one.message_id,
                "index": one.index,
                "count": one.count,
                "chunk": one.chunk,
            }
            for one in batch.parts()
        ]
        if bad:
            return found, consumed, bad
    return found, consumed, None


@pytest.mark.parametrize(
    "vector", [one for one in vectors() if one.value and one.value["type"] != "skipped"], ids=str
)
def test_values_encode_to_the_golden_bytes(vector: Vector):
    assert vector.value is not None
    assert encode(vector.value) == vector.frame


@pytest.mark.parametrize("after", [b"", codec.notification(b"next", b"one")], ids=["alone", "more"])
@pytest.mark.parametrize("piece_bytes", [10_000, 1])
@pytest.mark.parametrize("vector", [one for one in vectors("server") if one.value], ids=str)
def test_golden_bytes_decode_to_values(vector: Vector, piece_bytes: int, after: bytes):
    found, consumed, bad = decode(vector.frame + after, piece_bytes)
    expected = [vector.value] if vector.value != {"type": "skipped"} else []
    if after:
        expected.append({"type": "notification", "topic": b"next", "content": b"one"})
    assert (consumed, bad) == (len(vector.frame + after), None)
    assert sorted(found, key=str) == sorted(expected, key=str)  # a batch keeps parts apart


@pytest.mark.parametrize("piece_bytes", [10_000, 1])
@pytest.mark.parametrize("vector", [one for one in vectors("server") if one.bad], ids=str)
def test_bad_frame_has_a_reason_and_ends_the_stream(vector: Vector, piece_bytes: int):
    before = codec.notification(b"before", b"it")
    found, consumed, bad = decode(before + vector.frame + before, piece_bytes)
    assert found == [{"type": "notification", "topic": b"before", "content": b"it"}]
    assert (consumed, bad) == (len(before), vector.bad)


class TestTopics:
    def test_topic_is_utf8_text_or_any_bytes(self):
        assert codec.topic_bytes("bücher") == "bücher".encode()
        assert codec.topic_bytes(b"\xff\x00") == b"\xff\x00"

    @pytest.mark.parametrize("topic", ["", b"", "x" * 256, "ü" * 128, b"x" * 256])
    def test_empty_and_too_long_topics_are_rejected(self, topic):
        with pytest.raises(InvalidTopic):
            codec.topic_bytes(topic)


class TestSizes:
    @pytest.mark.parametrize("length", [1, 100, 255])
    def test_content_and_chunk_limits_are_those_of_the_spec(self, length):
        topic = b"t" * length
        assert codec.max_content(topic) == 2042 - length
        assert codec.max_chunk(topic) == 2022 - length

    @pytest.mark.parametrize("length", [1, 255])
    def test_largest_content_fills_a_frame_exactly(self, length):
        topic = b"t" * length
        frame = codec.publish(topic, bytes(codec.max_content(topic)))
        assert struct.unpack(">I", frame[:4]) == (2048,)
        with pytest.raises(TooLarge, match="PARTs"):
            codec.publish(topic, bytes(codec.max_content(topic) + 1))

    @pytest.mark.parametrize("extra", [-1, 0, 1])
    @pytest.mark.parametrize("parts", [1, 2, 3])
    def test_all_parts_but_the_last_are_full(self, parts, extra):
        topic = b"topic"
        chunk = codec.max_chunk(topic)
        content = bytes(i % 251 for i in range(parts * chunk + extra))
        data = b"".join(codec.publish_in_parts(topic, content, ID))
        frames = split_publishes(data)
        assert all(len(frame) == 2048 for frame in frames[:-1])
        assert len(frames) == parts + (extra > 0)
        assert joined(frames) == content

    def test_buffers_of_parts_are_bounded(self):
        buffers = list(codec.publish_in_parts(b"t", bytes(MIB), ID))
        assert max(map(len, buffers)) <= codec.PARTS_BUFFER_BYTES
        assert len(buffers) > 3

    def test_message_over_64_mib_is_rejected(self):
        assert codec.max_message(b"t" * 255) == 64 * MIB
        with pytest.raises(TooLarge, match=str(64 * MIB)):
            codec.publish_in_parts(b"t", bytes(64 * MIB + 1), ID)

    def test_message_needing_more_than_65535_parts_is_rejected(self):
        topic, cap = b"t" * 255, codec.MIN_MAX_PAYLOAD
        assert codec.max_chunk(topic, cap) == 1
        frames = split_publishes(b"".join(codec.publish_in_parts(topic, bytes(65535), ID, cap)))
        assert len(frames) == 65535
        with pytest.raises(TooLarge):
            codec.publish_in_parts(topic, bytes(65536), ID, cap)

    @pytest.mark.parametrize("cap", [281, 2**32])
    def test_invalid_max_payload_is_rejected(self, cap):
        with pytest.raises(UsageError, match="max_payload"):
            codec.check_max_payload(cap)

    @pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (0, 65536), (-1, 1)])
    def test_part_index_out_of_range_is_rejected(self, index, count):
        with pytest.raises(UsageError):
            codec.part(b"t", ID, index, count, b"")

    def test_message_id_must_have_16_bytes(self):
        with pytest.raises(UsageError):
            codec.part(b"t", ID[:15], 0, 1, b"")


def split_publishes(data: bytes) -> list[bytes]:
    """The payloads of PUBLISH frames."""
    payloads = []
    at = 0
    while at < len(data):
        length, kind = struct.unpack_from(">IB", data, at)
        assert kind == codec.PUBLISH
        payloads.append(data[at + 5 : at + 5 + length])
        at += 5 + length
    return payloads


def joined(frames: list[bytes]) -> bytes:
    data = b"".join(frames)
    consumed, batch, bad = scan(data, 0, len(data), MAX_PAYLOAD)
    assert (consumed, bad) == (len(data), None)
    assert [one.index for one in batch.parts()] == list(range(len(frames)))
    assert {(one.message_id, one.count) for one in batch.parts()} == {(ID, len(frames))}
    return b"".join(one.chunk for one in batch.parts())
