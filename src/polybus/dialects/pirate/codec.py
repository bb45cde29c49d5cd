"""Pirate messages: values to frames and back. No I/O, no clock, no sockets.

    request  =  envelope | "" | PIR1 | op | client | epoch | counter | topic | own frames
    reply    =  envelope | "" | word | its own frames

Numbers are 8 bytes, big-endian. All frames before the first empty one are the envelope, which
is returned unchanged. The form of a request is checked here only, before anything is looked up
or stored. An invalid request is an `ErrorReply` with MALFORMED, or with TOO_LARGE if only its
body is too large.

docs/spec/pirate.md has the whole format, with its reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple

from polybus.errors import BadFrame, InvalidTopic
from polybus.model import topic_name

VERSION: Final = b"PIR1"
HELLO, SUB, UNSUB, PUT, GET = b"HELLO", b"SUB", b"UNSUB", b"PUT", b"GET"
OPS: Final = frozenset({HELLO, SUB, UNSUB, PUT, GET})
OK, MSG, NONE, ERR = b"OK", b"MSG", b"NONE", b"ERR"

MALFORMED, TOO_LARGE, DENIED = "MALFORMED", "TOO_LARGE", "DENIED"
FENCED, STALE, BUSY = "FENCED", "STALE", "BUSY"
NO_TOPIC, NOT_SUBSCRIBED = "NO_TOPIC", "NOT_SUBSCRIBED"
CODES: Final = (MALFORMED, TOO_LARGE, DENIED, FENCED, STALE, NO_TOPIC, NOT_SUBSCRIBED, BUSY)

MAX_CLIENT_BYTES: Final = 64
MAX_FRAME_BYTES: Final = 1 << 20
MAX_MESSAGE_BYTES: Final = 64 << 20
SEALED_BYTES: Final = 33  # added to each frame by CURVE; libzmq counts them
# 64 frames of the largest size hold the largest message. This many allow frames of a few kB,
# and reading one message never blocks other connections for long.
MAX_BODY_FRAMES: Final = 4096
# Each proxy adds a routing id of at most 255 bytes. No deployment has so many.
MAX_ENVELOPE_FRAMES: Final = 64
MAX_ENVELOPE_BYTES: Final = 16 << 10
KNOWN_NAMES: Final = 4096  # cached valid topic names, at most 300 bytes each

HEAD_FRAMES: Final = 6  # version, op, client, epoch, counter, topic
NUMBER_BYTES: Final = 8
_NUMBER = Struct(">Q")


class ClientRequest(NamedTuple):
    """A request. `counter` is the random number of a HELLO, and 0 for GET."""

    op: bytes
    client: bytes
    epoch: int = 0
    counter: int = 0
    topic: str = ""
    body: Sequence[bytes] = ()
    last: int = 0


class ErrorReply(NamedTuple):
    """`ERR`: one of `CODES`, and a message for people."""

    code: str
    text: str


class OkReply(NamedTuple):
    """`OK`: epoch and counter for HELLO, else the counter and the result."""

    first: int
    second: int


class MessageReply(NamedTuple):
    """`MSG`: the reply to a GET with a message."""

    id: int
    timestamp_ns: int
    body: bytes


class EmptyReply(NamedTuple):
    """`NONE`: the reply to a GET without an unread message."""


_TOO_LONG = ErrorReply(
    MALFORMED, f"a topic name must have at most {topic_name.MAX_NAME_BYTES} bytes"
)

Reply = OkReply | MessageReply | EmptyReply | ErrorReply


# --- requests


def envelope_end(frames: Sequence[bytes]) -> int:
    """Return the index of the first empty frame, which ends the envelope; -1 if invalid."""
    try:
        place = frames.index(b"")
    except ValueError:
        return -1
    if place > MAX_ENVELOPE_FRAMES or sum(map(len, frames[:place])) > MAX_ENVELOPE_BYTES:
        return -1
    return place


def parse_request(frames: Sequence[bytes], start: int = 0) -> ClientRequest | ErrorReply:
    """Return the request in frames[start:], or the error that it is refused with."""
    head = frames[start : start + HEAD_FRAMES]
    problem = _problem(head)
    if problem is not None:
        return ErrorReply(MALFORMED, problem)
    _, op, client, epoch, counter, topic = head
    own = frames[start + HEAD_FRAMES :]
    if op == HELLO:
        if own or topic or int.from_bytes(epoch):
            text = "HELLO must have epoch 0, no topic and no frames of its own"
            return ErrorReply(MALFORMED, text)
        return ClientRequest(HELLO, client, 0, int.from_bytes(counter))
    name = _name(topic) if len(topic) <= topic_name.MAX_NAME_BYTES else _TOO_LONG
    if isinstance(name, ErrorReply):
        return name
    number = int.from_bytes(epoch)
    if op == GET:
        if len(own) != 1 or len(own[0]) != NUMBER_BYTES:
            text = f"GET must have one frame of its own: LAST, {NUMBER_BYTES} bytes"
            return ErrorReply(MALFORMED, text)
        return ClientRequest(GET, client, number, 0, name, (), int.from_bytes(own[0]))
    count = int.from_bytes(counter)
    if not count:
        return ErrorReply(MALFORMED, "the counter must be >= 1")
    if op == PUT:
        return _put(client, number, count, name, own)
    if own:
        return ErrorReply(MALFORMED, f"{op.decode()} must have no frames of its own")
    return ClientRequest(op, client, number, count, name)


def _problem(head: Sequence[bytes]) -> str | None:
    if len(head) < HEAD_FRAMES:
        return f"a request must have at least {HEAD_FRAMES} frames"
    version, op, client, epoch, counter, _ = head
    if version != VERSION:
        return f"the first frame must be {VERSION.decode()}"
    if op not in OPS:
        return "the second frame must be HELLO, SUB, UNSUB, PUT or GET"
    if not 1 <= len(client) <= MAX_CLIENT_BYTES:
        return f"a client id must have 1 to {MAX_CLIENT_BYTES} bytes"
    if len(epoch) != NUMBER_BYTES or (len(counter) != NUMBER_BYTES and op != GET):
        return f"epoch and counter must be {NUMBER_BYTES} bytes, big-endian"
    return None


@lru_cache(KNOWN_NAMES)
def _name(topic: bytes) -> str | ErrorReply:
    try:
        name = topic.decode()
        topic_name.check_topic_name(name)
    except UnicodeDecodeError:
        return ErrorReply(MALFORMED, "a topic name must be UTF-8")
    except InvalidTopic as error:
        return ErrorReply(MALFORMED, str(error))
    return name


def _put(
    client: bytes, epoch: int, counter: int, name: str, own: Sequence[bytes]
) -> ClientRequest | ErrorReply:
    if not own:
        return ErrorReply(MALFORMED, "PUT must have at least one frame of its own: the body")
    if len(own) > MAX_BODY_FRAMES:
        return ErrorReply(
            TOO_LARGE, f"a body must have at most {MAX_BODY_FRAMES} frames, got {len(own)}"
        )
    size = 0
    for frame in own:
        size += len(frame)
        if len(frame) > MAX_FRAME_BYTES:
            return ErrorReply(
                TOO_LARGE, f"a frame of a body must have at most {MAX_FRAME_BYTES} bytes"
            )
    if size > MAX_MESSAGE_BYTES:
        return ErrorReply(
            TOO_LARGE, f"a message must have at most {MAX_MESSAGE_BYTES} bytes, got {size}"
        )
    return ClientRequest(PUT, client, epoch, counter, name, own)


def encode_request(request: ClientRequest) -> list[bytes]:
    """Return the frames of a request, without its envelope."""
    own = [u64(request.last)] if request.op == GET else list(request.body)
    epoch, counter = u64(request.epoch), u64(request.counter)
    return [VERSION, request.op, request.client, epoch, counter, request.topic.encode(), *own]


# --- replies


def encode_ok(first: int, second: int) -> list[bytes]:
    return [OK, u64(first), u64(second)]


def encode_message(message_id: int, timestamp_ns: int, body: bytes | memoryview) -> list[bytes]:
    return [MSG, u64(message_id), u64(timestamp_ns), *split_body(body)]


def encode_none() -> list[bytes]:
    return [NONE]


def encode_error(code: str, text: str) -> list[bytes]:
    return [ERR, code.encode(), text.encode("utf-8", "backslashreplace")]


def decode_reply(frames: Sequence[bytes]) -> Reply:
    """Return the reply in frames without their envelope. Raises `BadFrame`."""
    word, own = (frames[0], frames[1:]) if frames else (b"", ())
    if word == OK and len(own) == 2:
        return OkReply(_u64(own[0]), _u64(own[1]))
    if word == MSG and len(own) >= 3:
        return MessageReply(_u64(own[0]), _u64(own[1]), b"".join(own[2:]))
    if word == NONE and not own:
        return EmptyReply()
    if word == ERR and len(own) == 2:
        return ErrorReply(own[0].decode("ascii", "replace"), own[1].decode("utf-8", "replace"))
    raise BadFrame("unknown_reply")


# --- numbers and bodies


def u64(number: int) -> bytes:
    return _NUMBER.pack(number)


def _u64(frame: bytes) -> int:
    if len(frame) != NUMBER_BYTES:
        raise BadFrame("bad_number")
    return int.from_bytes(frame)


def split_body(body: bytes | memoryview) -> list[bytes]:
    """Split a body into frames of at most 1 MiB. An empty body is one empty frame."""
    if len(body) <= MAX_FRAME_BYTES:
        return [bytes(body)]
    view = memoryview(body)
    starts = range(0, len(view), MAX_FRAME_BYTES)
    return [bytes(view[start : start + MAX_FRAME_BYTES]) for start in starts]
