"""Reassembly of large messages from PARTs: order, duplicates, limits and expiry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.rqueue.client.notification_batch import Part
from polybus.dialects.rqueue.parts import PART_OVERHEAD_BYTES, PartLimits, Reassembler
from polybus.errors import BadFrame

A, B = b"a" * 16, b"b" * 16
TIMEOUT_S = 30.0


def part(index: int, count: int, chunk: bytes = b"x", message_id: bytes = A, topic: bytes = b"t"):
    return Part(topic, message_id, index, count, chunk)


def room_for(parts: int, chunk_bytes: int) -> int:
    return parts * (chunk_bytes + PART_OVERHEAD_BYTES)


def is_empty(box: Reassembler) -> bool:
    return (len(box), box.held_bytes, box.next_deadline()) == (0, 0, None)


def test_parts_in_order_are_joined():
    box = Reassembler()
    assert box.add(part(0, 3, b"one "), 0) is None
    assert box.add(part(1, 3, b"two "), 0) is None
    assert box.add(part(2, 3, b"three"), 0) == b"one two three"
    assert box.completed == 1
    assert is_empty(box)


def test_parts_out_of_order_are_joined():
    box = Reassembler()
    assert box.add(part(2, 3, b"c"), 0) is None
    assert box.add(part(0, 3, b"a"), 0) is None
    assert box.add(part(1, 3, b"b"), 0) == b"abc"


def test_single_empty_part_is_a_message():
    box = Reassembler()
    assert box.add(part(0, 1, b""), 0) == b""
    assert is_empty(box)


def test_interleaved_messages_are_joined_by_id_and_topic():
    box = Reassembler()
    steps = [
        part(0, 2, b"a0"),
        part(0, 2, b"b0", message_id=B),
        part(0, 2, b"u0", topic=b"u"),
        part(1, 2, b"u1", topic=b"u"),
        part(1, 2, b"b1", message_id=B),
        part(1, 2, b"a1"),
    ]
    assert [box.add(step, 0) for step in steps] == [None, None, None, b"u0u1", b"b0b1", b"a0a1"]


def test_first_part_of_an_index_is_kept():
    box = Reassembler()
    box.add(part(0, 2, b"first"), 0)
    assert box.add(part(0, 2, b"again"), 0) is None
    assert box.add(part(1, 2, b"!"), 0) == b"first!"
    assert (box.duplicates, box.lost_messages) == (1, 0)


def test_part_of_a_completed_message_is_a_duplicate():
    box = Reassembler()
    box.add(part(0, 1), 0)
    assert box.add(part(0, 1), 0) is None
    assert (box.completed, box.duplicates) == (1, 1)
    assert is_empty(box)


def test_inconsistent_count_drops_the_message_and_its_later_parts():
    box = Reassembler()
    box.add(part(0, 3), 0)
    assert box.add(part(1, 2), 0) is None
    assert box.add(part(2, 3), 0) is None
    assert box.lost["inconsistent"] == 1
    assert (box.lost_messages, box.lost_parts) == (1, 3)
    assert is_empty(box)


def test_message_over_its_size_limit_is_dropped():
    box = Reassembler(PartLimits(max_message_bytes=10))
    assert box.add(part(0, 2, bytes(10)), 0) is None
    assert box.add(part(1, 2, b"!"), 0) is None
    assert box.lost["too_large"] == 1
    assert is_empty(box)
    assert box.add(part(0, 1, bytes(10), message_id=B), 0) == bytes(10)


def test_new_message_is_dropped_when_memory_is_full():
    box = Reassembler(PartLimits(max_bytes=room_for(2, 100)))
    box.add(part(0, 2, bytes(100)), 0)
    box.add(part(0, 5, bytes(100), message_id=B), 0)
    assert box.add(part(1, 5, bytes(1), message_id=B), 0) is None
    assert box.lost["no_room"] == 1
    assert box.add(part(1, 2, bytes(100)), 0) == bytes(200)
    assert is_empty(box)


def test_later_parts_of_a_dropped_message_are_not_kept():
    box = Reassembler(PartLimits(max_messages=1))
    box.add(part(0, 2), 0)
    box.add(part(0, 2, message_id=B), 0)
    assert box.lost["no_room"] == 1
    assert box.add(part(1, 2), 0) == b"xx"
    assert box.add(part(1, 2, message_id=B), 0) is None
    assert box.lost_parts == 2
    assert is_empty(box)


def test_announced_count_allocates_nothing():
    box = Reassembler()
    box.add(part(0, 65535), 0)
    assert box.held_bytes == room_for(1, 1)


def test_expired_message_is_dropped_and_counted():
    box = Reassembler()
    box.add(part(0, 3), 0)
    box.add(part(1, 3), 1)
    assert box.next_deadline() == 1 + TIMEOUT_S
    assert box.expire(1 + TIMEOUT_S - 0.001) == 0
    assert box.expire(1 + TIMEOUT_S) == 1
    assert (box.lost["expired"], box.lost_parts) == (1, 2)
    assert is_empty(box)


def test_each_new_part_extends_the_deadline():
    box = Reassembler()
    for index in range(10):
        box.add(part(index, 11), index * (TIMEOUT_S - 1))
    assert box.add(part(10, 11), 10 * (TIMEOUT_S - 1)) == b"x" * 11


def test_duplicate_part_does_not_extend_the_deadline():
    box = Reassembler()
    box.add(part(0, 2), 0)
    box.add(part(0, 2), 20)
    assert box.next_deadline() == TIMEOUT_S


def test_only_messages_past_their_deadline_expire():
    box = Reassembler()
    box.add(part(0, 3), 0)
    box.add(part(0, 2, message_id=B), 10)
    box.add(part(1, 3), 20)
    assert box.expire(10 + TIMEOUT_S) == 1
    assert box.add(part(2, 3), 41) == b"xxx"


def test_part_of_an_expired_message_is_dropped():
    box = Reassembler()
    box.add(part(0, 2), 0)
    assert box.add(part(1, 2), TIMEOUT_S) is None
    assert (box.lost_messages, box.lost_parts) == (1, 2)


def test_remembered_message_ids_are_bounded():
    box = Reassembler(PartLimits(max_remembered=2))
    for number in range(100):
        assert box.add(part(0, 1, message_id=number.to_bytes(16, "big")), 0) == b"x"
    assert len(box._settled) == 2


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (-1, 1)])
def test_invalid_part_index_is_a_bad_frame(index, count):
    with pytest.raises(BadFrame, match="part_index"):
        Reassembler().add(part(index, count), 0)


@given(
    st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=8), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_shuffled_and_duplicated_parts_are_joined(messages, random):
    """Parts of several messages, shuffled, some of them twice."""
    parts = [
        part(index, len(chunks), chunk, message_id=number.to_bytes(16, "big"))
        for number, chunks in enumerate(messages)
        for index, chunk in enumerate(chunks)
    ]
    parts += random.sample(parts, len(parts) // 3)
    random.shuffle(parts)
    box = Reassembler()
    whole = [content for one in parts if (content := box.add(one, 0)) is not None]
    assert sorted(whole) == sorted(b"".join(chunks) for chunks in messages)
    assert box.duplicates == len(parts) - sum(map(len, messages))
    assert is_empty(box)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(1, 4),
            st.binary(max_size=9),
            st.floats(0, 20),
        ),
        max_size=60,
    )
)
def test_no_sequence_of_parts_exceeds_the_limits(steps):
    limits = PartLimits(max_bytes=room_for(6, 5), max_messages=3, max_message_bytes=20)
    box = Reassembler(limits)
    now, received = 0.0, 0
    for number, index, more, chunk, wait_s in steps:
        now += wait_s
        received += 1
        whole = box.add(part(index, index + more, chunk, message_id=bytes([number]) * 16), now)
        assert whole is None or len(whole) <= limits.max_message_bytes
        assert len(box) <= limits.max_messages
        assert box.held_bytes <= limits.max_bytes
    box.expire(now + TIMEOUT_S)
    assert is_empty(box)
    delivered = received - box.duplicates - box.lost_parts
    assert delivered >= box.completed
