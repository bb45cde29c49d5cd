"""Blocks of the kernel and of the oracle: the same bytes, messages, verdicts and reads."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from polybus.errors import UsageError
from polybus.kernel.blocks import xxh64
from polybus.model.block import Block, Keys
from polybus.testing.conformance.sample_blocks import contents
from tests.property.kernel.block_values import (
    BODY,
    TEXT,
    build,
    expected_verdict,
    message_lists,
    plain,
    refitted,
    verdict,
)
from tests.rig.oracle import blocks as oracle
from tests.rig.oracle.blocks import Message


@given(st.binary(max_size=200), st.integers(0, 8))
def test_the_checksum_is_xxh64(data, skipped):
    view = memoryview(data)[skipped:]
    assert xxh64(view) == xxhash.xxh64_intdigest(view)


@given(message_lists())
def test_blocks_are_the_oracle_s(messages):
    made = build(messages)
    assert made.data == oracle.encode(messages)
    assert contents(made) == [plain(one) for one in messages]
    assert Block.open(made.data).count == len(messages)


@given(message_lists(), st.data())
def test_cuts_are_blocks_of_their_messages(messages, data):
    start = data.draw(st.integers(0, len(messages) - 1))
    end = data.draw(st.integers(start + 1, len(messages)))
    assert build(messages).slice(start, end).data == oracle.encode(messages[start:end])


@given(st.lists(message_lists(max_size=9), min_size=1, max_size=4))
def test_blocks_put_together_are_the_block_of_all(lists):
    every = [message for messages in lists for message in messages]
    assert Block.concat(build(messages) for messages in lists).data == oracle.encode(every)


@st.composite
def large_lists(draw: st.DrawFn) -> list[Message]:
    """Hundreds of messages, drawn as two numbers: their bits."""
    count = draw(st.integers(60, 300))
    keys, maps = (draw(st.integers(0, 2**count - 1)) for _ in range(2))
    return [
        Message(
            place,
            b"%d" % place,
            b"k%d" % place if keys >> place & 1 else None,
            ((b"n", b"%d" % place),) * (place % 3) if maps >> place & 1 else None,
        )
        for place in range(count)
    ]


@given(large_lists(), st.data())
def test_bitmaps_of_any_length_are_cut_and_joined_anywhere(messages, data):
    cut = data.draw(st.integers(1, len(messages) - 1))
    whole = build(messages)
    halves = whole.slice(0, cut), whole.slice(cut, len(messages))
    assert whole.data == oracle.encode(messages)
    assert halves[1].data == oracle.encode(messages[cut:])
    assert Block.concat(halves) == whole


@given(message_lists(max_size=9), st.data())
def test_changed_bytes_are_judged_as_the_oracle_does(messages, data):
    """With a corrected checksum: an accepted block must be canonical."""
    changed = bytearray(oracle.encode(messages))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(changed) - 1))
        changed[place] = data.draw(st.sampled_from([0, 1, 2, 4, 8, 0x7F, 0x80, 0xC3, 0xFF]))
    broken = refitted(bytes(changed))
    assert verdict(broken) == expected_verdict(broken)
    if verdict(broken) is None:
        assert oracle.encode(oracle.decode(broken)) == broken


@given(message_lists(max_size=9), st.data())
def test_other_sizes_are_judged_as_the_oracle_does(messages, data):
    """Header fields that are wrong, by a little or wildly, lead nowhere."""
    block = oracle.encode(messages)
    fields = list(oracle.HEADER.unpack(block[:48]))
    for number in data.draw(st.lists(st.integers(3, 10), min_size=1, max_size=2)):
        near = fields[number] + data.draw(st.integers(-8, 8))
        chosen = data.draw(st.sampled_from([near, 0, 2**32 - 1, 2**31, 2**28]))
        fields[number] = max(0, min(chosen, 0xFFFF if number == 3 else 2**32 - 1))
    broken = refitted(oracle.HEADER.pack(*fields) + block[48:])
    assert verdict(broken) == expected_verdict(broken)


@given(st.binary(max_size=300))
def test_any_bytes_are_judged_as_the_oracle_does(data):
    assert verdict(data) == expected_verdict(data)
    assert verdict(refitted(data)) == expected_verdict(refitted(data))


# Characters at the limits of UTF-8 and beyond, complete and truncated.
NEAR_TEXT = (
    *(b"\x80", b"\xff", b"\xc2", b"\xc0\x80", b"\xc3\x28"),
    *(b"\xe0\x9f\xbf", b"\xe0\xa0\x80", b"\xed\x9f\xbf", b"\xed\xa0\x80", b"\xef\xbf"),
    *(b"\xe2\x82\xac", b"\xe2\x28\xa1", b"\xe2\x82\x28"),
    *(b"\xf0\x8f\xbf\xbf", b"\xf0\x90\x80\x80", b"\xf0\x9f\x98\x28"),
    *(b"\xf4\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80"),
)
UGLY = st.lists(TEXT | st.sampled_from(NEAR_TEXT), max_size=4).map(b"".join)


def is_readable(parts: list[bytes]) -> bool:
    try:
        for part in parts:
            part.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_accepted(data: bytes, cuts: list[int]) -> bool:
    offsets = struct.pack(f"<{len(cuts)}i", *cuts)
    try:
        Block.from_columns(data, offsets, insertion_ms=0, keys=Keys(data, offsets))
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("text", NEAR_TEXT)
@pytest.mark.parametrize("before", [b"", b"1234567", b"12345678", "é".encode()])
@pytest.mark.parametrize("behind", [b"", b"1", b"12345678"])
def test_the_edges_of_utf8_are_those_of_python(text, before, behind):
    data = before + text + behind
    assert is_accepted(data, [0, len(data)]) == is_readable([data])


@given(UGLY, st.lists(st.integers(0, 40), max_size=4))
@example("é".encode(), [1])
def test_keys_are_judged_as_python_does(data, places):
    cuts = [0, *sorted(min(place, len(data)) for place in places), len(data)]
    parts = [data[start:end] for start, end in pairwise(cuts)]
    assert is_accepted(data, cuts) == is_readable(parts)


@given(st.lists(BODY, min_size=1, max_size=5), BODY, BODY)
def test_bytes_around_a_callers_columns_are_not_read(bodies, before, behind):
    cuts = [len(before)]
    for body in bodies:
        cuts.append(cuts[-1] + len(body))
    made = Block.from_columns(
        before + b"".join(bodies) + behind, struct.pack(f"<{len(cuts)}i", *cuts), insertion_ms=5
    )
    assert made.data == oracle.encode([Message(5, body) for body in bodies])
