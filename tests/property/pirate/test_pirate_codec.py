"""The codec refuses and parses any frames as the model does, and round-trips."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.dialects.pirate import codec
from tests.rig.pirate import wire
from tests.rig.pirate.model import Model
from tests.rig.pirate.model_server import reply_frames

MIB = 1 << 20
OPS = (wire.HELLO, wire.SUB, wire.UNSUB, wire.PUT, wire.GET)
NUMBERS = (0, 1, 2**63, 2**64 - 1)
# Valid and invalid values for each frame of a request.
PLACES: tuple[tuple[bytes, ...], ...] = (
    (b"", b"PIR2", b"pir1", b"PIR1 "),
    (*OPS, b"", b"get", b"PUT ", b"\xff"),
    (b"c" * 64, b"\0", b"", b"c" * 65),
    (*map(wire.number, NUMBERS), b"", bytes(7), bytes(9)),
    (*map(wire.number, NUMBERS), b"", bytes(7), bytes(9)),
    (
        *(b"", b"t" * 255, b"t" * 256, b"_t", b"a,b", b"a*b", b"a\nb", b"a\x7fb", b"a.b/c-d"),
        *("ü €".encode(), "\x85".encode(), b"\xff", b"\xed\xa0\x80", "é".encode()[:1]),
    ),
)
OWN = (b"", b"x", bytes(7), bytes(8), bytes(9), bytes(MIB), bytes(MIB + 1))
SPOILING = st.integers(0, len(PLACES) - 1).flatmap(
    lambda place: st.tuples(st.just(place), st.sampled_from(PLACES[place]))
)
LARGEST = [bytes(MIB)] * 64


def good(op: bytes) -> wire.Frames:
    if op == wire.HELLO:
        return wire.hello(b"c", 7)
    if op == wire.GET:
        return wire.get(b"c", 1, "t", 0)
    return wire.counted(op, b"c", 1, 1, "t", *([b"x"] if op == wire.PUT else []))


def spoiled(op: bytes, spoilings: list[tuple[int, bytes]], own: list[bytes] | None) -> wire.Frames:
    """A good request with a few frames changed, and perhaps other frames of its own."""
    frames = good(op)
    for place, frame in spoilings:
        frames[place] = frame
    return frames if own is None else [*frames[:6], *own]


REQUESTS = st.builds(
    spoiled,
    st.sampled_from(OPS),
    st.lists(SPOILING, max_size=2),
    st.none() | st.lists(st.sampled_from(OWN), max_size=3),
)


def code_of_the_model(frames: wire.Frames) -> object:
    """MALFORMED or TOO_LARGE, if it is; a client that the model knows would be FENCED at worst."""
    word, *rest = Model().answer(frames)
    return rest[0] if word == "ERR" and rest[0] in ("MALFORMED", "TOO_LARGE") else None


def code_of_the_codec(frames: wire.Frames) -> object:
    found = codec.parse_request(frames)
    return found.code if isinstance(found, codec.ErrorReply) else None


def put(*body: bytes) -> wire.Frames:
    return wire.counted(wire.PUT, b"c", 1, 1, "t", *body)


@settings(max_examples=300)
@given(REQUESTS)
def test_codec_refuses_the_same_frames_as_the_model(frames):
    assert code_of_the_codec(frames) == code_of_the_model(frames)


def test_largest_body_passes_and_a_larger_one_does_not():
    assert code_of_the_codec(put(*LARGEST)) is None
    for body in ([*LARGEST, b"x"], [bytes(64 * MIB + 1)], [b"x", bytes(MIB + 1)]):
        assert code_of_the_codec(put(*body)) == code_of_the_model(put(*body)) == "TOO_LARGE"


@given(REQUESTS, st.integers(0, 5))
def test_short_requests_are_malformed(frames, size):
    assert code_of_the_codec(frames[:size]) == "MALFORMED"


@given(
    st.sampled_from([codec.SUB, codec.UNSUB, codec.PUT, codec.GET]),
    st.binary(min_size=1, max_size=64),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**63 - 1),
    st.sampled_from(["t", "ü €", "t" * 255]),
    st.lists(st.binary(max_size=20), min_size=1, max_size=4),
    st.integers(0, 2**64 - 1),
)
def test_requests_round_trip(op, client, epoch, counter, topic, body, last):
    plain = codec.ClientRequest(op, client, epoch, 0 if op == codec.GET else counter, topic)
    own = {codec.PUT: {"body": body}, codec.GET: {"last": last}}.get(op, {})
    request = plain._replace(**own)
    found = codec.parse_request([b"envelope", b"", *codec.encode_request(request)], 2)
    assert not isinstance(found, codec.ErrorReply)
    assert found._replace(body=list(found.body)) == request._replace(body=list(request.body))
    assert codec.encode_request(request) == by_hand(request)


def by_hand(request: codec.ClientRequest) -> wire.Frames:
    _, client, epoch, counter, topic, body, last = request
    if request.op == codec.GET:
        return wire.get(client, epoch, topic, last)
    return wire.counted(request.op, client, epoch, counter, topic, *body)


ANSWERS: list[tuple[wire.Answer, codec.Reply]] = [
    (("OK", 3, 2**64 - 1), codec.OkReply(3, 2**64 - 1)),
    (("NONE",), codec.EmptyReply()),
    (("ERR", "STALE"), codec.ErrorReply("STALE", "as the model says")),
]


def test_replies_match_the_model():
    for answer, reply in ANSWERS:
        assert codec.decode_reply(reply_frames(answer)) == reply
    assert wire.read_answer(codec.encode_ok(3, 4)) == ("OK", 3, 4)
    assert wire.read_answer(codec.encode_none()) == ("NONE",)
    assert wire.read_answer(codec.encode_error("BUSY", "wait")) == ("ERR", "BUSY")


@given(st.sampled_from([0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 5]))
def test_body_is_split_into_full_frames(size):
    body = bytes(range(256)) * (size // 256 + 1)
    body = body[:size]
    assert wire.read_answer(codec.encode_message(7, 5, body)) == ("MSG", 7, body)
    found = codec.decode_reply(codec.encode_message(7, 5, body))
    assert found == codec.MessageReply(7, 5, body)
