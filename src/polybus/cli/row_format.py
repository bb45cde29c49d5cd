"""Messages on stdout: by a format like kcat's, or one JSON object per line.

A format is parsed once; a batch is then formatted column by column.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from polybus.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

RowFormatter = Callable[["pa.RecordBatch"], bytes]

DEFAULT = "%s\\n"
NS_PER_MS = 1_000_000
ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
TOKEN = re.compile(r"%(.?)|\\x([0-9A-Fa-f]{2})|\\(.?)|([^%\\]+)", re.DOTALL)


def choose_formatter(topic: str, form: str | None, *, as_objects: bool) -> RowFormatter:
    """Return the formatter of the flags `Format` and `JsonLines`. Raises UsageError."""
    if as_objects and form is not None:
        raise UsageError("--json and -f exclude each other")
    return format_json if as_objects else parse_format(form or DEFAULT, topic)


def parse_format(text: str, topic: str) -> RowFormatter:
    """Parse a format. Raises UsageError if it has an unknown % or \\ sequence."""
    parts = [_part(match, topic) for match in TOKEN.finditer(text)]

    def shape(batch: pa.RecordBatch) -> bytes:
        columns = [
            repeat(part, batch.num_rows) if isinstance(part, bytes) else part(batch)
            for part in parts
        ]
        return b"".join(chain.from_iterable(zip(*columns, strict=False)))

    return shape


def format_json(batch: pa.RecordBatch) -> bytes:
    lines = [json.dumps(row_to_json(row), ensure_ascii=False) for row in batch.to_pylist()]
    return ("\n".join(lines) + "\n").encode("utf-8", "backslashreplace")


def _part(match: re.Match[str], topic: str) -> bytes | Callable[[Any], Iterable[bytes]]:
    field, code, escape, literal = match.groups()
    if literal is not None:
        return literal.encode("utf-8", "surrogateescape")
    if code is not None:
        return bytes.fromhex(code)
    if field is not None:
        return _field(field, topic)
    if escape in ESCAPES:
        return ESCAPES[escape]
    raise UsageError(f"invalid \\{escape} in a format: expected \\n, \\t, \\r, \\0, \\xFF or \\\\")


def _field(letter: str, topic: str) -> bytes | Callable[[Any], Iterable[bytes]]:
    if letter == "%":
        return b"%"
    if letter == "t":
        return topic.encode()
    if letter not in FIELDS:
        known = ", ".join(f"%{one}" for one in [*FIELDS, "t", "%"])
        raise UsageError(f"invalid %{letter} in a format: expected one of {known}")
    return FIELDS[letter]


def _numbers(name: str, unit: int = 1) -> Callable[[Any], list[bytes]]:
    return lambda batch: [b"%d" % (value // unit) for value in batch.column(name).to_pylist()]


def _keys(batch: pa.RecordBatch) -> list[bytes]:
    return [(key or "").encode() for key in batch.column("shard_key").to_pylist()]


def _bodies(batch: pa.RecordBatch) -> list[bytes]:
    found: list[bytes] = batch.column("body").to_pylist()
    return found


FIELDS: dict[str, Callable[[Any], Iterable[bytes]]] = {
    "k": _keys,
    "s": _bodies,
    "S": lambda batch: [b"%d" % len(body) for body in _bodies(batch)],
    "i": _numbers("id"),
    "p": _numbers("shard"),
    "o": _numbers("offset"),
    "T": _numbers("timestamp_ns", NS_PER_MS),
}


def row_to_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as an object for JSON."""
    found = {
        "id": row["id"],
        "shard": row["shard"],
        "offset": row["offset"],
        "timestamp_ns": row["timestamp_ns"],
        "insertion_ms": row["insertion_ms"],
        "key": row["shard_key"],
        **_text("body", row["body"]),
    }
    if row["headers"]:
        found["headers"] = [
            {"name": name, **_text("value", value)} for name, value in row["headers"]
        ]
    return found


def _text(name: str, value: bytes) -> dict[str, str]:
    """Return a field as text, or as base64 under another name if it is not UTF-8."""
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode()}
