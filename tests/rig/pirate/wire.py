"""The wire of docs/spec/pirate.md, written a second time.

The checks of the server share no code with it. Answers become plain tuples that tests
compare: ("OK", 1, 7), ("MSG", 3, b"body"), ("NONE",), ("ERR", "STALE"). Timestamps and error
texts, which no model can predict, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

VERSION: Final = b"PIR1"
HELLO, SUB, UNSUB, PUT, GET = b"HELLO", b"SUB", b"UNSUB", b"PUT", b"GET"
COUNTED: Final = (SUB, UNSUB, PUT)

MAX_FRAME: Final = 1 << 20
MAX_BODY: Final = 64 << 20

Frames = list[bytes]
Answer = tuple[object, ...]
NONE: Final[Answer] = ("NONE",)


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def value(frame: bytes) -> int:
    assert len(frame) == 8, f"a number has 8 bytes: {frame!r}"
    return int.from_bytes(frame, "big")


def error(code: str) -> Answer:
    return ("ERR", code)


def hello(client: bytes, nonce: int) -> Frames:
    return [VERSION, HELLO, client, number(0), number(nonce), b""]


def counted(op: bytes, client: bytes, epoch: int, counter: int, topic: str, *body: bytes) -> Frames:
    """SUB, UNSUB or PUT."""
    return [VERSION, op, client, number(epoch), number(counter), topic.encode(), *body]


def in_frames(body: bytes) -> Frames:
    """A body in as few frames as it can have."""
    return [body[at : at + MAX_FRAME] for at in range(0, max(1, len(body)), MAX_FRAME)]


def get(client: bytes, epoch: int, topic: str, last: int, ignored: bytes = bytes(8)) -> Frames:
    return [VERSION, GET, client, number(epoch), ignored, topic.encode(), number(last)]


def read_answer(frames: Sequence[bytes]) -> Answer:
    """Return an answer as a tuple. Raises AssertionError if it is malformed."""
    word, *rest = frames
    if word == b"OK":
        assert len(rest) == 2, f"OK has two numbers: {rest}"
        return ("OK", value(rest[0]), value(rest[1]))
    if word == b"MSG":
        return _message(rest)
    if word == b"NONE":
        assert not rest, f"NONE is all: {rest}"
        return NONE
    assert word == b"ERR", f"no such answer: {frames!r}"
    code, text = rest
    assert text.decode().isprintable(), f"the text of an error is for people: {text!r}"
    return error(code.decode("ascii"))


def _message(rest: Sequence[bytes]) -> Answer:
    identity, timestamp_ns, *body = rest
    assert value(timestamp_ns) > 0, "a message has its time"
    assert body, "a body has at least one frame"
    assert all(len(frame) == MAX_FRAME for frame in body[:-1]), "all frames but the last are full"
    assert len(body[-1]) <= MAX_FRAME, "no frame is longer"
    assert body[-1] or len(body) == 1, "only an empty body has an empty frame"
    return ("MSG", value(identity), b"".join(body))
