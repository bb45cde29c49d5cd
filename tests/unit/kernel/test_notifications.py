"""The client side of rqueue: batches of received messages, buffers of encoded ones."""

from __future__ import annotations

import array
import gc
import struct
import tracemalloc
from typing import Any

import pytest

from polybus.dialects.rqueue.client.notification_batch import (
    Message,
    NotificationBatch,
    Part,
    encode_publishes,
    encode_run,
    scan,
)
from tests.vectors.rqueue import vectors

CAP = 2048


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">IB", len(payload), kind) + payload


def note(topic: bytes, content: bytes) -> bytes:
    return frame(7, bytes([len(topic)]) + topic + content)


def part(topic: bytes, message_id: bytes, index: int, count: int, chunk: bytes) -> bytes:
    head = bytes([len(topic)]) + topic + message_id + struct.pack(">HH", index, count)
    return frame(8, head + chunk)


def batch_of(data: bytes) -> NotificationBatch:
    consumed, batch, bad = scan(data, 0, len(data), CAP)
    assert (consumed, bad) == (len(data), None)
    return batch


NUMBERED = batch_of(b"".join(note(b"t%d" % (n % 2), b"%d" % n) for n in range(10)))
ID = bytes(range(16))


class TestScan:
    def test_only_the_given_region_is_read(self):
        data = b"junk" + note(b"a", b"1") + b"junk"
        consumed, batch, bad = scan(data, 4, len(data) - 4, CAP)
        assert (consumed, batch.contents(), bad) == (len(data) - 8, [b"1"], None)

    @pytest.mark.parametrize("region", [(-1, 0), (0, 5), (3, 2)])
    def test_region_outside_the_buffer_is_rejected(self, region):
        start, end = region
        with pytest.raises(ValueError, match="buffer"):
            scan(b"abc", start, end, CAP)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_contiguous_buffer_is_accepted(self, kind):
        data = kind(note(b"a", b"1"))
        assert scan(data, 0, len(data), CAP)[1].contents() == [b"1"]

    def test_batch_copies_the_received_bytes(self):
        data = bytearray(note(b"a", b"1"))
        batch = scan(data, 0, len(data), CAP)[1]
        data[:] = bytes(len(data))
        assert batch[0] == Message(b"a", b"1")

    @pytest.mark.parametrize("vector", [one for one in vectors("server") if one.bad], ids=str)
    def test_each_bad_frame_has_its_reason(self, vector):
        consumed, batch, bad = scan(vector.frame, 0, len(vector.frame), CAP)
        assert (consumed, len(batch), batch.part_count, bad) == (0, 0, 0, vector.bad)

    def test_messages_before_a_bad_frame_are_in_the_batch(self):
        data = note(b"a", b"1") + frame(7, b"\x00")
        consumed, batch, bad = scan(data, 0, len(data), CAP)
        assert (consumed, batch.contents(), bad) == (len(note(b"a", b"1")), [b"1"], "topic_length")

    def test_empty_buffer_is_an_empty_batch(self):
        consumed, batch, bad = scan(b"", 0, 0, CAP)
        assert (consumed, len(batch), list(batch), bad) == (0, 0, [], None)

    def test_a_million_smallest_frames(self):
        data = note(b"a", b"") * 1_000_000
        batch = batch_of(data)
        assert len(batch) == 1_000_000
        assert batch[999_999] == Message(b"a", b"")
        assert batch.total_bytes == 0


class TestBatch:
    def test_indexing_is_like_a_list(self):
        assert NUMBERED[0] == Message(b"t0", b"0")
        assert NUMBERED[-1] == Message(b"t1", b"9")
        for outside in (10, -11):
            with pytest.raises(IndexError):
                NUMBERED[outside]

    @pytest.mark.parametrize(
        "key",
        [slice(None), slice(2, 5), slice(None, None, -1), slice(8, 1, -3), slice(20, 30)],
    )
    def test_slicing_is_like_a_list(self, key):
        assert NUMBERED[key].contents() == NUMBERED.contents()[key]
        assert NUMBERED[key].total_bytes == len(NUMBERED[key])

    def test_iteration_returns_messages_in_order(self):
        assert [message.content for message in NUMBERED] == NUMBERED.contents()
        assert [message.topic for message in NUMBERED] == [b"t0", b"t1"] * 5

    def test_messages_of_a_topic_can_be_removed(self):
        rest, taken = NUMBERED.without(b"t1")
        assert taken == [b"1", b"3", b"5", b"7", b"9"]
        assert rest.contents() == [b"0", b"2", b"4", b"6", b"8"]
        assert len(NUMBERED) == 10

    def test_removing_an_absent_topic_returns_the_same_batch(self):
        rest, taken = NUMBERED.without(b"t")
        assert rest is NUMBERED
        assert taken == []

    def test_parts_keep_their_position(self):
        data = (
            note(b"p", b"echo")
            + part(b"t", ID, 0, 2, b"x")
            + note(b"t", b"between")
            + part(b"t", ID, 1, 2, b"y")
            + note(b"t", b"after")
        )
        batch, _ = batch_of(data).without(b"p")
        assert (len(batch), batch.part_count) == (2, 2)
        whole = batch.with_wholes({1: b"xy"})
        assert whole.contents() == [b"between", b"xy", b"after"]
        assert [message.topic for message in whole] == [b"t"] * 3
        assert (whole.part_count, whole.total_bytes) == (0, 14)
        assert whole[1:2].contents() == [b"xy"]

    def test_part_has_all_its_fields(self):
        (one,) = batch_of(part(b"topic", ID, 7, 9, b"chunk")).parts()
        assert (one.topic, one.message_id, one.index, one.count, one.chunk) == (
            b"topic",
            ID,
            7,
            9,
            b"chunk",
        )
        assert "7 of 9" in repr(one)

    def test_wholes_must_be_bytes(self):
        batch = batch_of(part(b"t", ID, 0, 1, b"x"))
        for wrong in (None, "text", bytearray(b"x")):
            with pytest.raises((TypeError, ValueError)):
                batch.with_wholes({0: wrong})  # type: ignore[dict-item]

    def test_memory_is_accounted(self):
        data = note(b"t", b"x" * 1000) * 100
        batch = batch_of(data)
        assert batch.memory_bytes > len(data)
        grown = batch_of(part(b"t", ID, 0, 1, b"x")).with_wholes({0: bytes(10_000)})
        assert grown.memory_bytes > 10_000

    def test_nothing_leaks(self):
        data = note(b"t", b"x" * 100) * 100 + part(b"t", ID, 0, 2, b"x")
        bad = data + frame(7, b"")

        def work() -> None:
            for _ in range(200):
                batch = scan(data, 0, len(data), CAP)[1]
                list(batch.with_wholes({0: b"whole"})[1:50])
                scan(bad, 0, len(bad), CAP)
                encode_publishes(b"t", batch.contents(), CAP)

        work()
        gc.collect()
        tracemalloc.start()
        try:
            work()
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 10_000
        finally:
            tracemalloc.stop()


class TestMessage:
    def test_is_a_value(self):
        one = Message(b"t", b"c")
        assert one == Message(b"t", b"c")
        assert hash(one) == hash(Message(b"t", b"c"))
        assert one != Message(b"t", b"d")
        assert one != (b"t", b"c")  # type: ignore[comparison-overlap]
        assert repr(one) == "Message(topic=b't', content=b'c')"

    def test_is_frozen(self):
        with pytest.raises(AttributeError):
            Message(b"t", b"c").topic = b"x"  # type: ignore[misc]
        with pytest.raises(AttributeError):
            Part(b"t", ID, 0, 1, b"").index = 3  # type: ignore[misc]

    def test_matches_by_position(self):
        match Message(b"t", b"c"):
            case Message(topic, content):
                assert (topic, content) == (b"t", b"c")


class TestEncode:
    def test_any_bytes_like_content(self):
        numbers = array.array("H", [1, 2])
        contents: list[Any] = [b"a", bytearray(b"b"), memoryview(b"xcx")[1:2], numbers]
        data = encode_publishes(b"t", contents, CAP)
        expected = encode_publishes(b"t", [b"a", b"b", b"c", numbers.tobytes()], CAP)
        assert data == expected

    @pytest.mark.parametrize("content", ["text", 5, None])
    def test_other_contents_are_rejected(self, content):
        with pytest.raises(TypeError):
            encode_publishes(b"t", [b"ok", content], CAP)

    @pytest.mark.parametrize("topic", [b"", b"x" * 256])
    def test_topic_must_have_1_to_255_bytes(self, topic):
        with pytest.raises(ValueError, match="topic"):
            encode_publishes(topic, [b""], CAP)

    def test_error_names_the_first_content_that_is_too_large(self):
        with pytest.raises(OverflowError, match="content 1 has 2042 bytes, at most 2041 fit"):
            encode_publishes(b"t", [bytes(2041), bytes(2042)], CAP)

    def test_run_ends_before_a_content_that_is_too_large(self):
        contents = [b"a", b"b", bytes(3000), b"c"]
        first, place = encode_run(b"t", contents, 0, CAP, 10**6)
        assert (first, place) == (encode_publishes(b"t", contents[:2], CAP), 2)
        assert encode_run(b"t", contents, 2, CAP, 10**6) == (b"", 2)
        assert encode_run(b"t", contents, 3, CAP, 10**6)[1] == 4

    def test_run_ends_before_its_buffer_exceeds_max_bytes(self):
        contents = [bytes(88)] * 10  # 100 bytes a frame
        assert [encode_run(b"t", contents, 0, CAP, size)[1] for size in (0, 199, 200, 5000)] == [
            1,
            1,
            2,
            10,
        ]

    @pytest.mark.parametrize(
        ("first", "cap", "size"), [(-1, CAP, 0), (0, -1, 0), (0, 2**32, 0), (0, CAP, -1)]
    )
    def test_invalid_numbers_are_rejected(self, first, cap, size):
        with pytest.raises(ValueError, match=r"max_payload|max_bytes"):
            encode_run(b"t", [b""], first, cap, size)

    def test_list_may_change_while_it_is_encoded(self):
        contents: list[object] = []

        class Shrinking(bytearray):
            def __release_buffer__(self, view: memoryview) -> None:  # Python 3.12 and later
                contents.clear()

        contents += [b"a", Shrinking(b"b"), b"c"]
        _, place = encode_run(b"t", contents, 0, CAP, 10**6)  # type: ignore[arg-type]
        assert place in (2, 3)
