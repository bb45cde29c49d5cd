"""D-Bus messages as bytes: https://dbus.freedesktop.org/doc/dbus-specification.html

Only what the benchmark says itself; of what the buses say it reads sizes, kinds and one string.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

CALL, RETURN, ERROR, SIGNAL = 1, 2, 3, 4  # kinds of messages
NO_REPLY_EXPECTED = 1  # a flag
PATH, INTERFACE, MEMBER, REPLY_SERIAL, DESTINATION, SENDER, SIGNATURE, UNIX_FDS = (
    *(1, 2, 3),
    *(5, 6, 7, 8, 9),
)
FIXED_BYTES = 16  # of a header, the length of its fields included
SERIAL_AT = 8
REPLY_SERIAL_AT = 20  # when it is the first field: its code and its type take four bytes

INTEGERS = {"y": 1, "b": 4, "u": 4, "h": 4, "t": 8}  # by type: bytes
STRUCT_ALIGNMENT = 8

Field = tuple[int, str, Any]  # code, type, value


def _types(signature: str) -> Iterator[str]:
    """The complete types that a signature consists of."""
    at = 0
    while at < len(signature):
        end = _end_of_type(signature, at)
        yield signature[at:end]
        at = end


def _end_of_type(signature: str, at: int) -> int:
    while signature[at] == "a":
        at += 1
    if signature[at] != "(":
        return at + 1
    depth = 0
    for place in range(at, len(signature)):
        depth += {"(": 1, ")": -1}.get(signature[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"{signature} has no end")


def _alignment(kind: str) -> int:
    if kind[0] in "gv":
        return 1
    return STRUCT_ALIGNMENT if kind[0] == "(" else INTEGERS.get(kind[0], 4)


def _pad(out: bytearray, alignment: int) -> None:
    out += bytes(-len(out) % alignment)


def _put(out: bytearray, kind: str, value: Any) -> None:
    _pad(out, _alignment(kind))
    if kind[0] in INTEGERS:
        out += int(value).to_bytes(INTEGERS[kind[0]], "little")
    elif kind[0] in "so":
        out += struct.pack("<I", len(value)) + value.encode() + b"\0"
    elif kind[0] == "g":
        out += bytes([len(value)]) + value.encode() + b"\0"
    elif kind[0] == "v":
        signature, inner = value
        _put(out, "g", signature)
        _put(out, signature, inner)
    elif kind[0] == "(":
        for part, inner in zip(_types(kind[1:-1]), value, strict=True):
            _put(out, part, inner)
    else:
        _put_array(out, kind[1:], value)


def _put_array(out: bytearray, kind: str, values: Sequence[Any]) -> None:
    length_at = len(out)
    out += bytes(4)
    _pad(out, _alignment(kind))
    start = len(out)
    for value in values:
        _put(out, kind, value)
    struct.pack_into("<I", out, length_at, len(out) - start)


def marshal(signature: str, values: Sequence[Any]) -> bytes:
    out = bytearray()
    for kind, value in zip(_types(signature), values, strict=True):
        _put(out, kind, value)
    return bytes(out)


def message(kind: int, serial: int, fields: Sequence[Field], body: bytes, flags: int = 0) -> bytes:
    head = bytearray()
    variants = [(code, (signature, value)) for code, signature, value in fields]
    values = (ord("l"), kind, flags, 1, len(body), serial, variants)
    for part, value in zip(_types("yyyyuua(yv)"), values, strict=True):
        _put(head, part, value)
    _pad(head, STRUCT_ALIGNMENT)
    return bytes(head) + body


def sizes(fixed: bytes) -> tuple[int, int, int]:
    """Of a message that begins so: its kind, bytes of its fields with padding, of its body."""
    order, kind, _flags, _version, body, _serial, fields = struct.unpack("<BBBBIII", fixed)
    if order != ord("l"):
        raise ValueError("a message in big-endian order")
    return kind, fields + -fields % STRUCT_ALIGNMENT, body
