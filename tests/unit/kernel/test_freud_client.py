"""The client side of Freud: batches of received answers, buffers of encoded requests."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from polybus.dialects.freud.client.answer_batch import (
    Answer,
    AnswerBatch,
    Record,
    encode_gets,
    encode_produces,
    encode_run,
    scan_answers,
)
from polybus.dialects.freud.server.answer_encoder import encode_answers, encode_produced

CAP = 1000
ID = bytes(range(16))
ANYTHING: Any = (0, b"1")


@pytest.mark.parametrize("region", [(-1, 0), (0, 9), (5, 4)])
def test_region_outside_the_buffer_is_rejected(region):
    start, end = region
    with pytest.raises(ValueError, match="within the buffer"):
        scan_answers(bytes(8), start, end, CAP)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_is_accepted(kind):
    assert scan_answers(kind(bytes(8)), 0, 8, CAP)[0] == 8


def test_batch_copies_the_received_bytes():
    data = bytearray(encode_answers(0, 1, b"body"))
    batch = scan_answers(data, 0, len(data), CAP)[1]
    data[:] = bytes(len(data))
    assert batch.payloads(0, 1) == [b"body"]


def mixed() -> AnswerBatch:
    data = encode_produced(7, 3) + encode_answers(1, 2) + encode_answers(5, 1, b"quota_bytes")
    consumed, batch, too_large = scan_answers(bytearray(data), 0, len(data), CAP)
    assert (consumed, too_large) == (len(data), False)
    return batch


def test_answers_by_index():
    batch = mixed()
    assert len(batch) == 6
    assert (batch[3], batch[-1]) == (Answer(1, b""), Answer(5, b"quota_bytes"))
    assert [batch.code(place) for place in range(6)] == [0, 0, 0, 1, 1, 5]
    assert [one.code for one in batch] == [0, 0, 0, 1, 1, 5]
    for place in (6, -7):
        with pytest.raises(IndexError):
            batch[place]
    for place in (6, -1):
        with pytest.raises(IndexError):
            batch.code(place)


def test_answers_by_run():
    batch = mixed()
    assert [batch.run_end(place, 6) for place in range(6)] == [3, 3, 3, 5, 5, 6]
    assert (batch.run_end(0, 2), batch.run_end(6, 6)) == (2, 6)
    assert batch.message_ids(0, 3) == [7, 8, 9]
    assert batch.payloads(3, 6) == [b"", b"", b"quota_bytes"]


@pytest.mark.parametrize("region", [(-1, 1), (0, 7), (3, 2)])
@pytest.mark.parametrize("method", ["run_end", "payloads", "message_ids", "records"])
def test_runs_stay_within_the_batch(method, region):
    with pytest.raises(IndexError):
        getattr(mixed(), method)(*region)


@pytest.mark.parametrize("method", ["message_ids", "records"])
def test_payload_of_another_kind_is_rejected(method):
    with pytest.raises(ValueError, match="has"):
        getattr(mixed(), method)(3, 4)


def test_values_compare_and_hash_by_their_fields():
    assert Answer(0, b"1") == Answer(0, b"1") != Answer(1, b"1")
    assert Answer(0, b"1") != ANYTHING
    assert len({Answer(0, b"1"), Answer(0, b"1"), Answer(0, b"2")}) == 2
    assert Record(1, 2, 0, b"") == Record(1, 2, 0, b"") != Record(1, 3, 0, b"")
    assert Record(1, 2, 0, b"") != ANYTHING
    assert len({Record(1, 2, 0, b""), Record(1, 2, 0, b""), Record(1, 2, 0, b"x")}) == 2
    assert [Record(0, 0, flags, b"").is_notice for flags in (0, 1, 2, 3)] == [0, 1, 0, 1]
    assert repr(Answer(2, b"")) == "Answer(code=2, payload=b'')"
    assert repr(Record(1, 2, 3, b"4")).startswith("Record(message_id=1, timestamp_ns=2, flags")
    assert repr(mixed()) == "<AnswerBatch of 6 answers>"


def test_batch_reports_its_memory():
    assert 70 < mixed().memory_bytes < 2000


def test_error_names_the_first_content_that_is_too_large():
    with pytest.raises(OverflowError, match="content 1 has 96 bytes, at most 95"):
        encode_produces(b"t", [bytes(95), bytes(96)], 100)


@pytest.mark.parametrize("topic", [b"", b"t" * 256])
def test_invalid_topics_are_rejected(topic):
    with pytest.raises(ValueError, match="topic"):
        encode_produces(topic, [], CAP)


@pytest.mark.parametrize("numbers", [(-1, CAP, 1), (0, -1, 1), (0, 1 << 32, 1), (0, CAP, -1)])
def test_invalid_runs_are_rejected(numbers):
    with pytest.raises(ValueError, match=r"not negative|32 bits"):
        encode_run(b"t", [b""], *numbers)


def test_topic_larger_than_the_frame_limit_encodes_nothing():
    assert encode_run(b"topic", [b""], 0, 8, 100) == (b"", 0)


@pytest.mark.parametrize("count", [-1, sys.maxsize])
def test_invalid_counts_of_gets_are_rejected(count):
    with pytest.raises((ValueError, OverflowError)):
        encode_gets(ID, count, 0)


@pytest.mark.parametrize("wait", [-(2**31) - 1, 2**31])
def test_max_blocking_has_32_bits(wait):
    with pytest.raises(OverflowError):
        encode_gets(ID, 1, wait)
