"""dialects/rqueue/client/notification_batch against its oracle, on values and on errors."""

from __future__ import annotations

import struct
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from polybus.dialects.rqueue.client import notification_batch as kernel
from tests.rig.oracle import notifications as oracle

CAP = 400

topics = st.binary(min_size=1, max_size=255) | st.sampled_from([b"a", b"b", b"_probe/x"])
contents = st.binary(max_size=120)


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">IB", len(payload), kind) + payload


def named(topic: bytes) -> bytes:
    return bytes([len(topic)]) + topic


notes = st.builds(lambda topic, content: frame(7, named(topic) + content), topics, contents)
parts = st.builds(
    lambda topic, message_id, index, more, chunk: frame(
        8, named(topic) + message_id + struct.pack(">HH", index, index + more) + chunk
    ),
    topics,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 1000),
    st.integers(1, 1000),
    contents,
)
others = st.builds(frame, st.integers(9, 255) | st.sampled_from([0, 1, 2, 5]), contents)
# Frames that break a rule, and frames that look as if.
odd = st.one_of(
    st.builds(frame, st.sampled_from([7, 8]), st.binary(max_size=30)),
    # A topic length that may or may not fit the bytes after it.
    st.builds(
        lambda kind, length, rest: frame(kind, bytes([length]) + rest),
        st.sampled_from([7, 8]),
        st.integers(0, 12),
        st.binary(max_size=12) | st.binary(min_size=18, max_size=32),
    ),
    st.builds(
        lambda size, kind: struct.pack(">IB", size, kind),
        st.integers(0, 2**32 - 1),
        st.integers(0, 255),
    ),
    st.binary(max_size=10),
)
streams = st.lists(notes | parts | others, max_size=20).map(b"".join)
spoilt = st.tuples(streams, odd, streams).map(b"".join)


def in_order(batch: kernel.NotificationBatch) -> list[oracle.Notification | oracle.Part]:
    """Messages and parts as one list, in the order of the wire.

    The kernel keeps them apart. A whole message takes the place of a part and
    keeps its content object, so marking every part shows where each lay.
    """
    parts = batch.parts()
    marks = [b"mark of part %d" % number for number in range(len(parts))]
    marked = batch.with_wholes(dict(enumerate(marks)))
    part_of = {id(mark): part for mark, part in zip(marks, parts, strict=True)}
    found: list[oracle.Notification | oracle.Part] = []
    for message in marked:
        part = part_of.get(id(message.content))
        if part is None:
            found.append(oracle.Notification(message.topic, message.content))
        else:
            found.append(
                oracle.Part(part.topic, part.message_id, part.index, part.count, part.chunk)
            )
    return found


def drip(data: bytes, cuts: list[int]) -> tuple[int, list[object], str | None]:
    """Feed `data` in pieces, as a client's buffer does: unread bytes are passed again."""
    found: list[object] = []
    consumed = 0
    for end in sorted({*(cut % (len(data) + 1) for cut in cuts), len(data)}):
        took, batch, bad = kernel.scan(data, consumed, end, CAP)
        found += in_order(batch)
        consumed += took
        if bad is not None:
            return consumed, found, bad
    return consumed, found, None


@given(streams | spoilt | st.binary(max_size=60))
@example(b"")
@example(frame(7, b""))
@example(frame(8, b"\x01a" + bytes(20)))
@example(struct.pack(">IB", CAP, 9) + bytes(CAP))
@example(struct.pack(">IB", CAP + 1, 9))
def test_scan_agrees_with_the_oracle(data):
    consumed, batch, bad = kernel.scan(data, 0, len(data), CAP)
    assert (consumed, in_order(batch), bad) == oracle.scan(data, 0, len(data), CAP)


@given(streams | spoilt, st.lists(st.integers(0, 10_000), max_size=10))
def test_where_the_stream_is_cut_makes_no_difference(data, cuts):
    assert drip(data, cuts) == oracle.scan(data, 0, len(data), CAP)


@given(streams | spoilt)
def test_a_byte_at_a_time(data):
    assert drip(data, list(range(len(data)))) == oracle.scan(data, 0, len(data), CAP)


@given(streams, st.sampled_from([b"a", b"_probe/x"]))
def test_a_topic_is_taken_out_in_order(data, topic):
    batch = kernel.scan(data, 0, len(data), CAP)[1]
    rest, taken = batch.without(topic)
    everything = oracle.scan(data, 0, len(data), CAP)[1]
    ours = [
        one for one in everything if isinstance(one, oracle.Notification) and one.topic == topic
    ]
    assert taken == [one.content for one in ours]
    assert in_order(rest) == [one for one in everything if one not in ours]
    assert rest.total_bytes == sum(map(len, rest.contents()))


@given(streams, st.slices(20))
def test_slices_are_those_of_a_list(data, key):
    batch = kernel.scan(data, 0, len(data), CAP)[1]
    assert list(batch[key]) == list(batch)[key]


def outcome(encode: Callable[..., bytes], *args: object) -> bytes | type[Exception]:
    try:
        return encode(*args)
    except (OverflowError, ValueError) as error:
        return type(error)


@given(
    st.binary(max_size=260),
    st.lists(st.binary(max_size=CAP) | st.binary().map(bytearray), max_size=20),
    st.integers(0, CAP),
)
@example(b"t" * 255, [bytes(CAP - 6 - 255)], CAP)
@example(b"t" * 255, [bytes(CAP - 6 - 254)], CAP)
def test_publishes_are_written_as_the_oracle_writes_them(topic, contents, cap):
    assert outcome(kernel.encode_publishes, topic, contents, cap) == outcome(
        oracle.publishes, topic, contents, cap
    )


@given(st.lists(st.binary(max_size=CAP), max_size=20), st.integers(0, 2 * CAP))
def test_runs_joined_are_the_whole(contents, max_bytes):
    fitting = [content for content in contents if len(content) <= CAP - 7]
    data, place = b"", 0
    while place < len(contents):
        run, after = kernel.encode_run(b"t", contents, place, CAP, max_bytes)
        assert len(run) <= max_bytes or after == place + 1
        assert (after == place) == (len(contents[place]) > CAP - 7)
        data += run
        place = max(after, place + 1)
    assert data == oracle.publishes(b"t", fitting, CAP)
