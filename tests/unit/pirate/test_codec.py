"""The codec, by the golden vectors and by what any frames do to it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import Done, Message, Nothing, Refusal, Request
from polybus.errors import BadFrame
from tests.vectors import pirate as vectors

MIB = 1 << 20
U64 = st.integers(0, 2**64 - 1)
NAMES = st.sampled_from(["t", "a.b/c", "größe", "x" * 255])


@pytest.mark.parametrize("vector", vectors.REQUESTS, ids=str)
def test_requests_are_read_and_written_as_the_vectors_say(vector):
    found = codec.parse(vector.frames)
    assert isinstance(found, Request)
    value = vector.value
    body = bytes.fromhex(value["body"])
    assert (found.op.decode(), found.client) == (value["op"], vectors.CLIENT)
    assert (found.epoch, found.counter, found.topic) == (
        value["epoch"], value["counter"], value["topic"],
    )  # fmt: skip
    assert (b"".join(found.body), found.last) == (body, value["last"])
    if "whatever" not in vector.name:
        assert codec.encode(found) == vector.frames
    assert codec.parse([b"id", b"", *vector.frames], 2) == found


@pytest.mark.parametrize("vector", vectors.MALFORMED, ids=str)
def test_what_is_malformed_says_so(vector):
    found = codec.parse(vector.frames)
    assert isinstance(found, Refusal)
    assert found.code == codec.MALFORMED
    assert found.text.isprintable()


@pytest.mark.parametrize("vector", vectors.REPLIES, ids=str)
def test_replies_are_read_and_written_as_the_vectors_say(vector):
    word, *rest = vector.value
    found = codec.decode(vector.frames)
    if word == "OK":
        assert found == Done(*rest)
        assert codec.done(*rest) == vector.frames
    elif word == "MSG":
        number, timestamp_ns, text = rest
        body = bytes.fromhex(text)
        assert found == Message(number, timestamp_ns, body)
        assert codec.message(number, timestamp_ns, body) == vector.frames
    elif word == "NONE":
        assert found == Nothing()
        assert codec.nothing() == vector.frames
    else:
        assert found == Refusal(*rest)
        assert codec.error(*rest) == vector.frames


def put(*body: bytes) -> Request | Refusal:
    return codec.parse(codec.encode(Request(codec.PUT, b"c", 1, 1, "t", body)))


def test_what_is_too_large_comes_after_what_is_malformed():
    for body in ([bytes(MIB + 1)], [bytes(MIB)] * 64 + [b"x"], [b""] * 4097):
        found = put(*body)
        assert isinstance(found, Refusal)
        assert found.code == codec.TOO_LARGE
        malformed = codec.encode(Request(codec.PUT, b"c", 1, 0, "t", body))
        assert codec.parse(malformed).code == codec.MALFORMED  # type: ignore[union-attr]
    for body in ([bytes(MIB)] * 64, [b""] * 4096):
        assert isinstance(put(*body), Request)


def test_a_body_is_cut_into_full_frames():
    assert codec.cut(b"") == [b""]
    assert [len(one) for one in codec.cut(bytes(MIB))] == [MIB]
    assert [len(one) for one in codec.cut(memoryview(bytes(2 * MIB + 1)))] == [MIB, MIB, 1]


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([b"r", b"", b"x"], 1),
        ([b"r", b"1", b"", b"", b"x"], 2),
        ([b"", b"x"], 0),
        ([b"r", b"x"], -1),
        ([], -1),
        ([b"r"] * 64 + [b""], 64),
        ([b"r"] * 65 + [b""], -1),
        ([bytes([1]) * 16384, b""], 1),
        ([bytes([1]) * 16385, b""], -1),
    ],
)
def test_the_envelope_ends_at_the_first_empty_frame(frames, place):
    assert codec.split(frames) == place


@given(st.lists(st.binary(max_size=12), max_size=10))
def test_any_frames_are_a_request_or_refused(frames):
    found = codec.parse(frames)
    assert isinstance(found, Request | Refusal)
    if isinstance(found, Request) and found.op != codec.GET:
        assert codec.encode(found) == frames


@given(st.lists(st.binary(max_size=12), max_size=6))
def test_any_frames_are_a_reply_or_no_reply_of_a_bus(frames):
    with contextlib.suppress(BadFrame):
        assert isinstance(codec.decode(frames), Done | Message | Nothing | Refusal)


@given(
    st.sampled_from([codec.SUB, codec.UNSUB, codec.PUT]),
    st.binary(min_size=1, max_size=64),
    U64,
    st.integers(1, 2**64 - 1),
    NAMES,
    st.lists(st.binary(max_size=40), min_size=1, max_size=5),
)
def test_what_is_written_is_read(op, client, epoch, counter, topic, body):
    request = Request(op, client, epoch, counter, topic, body if op == codec.PUT else [])
    found = codec.parse(codec.encode(request))
    assert isinstance(found, Request)
    assert found._replace(body=list(found.body)) == request
