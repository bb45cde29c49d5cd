"""Freud's answers, encoded from stored batches: bounds, and invalid columns."""

from __future__ import annotations

import sys
from array import array

import pytest

from polybus.dialects.freud.client.answer_batch import Record, scan_answers
from polybus.dialects.freud.server.answer_encoder import (
    encode_answers,
    encode_messages,
    encode_produced,
    encode_records,
    fitting,
    whole_answers,
)

CAP = 1000
OFFSETS = array("i", [0, 3, 3, 8])
BODIES = b"onethree"
TIMES = array("Q", [10, 11, 2**64 - 1])


def test_slice_of_a_batch_is_encoded():
    expected = encode_answers(0, 1) + encode_answers(0, 1, b"three")
    assert encode_messages(OFFSETS, BODIES, 1, 2) == expected
    assert encode_messages(OFFSETS, bytearray(BODIES), 3, 0) == b""


def test_record_ids_count_from_the_start_of_the_batch():
    data = encode_records(100, TIMES, 1, OFFSETS, BODIES, 1, 2)
    batch = scan_answers(data, 0, len(data), CAP)[1]
    assert batch.records(0, 2) == [
        Record(101, 11, 1, b""),
        Record(102, 2**64 - 1, 1, b"three"),
    ]


def test_columns_at_any_alignment_are_read():
    shifted = memoryview(b"?" + OFFSETS.tobytes())[1:]
    times = memoryview(b"?" + TIMES.tobytes())[1:]
    assert encode_messages(shifted, BODIES, 0, 1) == encode_answers(0, 1, b"one")
    assert len(encode_records(0, times, 0, shifted, BODIES, 0, 3)) == 3 * 28 + 8


@pytest.mark.parametrize(
    ("offsets", "part"),
    [
        ([0, 3], (0, 2)),
        ([0, 3], (2, 0)),
        ([0, 3], (-1, 1)),
        ([0, 3], (0, -1)),
        ([0, 3], (1, sys.maxsize)),
        ([0, 3], (sys.maxsize, 1)),
        ([], (0, 0)),
        ([0, 9], (0, 1)),
        ([-1, 3], (0, 1)),
        ([0, 3, 2, 8], (0, 3)),
        ([0, 9, 8], (0, 2)),
    ],
)
def test_slice_outside_the_columns_is_rejected(offsets, part):
    with pytest.raises(ValueError, match="offsets"):
        encode_messages(array("i", offsets), BODIES, *part)


def test_missing_timestamps_are_rejected():
    with pytest.raises(ValueError, match="time"):
        encode_records(0, TIMES[:2], 0, OFFSETS, BODIES, 2, 1)


@pytest.mark.parametrize("count", [-1, sys.maxsize])
@pytest.mark.parametrize("make", [lambda n: encode_answers(0, n), lambda n: encode_produced(0, n)])
def test_invalid_counts_are_rejected(make, count):
    with pytest.raises((ValueError, OverflowError)):
        make(count)


@pytest.mark.parametrize(
    ("max_bytes", "records", "expected"),
    [
        *((0, False, 1), (18, False, 1), (19, False, 2), (31, False, 2), (32, False, 3)),
        *((58, True, 1), (59, True, 2), (91, True, 2), (92, True, 3)),
    ],
)
def test_fitting_count_is_at_least_one(max_bytes, records, expected):
    assert fitting(OFFSETS, 0, 3, max_bytes, records) == expected
    assert fitting(OFFSETS, 3, 0, max_bytes, records) == 0


@pytest.mark.parametrize("part", [(-1, 1), (0, 4), (4, 0), (0, -1), (1, sys.maxsize)])
def test_fitting_rejects_a_slice_outside_the_offsets(part):
    start, count = part
    with pytest.raises(ValueError, match="offsets"):
        fitting(OFFSETS, start, count, 100)


def test_complete_answers_are_counted():
    written = encode_answers(0, 2, b"abc") + encode_answers(1, 1)
    counted = [whole_answers(written, sent) for sent in range(-1, len(written) + 2)]
    assert counted == [0] * 12 + [1] * 11 + [2] * 8 + [3] * 2


def test_invalid_bytes_count_as_no_answers():
    assert whole_answers(b"\xff" * 100, 100) == 0
