"""Freud's kernel against its oracle, on values and on errors, whole and in any cuts."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate, groupby
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from polybus.dialects.freud.client import answer_batch
from polybus.dialects.freud.server import answer_encoder
from polybus.dialects.freud.server.request_scanner import GetRun, Group, ProduceRun
from tests.property.kernel.freud_requests import (
    CAP,
    any_names,
    drip,
    frame,
    named,
    odd,
    ones,
    scanner,
    spoilt,
    streams,
)
from tests.rig.oracle import freud as oracle

FIT_BYTES = 300

ends = st.lists(st.integers(0, 10_000), max_size=10)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result, or the type of the raised error."""
    try:
        return function(*args)
    except (ValueError, OverflowError) as error:
        return type(error)


# --- requests that come in ---------------------------------------------------


def key(group: Group) -> object:
    """Return the common fields of a group's requests, or None if it has only one."""
    if isinstance(group, ProduceRun):
        return group.topic
    if isinstance(group, GetRun):
        return group.subscriber, group.max_blocking_s, group.records
    return None


@given(streams | spoilt | st.binary(max_size=60))
@example(b"")
@example(frame(4, named(b"t" * 255, bytes(CAP - 259))))
@example(frame(9, bytes(CAP)))
@example(frame(9, bytes(CAP + 1)))
def test_requests_are_those_of_the_oracle(data):
    scanned = scanner().scan(data, 0, len(data))
    assert (scanned.consumed, ones(scanned.groups)) == oracle.scan(data, CAP)
    assert not scanned.more
    assert scanned.bad == any(one.closes for one in ones(scanned.groups) if hasattr(one, "closes"))


@given(streams | spoilt)
def test_neighbouring_requests_of_one_kind_form_one_group(data):
    groups = scanner().scan(data, 0, len(data)).groups
    for common, same in groupby(groups, key):
        assert common is None or len(list(same)) == 1


@given(streams | spoilt, ends)
def test_where_the_stream_is_cut_makes_no_difference(data, ends):
    assert drip(scanner(), data, ends) == oracle.scan(data, CAP)


@given(streams | spoilt)
def test_a_byte_at_a_time(data):
    assert drip(scanner(), data, range(len(data))) == oracle.scan(data, CAP)


@given(st.lists(odd, max_size=12))
def test_framing_survives_every_frame_under_the_cap(frames):
    """Each frame is answered once, in its place."""
    data = b"".join(frames)
    if all(len(one) <= 8 + CAP for one in frames):
        scanned = scanner().scan(data, 0, len(data))
        assert (scanned.consumed, len(ones(scanned.groups))) == (len(data), len(frames))


@given(st.lists(any_names, max_size=8))
def test_cached_verdict_of_a_name_is_its_own(raws):
    data = b"".join(frame(0, named(raw)) for raw in raws if len(raw) <= CAP - 4)
    assert drip(scanner(), data, ()) == oracle.scan(data, CAP)


@given(streams, st.binary(max_size=9), st.binary(max_size=9))
def test_nothing_outside_the_window_matters(data, before, after):
    scanned = scanner().scan(before + data + after, len(before), len(before) + len(data))
    assert (scanned.consumed, ones(scanned.groups)) == oracle.scan(data, CAP)


# --- answers that go out -----------------------------------------------------

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
few = st.integers(-1, 40)


@given(u32, few, st.binary(max_size=200))
def test_equal_answers(code, count, payload):
    expected = outcome(oracle.answers, code, count, payload)
    assert outcome(answer_encoder.encode_answers, code, count, payload) == expected


@given(u64, few)
@example(2**64 - 1, 3)
def test_ids_of_produced_messages(first_id, count):
    expected = outcome(oracle.produced, first_id, count)
    assert outcome(answer_encoder.encode_produced, first_id, count) == expected


contents = st.lists(st.binary(max_size=80), max_size=12)
parts = st.tuples(st.integers(0, 12), st.integers(0, 12))
crooked = st.tuples(st.lists(st.integers(-1, 90), max_size=8).map(tuple), st.binary(max_size=90))


def stored(bodies: list[bytes]) -> tuple[tuple[int, ...], bytes]:
    return (0, *accumulate(map(len, bodies))), b"".join(bodies)


@given(contents.map(stored) | crooked, parts)
def test_messages_out_of_a_stored_batch(columns, part):
    offsets, bodies = columns
    expected = outcome(oracle.messages, offsets, bodies, *part)
    assert outcome(answer_encoder.encode_messages, array("i", offsets), bodies, *part) == expected


@given(contents.map(stored) | crooked, parts, u64, st.lists(u64, max_size=12), u32)
def test_records_out_of_a_stored_batch(columns, part, first_id, times, flags):
    offsets, bodies = columns
    expected = outcome(oracle.records, first_id, times, flags, offsets, bodies, *part)
    given = (first_id, array("Q", times), flags, array("i", offsets), bytearray(bodies), *part)
    assert outcome(answer_encoder.encode_records, *given) == expected


@given(contents, parts, st.integers(-1, FIT_BYTES), st.booleans())
def test_how_many_fit(bodies, part, max_bytes, records):
    offsets = stored(bodies)[0]
    expected = outcome(oracle.fitting, offsets, *part, max_bytes, records)
    found = outcome(answer_encoder.fitting, array("i", offsets), *part, max_bytes, records)
    assert found == expected


written_answers = st.lists(st.tuples(u32, st.binary(max_size=20)), max_size=8).map(
    lambda answers: b"".join(oracle.answer(*one) for one in answers)
)


@given(written_answers | st.binary(max_size=40), st.integers(-1, 300))
@example(b"\xff" * 40, 40)
def test_how_many_answers_have_gone_out(written, sent):
    assert answer_encoder.whole_answers(written, sent) == oracle.whole_answers(written, sent)


# --- the client's side -------------------------------------------------------

codes = st.integers(0, 5) | u32
answer_streams = st.lists(st.builds(oracle.answer, codes, st.binary(max_size=30)), max_size=20).map(
    b"".join
)
answer_bytes = st.one_of(
    answer_streams,
    st.tuples(answer_streams, st.binary(max_size=12), answer_streams).map(b"".join),
    st.integers(CAP - 1, CAP + 1).map(lambda size: oracle.answer(0, bytes(size))),
)


def pairs(batch: answer_batch.AnswerBatch) -> list[tuple[int, bytes]]:
    return [(one.code, one.payload) for one in batch]


@given(answer_bytes, ends)
def test_answers_are_those_of_the_oracle_in_any_cuts(data, ends):
    found, consumed, too_large = [], 0, False
    for end in sorted({*(end % (len(data) + 1) for end in ends), len(data)}):
        took, batch, too_large = answer_batch.scan_answers(data, consumed, end, CAP)
        found += pairs(batch)
        consumed += took
        if too_large:
            break
    assert (consumed, found, too_large) == oracle.scan_answers(data, CAP)


@given(answer_bytes, st.integers(0, 20), st.integers(0, 20))
def test_views_of_a_batch(data, start, end):
    batch = answer_batch.scan_answers(data, 0, len(data), CAP)[1]
    every = oracle.scan_answers(data, CAP)[1]
    end = min(end, len(every))
    start = min(start, end)
    payloads = [payload for _, payload in every[start:end]]
    assert batch.payloads(start, end) == payloads
    same = [code == every[start][0] for code, _ in every[start:end]]
    assert batch.run_end(start, end) == start + [*same, False].index(False)
    expected = outcome(lambda: [oracle.message_id(one) for one in payloads])
    assert outcome(batch.message_ids, start, end) == expected
    assert outcome(lambda: [fields(one) for one in batch.records(start, end)]) == outcome(
        lambda: [oracle.record(one) for one in payloads]
    )


def fields(record: answer_batch.Record) -> tuple[int, int, int, bytes]:
    return record.message_id, record.timestamp_ns, record.flags, record.body


@given(
    st.binary(max_size=260),
    st.lists(st.binary(max_size=CAP) | st.binary().map(bytearray), max_size=20),
    st.integers(0, CAP),
)
@example(b"t" * 255, [bytes(CAP - 4 - 255)], CAP)
@example(b"t" * 255, [bytes(CAP - 4 - 254)], CAP)
def test_produces_are_written_as_the_oracle_writes_them(topic, contents, cap):
    expected = outcome(oracle.produces, topic, contents, cap)
    assert outcome(answer_batch.encode_produces, topic, contents, cap) == expected


@given(st.lists(st.binary(max_size=CAP), max_size=20), st.integers(0, 2 * CAP))
def test_runs_joined_are_the_whole(contents, max_bytes):
    fitting = [content for content in contents if len(content) <= CAP - 5]
    data, place = b"", 0
    while place < len(contents):
        run, after = answer_batch.encode_run(b"t", contents, place, CAP, max_bytes)
        assert len(run) <= max_bytes or after == place + 1
        assert (after == place) == (len(contents[place]) > CAP - 5)
        data += run
        place = max(after, place + 1)
    assert data == oracle.produces(b"t", fitting, CAP)


@given(st.binary(min_size=15, max_size=17), few, st.integers(-(2**31), 2**31 - 1), st.booleans())
def test_gets_are_written_as_the_oracle_writes_them(subscriber, count, wait, records):
    expected = outcome(oracle.gets, subscriber, count, wait, records)
    assert outcome(answer_batch.encode_gets, subscriber, count, wait, records) == expected
