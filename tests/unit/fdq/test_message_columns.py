"""Validation of messages: types, encoding and limits, for single messages and batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from polybus.dialects.fdq import MessageRequest, limits
from polybus.dialects.fdq.client import envelope, message_columns
from polybus.errors import MalformedRequest, TooLarge

LONE = "\ud800"  # a lone surrogate, which UTF-8 cannot encode
LONGEST = "é" * 512  # 1024 bytes
NOW_MS = 17


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_columns, "MAX_MESSAGE_BYTES", 1000)
    monkeypatch.setattr(envelope, "MAX_MESSAGE_BYTES", 1000)


def batch(*requests: Any) -> pa.RecordBatch:
    return message_columns.build_request_batch(requests, NOW_MS, with_headers=False)


def test_the_limits_are_those_of_the_spec() -> None:
    assert limits.MAX_KEY_BYTES == 1024
    assert limits.MAX_MESSAGE_BYTES == 64 * 1024 * 1024
    assert limits.MAX_IN_FLIGHT == 16


@pytest.mark.parametrize("key", [None, "", "a", "é", "\0", "a" * 1024, LONGEST])
def test_valid_keys(key: str | None) -> None:
    envelope.check_key(key)
    assert batch((key, b"x")).column("shard_key").to_pylist() == [key]


@pytest.mark.parametrize("key", ["a" * 1025, LONGEST + "a"])
def test_long_keys_are_refused(key: str) -> None:
    with pytest.raises(TooLarge, match="at most 1024 bytes, got 1025"):
        envelope.check_key(key)
    with pytest.raises(TooLarge, match="at most 1024 bytes, got 1025"):
        batch(("fine", b"x"), (key, b"y"))


@pytest.mark.parametrize("key", [b"bytes", 7, 1.5, ["a"], LONE])
def test_invalid_keys_are_refused(key: Any) -> None:
    with pytest.raises(MalformedRequest, match="key"):
        envelope.check_key(key)
    with pytest.raises(MalformedRequest, match="key"):
        batch((None, b"x"), (key, b"y"))


@pytest.mark.parametrize("message", [b"", b"x", bytearray(b"x"), memoryview(b"x")])
def test_valid_messages(message: Any) -> None:
    found = envelope.check_message(message)
    assert (type(found), found) == (bytes, bytes(message))
    assert batch((None, message)).column("body").to_pylist() == [bytes(message)]


@pytest.mark.parametrize("message", ["text", None, 7, [b"x"]])
def test_invalid_messages_are_refused(message: Any) -> None:
    with pytest.raises(MalformedRequest, match="message must be bytes, got"):
        envelope.check_message(message)
    with pytest.raises(MalformedRequest, match="message must be bytes, got"):
        batch((None, message))


@pytest.mark.usefixtures("small_messages")
def test_large_messages_are_refused() -> None:
    assert len(envelope.check_message(b"x" * 1000)) == 1000
    with pytest.raises(TooLarge, match="at most 1000 bytes, got 1001"):
        envelope.check_message(b"x" * 1001)
    with pytest.raises(TooLarge, match="at most 1000 bytes, got 1001"):
        batch((None, b"x"), (None, b"x" * 1001))


@pytest.mark.parametrize("headers", [None, {}, {"": b""}, {"a": b"1", "é": bytearray(b"2")}])
def test_valid_headers(headers: Any) -> None:
    found = envelope.check_headers(headers)
    assert found == (None if headers is None else [(k, bytes(v)) for k, v in headers.items()])


@pytest.mark.parametrize(
    "headers", [[("a", b"b")], "text", {1: b"x"}, {"a": "text"}, {"a": None}, {LONE: b"x"}]
)
def test_invalid_headers_are_refused(headers: Any) -> None:
    with pytest.raises(MalformedRequest, match="header"):
        envelope.check_headers(headers)
    with pytest.raises(MalformedRequest, match="header"):
        batch(MessageRequest("k", b"x", headers))


def test_large_headers_are_refused() -> None:
    most = limits.MAX_HEADER_BYTES
    envelope.check_headers({"a": b"x" * (most - 1)})
    with pytest.raises(TooLarge, match="headers must have at most"):
        envelope.check_headers({"a": b"x" * most})


def test_batch_has_a_headers_column_only_if_needed() -> None:
    requests = [MessageRequest("k", b"x"), ("l", b"y")]
    assert (
        message_columns.build_request_batch(requests, NOW_MS, with_headers=False).num_columns == 3
    )
    found = message_columns.build_request_batch(requests, NOW_MS, with_headers=True)
    assert found.column("headers").to_pylist() == [None, None]
    assert found.column("insertion_ms").to_pylist() == [NOW_MS, NOW_MS]


def test_batch_with_some_headers() -> None:
    found = batch(MessageRequest("k", b"x"), ("l", b"y", {"a": b"b"}), ("m", b"z", {}))
    assert found.column("headers").to_pylist() == [None, [("a", b"b")], []]


@pytest.mark.parametrize("nothing", [[], (), iter([])])
def test_empty_batches_are_refused(nothing: Any) -> None:
    with pytest.raises(MalformedRequest, match="empty batch"):
        message_columns.build_request_batch(nothing, NOW_MS, with_headers=False)


@pytest.mark.parametrize("bad", [b"bytes", "text", None, ("k",), ("k", b"x", None, 1), 7])
def test_invalid_requests_are_refused(bad: Any) -> None:
    with pytest.raises(MalformedRequest, match="MessageRequest"):
        batch(("k", b"x"), bad)


def rows(**given: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(given)


def test_arrow_batches_are_checked() -> None:
    good = rows(shard_key=pa.array(["a", None]), body=pa.array([b"x", b""]))
    assert message_columns.check_rows(good) is good
    with pytest.raises(MalformedRequest, match="empty batch"):
        message_columns.check_rows(good.slice(0, 0))
    with pytest.raises(TooLarge, match="1025"):
        message_columns.check_rows(rows(shard_key=pa.array(["a" * 1025]), body=pa.array([b"x"])))
    with pytest.raises(MalformedRequest, match="no such column"):
        message_columns.check_rows(rows(key=pa.array(["a"]), body=pa.array([b"x"])))
    with pytest.raises(MalformedRequest, match="body"):
        message_columns.check_rows(rows(shard_key=pa.array(["a"]), body=pa.array(["text"])))
