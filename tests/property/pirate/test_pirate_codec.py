"""The codec says of any frames what the model says of them, and reads what it writes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from polybus.dialects.pirate import codec
from polybus.testing.pirate import wire
from polybus.testing.pirate.model import Model
from polybus.testing.pirate.modelserver import reply_frames

MIB = 1 << 20
# What is right stands often among what is not, so that more than one frame can be right.
NUMBERS = st.sampled_from(
    [wire.number(1)] * 8
    + [wire.number(0), wire.number(2**63), wire.number(2**64 - 1), b"", bytes(7), bytes(9)]
)
VERSIONS = st.sampled_from([wire.VERSION] * 12 + [b"", b"PIR2", b"pir1", b"PIR1 "])
OPS = st.sampled_from(
    [wire.HELLO, wire.SUB, wire.UNSUB, wire.PUT, wire.GET] * 4 + [b"", b"get", b"PUT ", b"\xff"]
)
CLIENTS = st.sampled_from([b"c", b"\0", b"c" * 64] * 4 + [b"", b"c" * 65])
TOPICS = st.sampled_from(
    [b"t", b"t" * 255, "ü €".encode(), b"a.b/c-d"] * 4
    + [b"", b"", b"t" * 256, b"_t", b"a,b", b"a*b", b"a\nb", b"a\x7fb", "\x85".encode()]
    + [b"\xff", b"\xed\xa0\x80", "é".encode()[:1]]
)
OWN = st.lists(
    st.sampled_from([b"", b"x", bytes(7), bytes(8), bytes(9)] * 3 + [bytes(MIB), bytes(MIB + 1)]),
    max_size=3,
)
HEADS = st.tuples(VERSIONS, OPS, CLIENTS, NUMBERS, NUMBERS, TOPICS)
LARGEST = [bytes(MIB)] * 64


def code_of_the_model(frames: wire.Frames) -> object:
    """MALFORMED or TOO_LARGE, if it is; a client that the model knows would be FENCED at worst."""
    word, *rest = Model().answer(frames)
    return rest[0] if word == "ERR" and rest[0] in ("MALFORMED", "TOO_LARGE") else None


def code_of_the_codec(frames: wire.Frames) -> object:
    found = codec.parse(frames)
    return found.code if isinstance(found, codec.Refusal) else None


def put(*body: bytes) -> wire.Frames:
    return wire.counted(wire.PUT, b"c", 1, 1, "t", *body)


@given(st.builds(lambda head, own: [*head, *own], HEADS, OWN))
@example(put(*LARGEST))
@example(put(*LARGEST, b"x"))
@example(put(bytes(64 * MIB + 1)))
def test_the_codec_refuses_what_the_model_refuses(frames):
    assert code_of_the_codec(frames) == code_of_the_model(frames)


@given(HEADS, st.integers(0, 5))
def test_what_is_too_short_is_malformed(head, size):
    assert code_of_the_codec(list(head[:size])) == "MALFORMED"


@given(
    st.sampled_from([codec.SUB, codec.UNSUB, codec.PUT, codec.GET]),
    st.binary(min_size=1, max_size=64),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**63 - 1),
    st.sampled_from(["t", "ü €", "t" * 255]),
    st.lists(st.binary(max_size=20), min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
)
def test_a_request_is_read_as_it_was_written(op, client, epoch, counter, topic, body, last):
    plain = codec.Request(op, client, epoch, 0 if op == codec.GET else counter, topic)
    own = {codec.PUT: {"body": body}, codec.GET: {"last": last}}.get(op, {})
    request = plain._replace(**own)
    found = codec.parse([b"envelope", b"", *codec.encode(request)], 2)
    assert not isinstance(found, codec.Refusal)
    assert found._replace(body=list(found.body)) == request._replace(body=list(request.body))
    assert codec.encode(request) == by_hand(request)


def by_hand(request: codec.Request) -> wire.Frames:
    _, client, epoch, counter, topic, body, last = request
    if request.op == codec.GET:
        return wire.get(client, epoch, topic, last)
    return wire.counted(request.op, client, epoch, counter, topic, *body)


ANSWERS: list[tuple[wire.Answer, codec.Reply]] = [
    (("OK", 3, 2**64 - 1), codec.Done(3, 2**64 - 1)),
    (("NONE",), codec.Nothing()),
    (("ERR", "STALE"), codec.Refusal("STALE", "as the model says")),
]


def test_answers_are_those_of_the_model():
    for answer, reply in ANSWERS:
        assert codec.decode(reply_frames(answer)) == reply
    assert wire.read_answer(codec.done(3, 4)) == ("OK", 3, 4)
    assert wire.read_answer(codec.nothing()) == ("NONE",)
    assert wire.read_answer(codec.error("BUSY", "wait")) == ("ERR", "BUSY")


@given(st.sampled_from([0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 5]))
def test_a_body_is_cut_into_full_frames(size):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    assert wire.read_answer(codec.message(7, 5, body)) == ("MSG", 7, body)
    found = codec.decode(codec.message(7, 5, body))
    assert found == codec.Message(7, 5, body)
