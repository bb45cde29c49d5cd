"""Plain versions of Freud's request_scanner, answer_encoder and answer_batch.

Written from docs/spec/freud.md. Here every request is one value and nothing is
grouped: tests take the kernel's groups apart and compare. Whether a name is good is
decided here from the spec alone, with no help from polybus.model.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

RESERVED = b"\x00FREUD\x00"
ESCAPE = b"\x00FREUD\x00BODY\x00"
NAME_ALONE = {0, 1, 2, 7}  # Create, Delete, Subscribe, Count Subscribers


@dataclass(frozen=True)
class Produce:
    topic: bytes
    body: bytes


@dataclass(frozen=True)
class Get:
    subscriber: bytes
    max_blocking_s: int
    record: bool


@dataclass(frozen=True)
class Request:
    type: int
    subject: bytes


@dataclass(frozen=True)
class Malformed:
    reason: str
    closes: bool


One = Produce | Get | Request | Malformed


class Broken(Exception):
    """The request breaks a rule; the text is the rule's stable name."""


# --- the server's side -------------------------------------------------------


def scan(data: bytes, max_frame_bytes: int, *, with_header: bool = False) -> tuple[int, list[One]]:
    """(bytes consumed, the requests in them and what ended it, if it ended)."""
    found: list[One] = []
    consumed = 0
    while len(data) - consumed >= 8:
        kind, length = struct.unpack_from("<II", data, consumed)
        if with_header:
            length -= 4 if kind == 5 else 8
        if length < 0:
            return consumed, [*found, Malformed("too_short", closes=True)]
        if length > max_frame_bytes:
            return consumed, [*found, Malformed("too_large", closes=True)]
        payload = data[consumed + 8 : consumed + 8 + length]
        if len(payload) < length:
            break
        try:
            found.append(request(kind, payload))
        except Broken as broken:
            found.append(Malformed(str(broken), closes=False))
        consumed += 8 + length
    return consumed, found


def request(kind: int, payload: bytes) -> One:
    if kind in NAME_ALONE:
        topic, rest = name_and_rest(payload)
        return Request(kind, good_name(sized(topic, len(topic), rest)))
    if kind == 3:
        return Request(kind, sized(payload[:16], 16, payload[16:]))
    if kind == 4:
        topic, body = name_and_rest(payload)
        return Produce(good_name(topic), body)
    if kind in (5, 8):
        sized(payload[:20], 20, payload[20:])
        subscriber, max_blocking_s = struct.unpack("<16si", payload)
        return Get(subscriber, max_blocking_s, kind == 8)
    if kind == 6:
        return Request(kind, sized(b"", 0, payload))
    raise Broken("unknown_type")


def sized(field: bytes, size: int, rest: bytes) -> bytes:
    """Return the last field of a request. Raises Broken if it is cut or bytes follow it."""
    if len(field) < size:
        raise Broken("truncated")
    if rest:
        raise Broken("trailing_bytes")
    return field


def name_and_rest(payload: bytes) -> tuple[bytes, bytes]:
    if len(payload) < 4:
        raise Broken("truncated")
    size = int.from_bytes(payload[:4], "little")
    if len(payload) - 4 < size:
        raise Broken("truncated")
    return payload[4 : 4 + size], payload[4 + size :]


def good_name(raw: bytes) -> bytes:
    if not is_name(raw):
        raise Broken("bad_name")
    return raw


def is_name(raw: bytes) -> bool:
    """1 to 255 bytes UTF-8, no control characters, no comma, no `*`, not starting with `_`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    forbidden = [char for char in text if char in ",*" or unicodedata.category(char) == "Cc"]
    return 1 <= len(raw) <= 255 and not forbidden and text[0] != "_"


def answers(code: int, count: int, payload: bytes = b"") -> bytes:
    if count < 0:
        raise ValueError("count")
    return answer(code, payload) * count


def produced(first_id: int, count: int) -> bytes:
    if count < 0:
        raise ValueError("count")
    ids = range(first_id, first_id + count)
    return b"".join(answer(0, (one % 2**64).to_bytes(8, "little")) for one in ids)


def escaped(body: bytes) -> bytes:
    """The payload of a Get Message: no body looks like a notice."""
    return ESCAPE + body if body.startswith(RESERVED) else body


def messages(offsets: Sequence[int], bodies: bytes, start: int, count: int) -> bytes:
    return b"".join(answer(0, body) for body in stored(offsets, bodies, start, count))


def records(
    first_id: int,
    times_ns: Sequence[int],
    flags: int,
    offsets: Sequence[int],
    bodies: bytes,
    start: int,
    count: int,
) -> bytes:
    found = stored(offsets, bodies, start, count)
    if start + count > len(times_ns):
        raise ValueError("times")
    heads = [
        struct.pack("<QQI", (first_id + place) % 2**64, times_ns[place], flags)
        for place in range(start, start + count)
    ]
    return b"".join(answer(0, head + body) for head, body in zip(heads, found, strict=True))


def stored(offsets: Sequence[int], bodies: bytes, start: int, count: int) -> list[bytes]:
    if start < 0 or count < 0 or start + count >= len(offsets):
        raise ValueError("start and count")
    asked = list(offsets[start : start + count + 1])
    if asked != sorted(asked) or asked[0] < 0 or asked[-1] > len(bodies):
        raise ValueError("offsets")
    return [bodies[asked[place] : asked[place + 1]] for place in range(count)]


def fitting(offsets: Sequence[int], start: int, count: int, max_bytes: int, records: bool) -> int:
    """One by one: the next is taken if it is the first, or all so far and it fit."""
    if start < 0 or count < 0 or start + count >= len(offsets):
        raise ValueError("start and count")
    size = taken = 0
    for place in range(start, start + count):
        size += (28 if records else 8) + offsets[place + 1] - offsets[place]
        if taken and size > max_bytes:
            break
        taken += 1
    return taken


def whole_answers(written: bytes, sent: int) -> int:
    return len(scan_answers(written[: max(0, sent)], 2**32)[1])


def answer(code: int, payload: bytes) -> bytes:
    return struct.pack("<II", code, len(payload)) + payload


# --- the client's side -------------------------------------------------------


def scan_answers(data: bytes, max_frame_bytes: int) -> tuple[int, list[tuple[int, bytes]], bool]:
    """(bytes consumed, (code, payload) of each answer, whether the next one is too large)."""
    found: list[tuple[int, bytes]] = []
    consumed = 0
    while len(data) - consumed >= 8:
        code, length = struct.unpack_from("<II", data, consumed)
        if length > max_frame_bytes:
            return consumed, found, True
        payload = data[consumed + 8 : consumed + 8 + length]
        if len(payload) < length:
            break
        found.append((code, payload))
        consumed += 8 + length
    return consumed, found, False


def record(payload: bytes) -> tuple[int, int, int, bytes]:
    """(message id, timestamp in ns, flags, body)."""
    if len(payload) < 20:
        raise ValueError("record")
    message_id, timestamp_ns, flags = struct.unpack_from("<QQI", payload)
    return message_id, timestamp_ns, flags, payload[20:]


def message_id(payload: bytes) -> int:
    if len(payload) != 8:
        raise ValueError("message id")
    return int.from_bytes(payload, "little")


def produces(topic: bytes, contents: Sequence[Buffer], max_frame_bytes: int) -> bytes:
    """Produce requests, one for each content; OverflowError if one does not fit."""
    if not 1 <= len(topic) <= 255:
        raise ValueError("topic")
    payloads = [
        len(topic).to_bytes(4, "little") + topic + bytes(memoryview(one)) for one in contents
    ]
    if any(len(payload) > max_frame_bytes for payload in payloads):
        raise OverflowError("content")
    return b"".join(struct.pack("<II", 4, len(payload)) + payload for payload in payloads)


def gets(subscriber: bytes, count: int, max_blocking_s: int, records: bool) -> bytes:
    if len(subscriber) != 16 or count < 0:
        raise ValueError("subscriber or count")
    payload = struct.pack("<16si", subscriber, max_blocking_s)
    return count * (struct.pack("<II", 8 if records else 5, len(payload)) + payload)
