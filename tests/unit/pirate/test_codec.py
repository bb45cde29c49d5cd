"""The codec, by the golden vectors and by random frames."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polybus.dialects.pirate import codec
from polybus.dialects.pirate.codec import (
    ClientRequest,
    EmptyReply,
    ErrorReply,
    MessageReply,
    OkReply,
)
from polybus.errors import BadFrame
from tests.vectors import pirate as vectors

MIB = 1 << 20
U64 = st.integers(0, 2**64 - 1)
NAMES = st.sampled_from(["t", "a.b/c", "größe", "x" * 255])


@pytest.mark.parametrize("vector", vectors.REQUESTS, ids=str)
def test_requests_match_the_vectors(vector):
    found = codec.parse_request(vector.frames)
    assert isinstance(found, ClientRequest)
    value = vector.value
    body = bytes.fromhex(value["body"])
    assert (found.op.decode(), found.client) == (value["op"], vectors.CLIENT)
    assert (found.epoch, found.counter, found.topic) == (
        value["epoch"], value["counter"], value["topic"],
    )  # fmt: skip
    assert (b"".join(found.body), found.last) == (body, value["last"])
    if "whatever" not in vector.name:
        assert codec.encode_request(found) == vector.frames
    assert codec.parse_request([b"id", b"", *vector.frames], 2) == found


@pytest.mark.parametrize("vector", vectors.MALFORMED, ids=str)
def test_malformed_requests_are_refused_with_a_text(vector):
    found = codec.parse_request(vector.frames)
    assert isinstance(found, ErrorReply)
    assert found.code == codec.MALFORMED
    assert found.text.isprintable()


@pytest.mark.parametrize("vector", vectors.REPLIES, ids=str)
def test_replies_match_the_vectors(vector):
    word, *rest = vector.value
    found = codec.decode_reply(vector.frames)
    if word == "OK":
        assert found == OkReply(*rest)
        assert codec.encode_ok(*rest) == vector.frames
    elif word == "MSG":
        number, timestamp_ns, text = rest
        body = bytes.fromhex(text)
        assert found == MessageReply(number, timestamp_ns, body)
        assert codec.encode_message(number, timestamp_ns, body) == vector.frames
    elif word == "NONE":
        assert found == EmptyReply()
        assert codec.encode_none() == vector.frames
    else:
        assert found == ErrorReply(*rest)
        assert codec.encode_error(*rest) == vector.frames


def put(*body: bytes) -> ClientRequest | ErrorReply:
    return codec.parse_request(
        codec.encode_request(ClientRequest(codec.PUT, b"c", 1, 1, "t", body))
    )


def test_malformed_wins_over_too_large():
    for body in ([bytes(MIB + 1)], [bytes(MIB)] * 64 + [b"x"], [b""] * 4097):
        found = put(*body)
        assert isinstance(found, ErrorReply)
        assert found.code == codec.TOO_LARGE
        malformed = codec.encode_request(ClientRequest(codec.PUT, b"c", 1, 0, "t", body))
        assert codec.parse_request(malformed).code == codec.MALFORMED  # type: ignore[union-attr]
    for body in ([bytes(MIB)] * 64, [b""] * 4096):
        assert isinstance(put(*body), ClientRequest)


def test_body_is_split_into_full_frames():
    assert codec.split_body(b"") == [b""]
    assert [len(one) for one in codec.split_body(bytes(MIB))] == [MIB]
    assert [len(one) for one in codec.split_body(memoryview(bytes(2 * MIB + 1)))] == [MIB, MIB, 1]


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
def test_envelope_ends_at_the_first_empty_frame(frames, place):
    assert codec.envelope_end(frames) == place


@given(st.lists(st.binary(max_size=12), max_size=10))
def test_any_frames_are_parsed_or_refused(frames):
    found = codec.parse_request(frames)
    assert isinstance(found, ClientRequest | ErrorReply)
    if isinstance(found, ClientRequest) and found.op != codec.GET:
        assert codec.encode_request(found) == frames


@given(st.lists(st.binary(max_size=12), max_size=6))
def test_any_frames_are_a_reply_or_bad_frame(frames):
    with contextlib.suppress(BadFrame):
        assert isinstance(
            codec.decode_reply(frames), OkReply | MessageReply | EmptyReply | ErrorReply
        )


@given(
    st.sampled_from([codec.SUB, codec.UNSUB, codec.PUT]),
    st.binary(min_size=1, max_size=64),
    U64,
    st.integers(1, 2**64 - 1),
    NAMES,
    st.lists(st.binary(max_size=40), min_size=1, max_size=5),
)
def test_encoded_requests_and_replies_decode_to_themselves(op, client, epoch, counter, topic, body):
    request = ClientRequest(op, client, epoch, counter, topic, body if op == codec.PUT else [])
    found = codec.parse_request(codec.encode_request(request))
    assert isinstance(found, ClientRequest)
    assert found._replace(body=list(found.body)) == request
