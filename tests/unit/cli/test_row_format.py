"""Messages as text: by a format, and as JSON."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from polybus.cli.row_format import DEFAULT, format_json, parse_format
from polybus.errors import UsageError
from polybus.model.arrow import READ_SCHEMA


def batch(*bodies: bytes, key: str | None = None, headers=None) -> pa.RecordBatch:
    count = len(bodies)
    columns = [
        list(range(1, count + 1)),
        [3] * count,
        list(range(10, 10 + count)),
        [1_700_000_000_123_456_789] * count,
        [1_700_000_000_000] * count,
        [key] * count,
        list(bodies),
        [headers] * count,
    ]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, READ_SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=READ_SCHEMA)


@pytest.mark.parametrize(
    ("form", "shaped"),
    [
        (DEFAULT, b"one\n\xff\n"),
        ("%i,%p,%o ", b"1,3,10 2,3,11 "),
        ("%k=%s;", b"key=one;key=\xff;"),
        ("%T|%S|%t|%%\\n", b"1700000000123|3|topic|%\n1700000000123|1|topic|%\n"),
        ("\\t\\r\\0\\x7e\\\\", b"\t\r\0~\\" * 2),
        ("é", "éé".encode()),
        ("", b""),
    ],
)
def test_formats(form, shaped):
    assert parse_format(form, "topic")(batch(b"one", b"\xff", key="key")) == shaped


def test_missing_key_is_formatted_empty():
    assert parse_format("<%k>", "t")(batch(b"x")) == b"<>"


@pytest.mark.parametrize("form", ["%q", "%", "a%", "\\q", "\\", "\\x4"])
def test_unknown_format_field_is_an_error(form):
    with pytest.raises(UsageError, match="in a format"):
        parse_format(form, "t")


def test_json_is_one_object_per_line():
    lines = format_json(batch("ü".encode(), b"\xff", key="k")).decode().splitlines()
    assert json.loads(lines[0]) == {
        "id": 1,
        "shard": 3,
        "offset": 10,
        "timestamp_ns": 1_700_000_000_123_456_789,
        "insertion_ms": 1_700_000_000_000,
        "key": "k",
        "body": "ü",
    }
    assert "ü" in lines[0]
    assert json.loads(lines[1])["body_base64"] == "/w=="
    assert "body" not in json.loads(lines[1])


def test_json_has_headers_if_present():
    (line,) = format_json(batch(b"x", headers=[("a", b"1"), ("b", b"\xff")])).splitlines()
    assert json.loads(line)["headers"] == [
        {"name": "a", "value": "1"},
        {"name": "b", "value_base64": "/w=="},
    ]
