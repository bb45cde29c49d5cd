"""A message as it is produced (`MessageRequest`) and consumed (`Envelope`), and its checks.

A single message is checked when the caller passes it, so that the error reaches the caller
and not the other messages of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from polybus.dialects.fdq.limits import MAX_HEADER_BYTES, MAX_KEY_BYTES, MAX_MESSAGE_BYTES
from polybus.errors import MalformedRequest, TooLarge, UsageError
from polybus.model.message_ttl import TTL_HEADER, encode_ttl

Headers = list[tuple[str, bytes]]


class MessageRequest(NamedTuple):
    """One message of a batch. `None` means no key; an empty string is a key."""

    shard_key: str | None
    message: bytes
    headers: Mapping[str, bytes] | None = None


class Envelope:
    """A message as a handler gets it, with its position.

    A plain class with slots and without checks, because there is one for every message.
    """

    __slots__ = (
        "_run",
        "delivery",
        "executor_index",
        "headers",
        "id",
        "insertion_time",
        "message",
        "offset",
        "shard",
        "shard_epoch",
        "shard_index",
        "shard_key",
        "timestamp_ns",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        id: int,  # noqa: A002  # its name in the interface
        shard: int,
        offset: int,
        timestamp_ns: int,
        insertion_time: int,
        shard_key: str | None,
        message: bytes,
        headers: dict[str, bytes],
        shard_index: int = 0,
        executor_index: int = 0,
        delivery: int = 1,
        shard_epoch: int = 0,
        run: Any = None,
    ) -> None:
        self.topic = topic
        self.id = id
        self.shard = shard
        self.offset = offset
        self.timestamp_ns = timestamp_ns  # of the commit, by the clock of the bus
        self.insertion_time = insertion_time  # by the producer's clock, milliseconds since 1970
        self.shard_key = shard_key
        self.message = message
        self.headers = headers
        self.shard_index = shard_index  # among the shards that were opened together
        self.executor_index = executor_index
        self.delivery = delivery  # 1 for the first
        self.shard_epoch = shard_epoch  # of the assignment it was fetched under; 0 if replayed
        self._run = run  # the run of the consumer, None if replayed

    def transaction(self) -> Any:
        """Open a transaction that acks this message and produces others atomically.

        Raises `UsageError` for a replayed message, which no group can ack.
        """
        if self._run is None:
            raise UsageError("transaction needs a message from a consumer, got a replayed one")
        return self._run.transaction(self)

    def __repr__(self) -> str:
        return (
            f"<Envelope {self.topic} id={self.id} shard={self.shard} offset={self.offset}"
            f" key={self.shard_key!r} {len(self.message)} bytes>"
        )


def check_key(key: object) -> None:
    """Raise `MalformedRequest` or `TooLarge` unless the object can be a shard key."""
    if key is None:
        return
    if not isinstance(key, str):
        raise MalformedRequest(f"shard key must be str or None, got {type(key).__name__}")
    size = len(key) if key.isascii() else len(_encode(key, "shard key"))
    if size > MAX_KEY_BYTES:
        raise TooLarge(f"shard key must have at most {MAX_KEY_BYTES} bytes, got {size}")


def check_message(message: object) -> bytes:
    """Return the message as bytes. Raises `MalformedRequest` or `TooLarge`."""
    if type(message) is not bytes:
        if not isinstance(message, bytes | bytearray | memoryview):
            raise MalformedRequest(f"message must be bytes, got {type(message).__name__}")
        message = bytes(message)
    if len(message) > MAX_MESSAGE_BYTES:
        raise TooLarge(f"message must have at most {MAX_MESSAGE_BYTES} bytes, got {len(message)}")
    return message


def check_headers(
    headers: Mapping[str, bytes] | None, ttl_s: float | None = None
) -> Headers | None:
    """Return the headers as pairs, with one for `ttl_s`. Raises `UsageError`."""
    if headers is None:
        return None if ttl_s is None else [(TTL_HEADER, encode_ttl(ttl_s))]
    if not isinstance(headers, Mapping):
        raise MalformedRequest(f"headers must be a mapping, got {type(headers).__name__}")
    size, checked = 0, []
    for name, value in headers.items():
        if not isinstance(name, str):
            raise MalformedRequest(f"header name must be str, got {type(name).__name__}")
        if not isinstance(value, bytes | bytearray | memoryview):
            raise MalformedRequest(f"header {name!r} must be bytes, got {type(value).__name__}")
        checked.append((name, bytes(value)))
        size += len(_encode(name, "header name")) + len(checked[-1][1])
    if size > MAX_HEADER_BYTES:
        raise TooLarge(f"headers must have at most {MAX_HEADER_BYTES} bytes, got {size}")
    if ttl_s is not None:
        checked = [pair for pair in checked if pair[0] != TTL_HEADER]
        checked.append((TTL_HEADER, encode_ttl(ttl_s)))
    return checked


def _encode(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise MalformedRequest(f"{field} must be encodable as UTF-8, got {text!r}") from None
