"""Entries of group.* requests, checked before any change is made."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, Final

from polybus.errors import LimitReached, MalformedRequest
from polybus.groups.member_fetch import HeldPosition
from polybus.groups.message_block import OutputMessage
from polybus.groups.shard_progress import FailureReport, ShardReport
from polybus.native.protocol.fields import is_count, is_text, parse_shard_number

# Shards of one ack; with their dead letters they fit into one commit.
MAX_ENTRIES: Final = 256
# Messages of a shard that one consumer runs at once, one per executor.
MAX_RUNNING: Final = 1024
MAX_REASON_CHARACTERS: Final = 65_536  # longer reasons are refused; the stored reason is truncated

Checks = Mapping[str, tuple[str, Callable[[Any], bool]]]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


COUNT = ("an integer >= 0", is_count)
FLAG = ("true or false", _is_flag)
TEXT = ("a string", is_text)

ENTRY: Checks = {
    "shard": COUNT,
    "epoch": COUNT,
    "acked": ("a list of [from, to) pairs", lambda v: _is_list(v) and all(map(_is_range, v))),
    "failed": ("a list of objects", lambda v: _is_list(v) and all(map(_is_object, v))),
    "running": ("a list of offsets", lambda v: _is_list(v) and all(map(is_count, v))),
    "emitted": COUNT,
    "redelivered": COUNT,
    "release": FLAG,
}
FAILED: Checks = {
    "offset": COUNT,
    "reason": ("a short text", lambda v: isinstance(v, str) and len(v) <= MAX_REASON_CHARACTERS),
    "attempt": COUNT,
}
COMMON_HELD_TYPES = {"shard": int, "epoch": int, "next": int, "paused": bool, "releasing": bool}
HELD: Checks = {"shard": COUNT, "epoch": COUNT, "next": COUNT, "paused": FLAG, "releasing": FLAG}
MESSAGE: Checks = {
    "topic": TEXT,
    "shard_key": TEXT,
    "body": TEXT,
    "headers": (
        "an object of strings",
        lambda v: _is_object(v) and all(map(is_text, (*v, *v.values()))),
    ),
    "insertion_ms": COUNT,
}


def read_entries(given: list[dict[str, Any]]) -> list[ShardReport]:
    if len(given) > MAX_ENTRIES:
        raise LimitReached(
            "max_entries", f"shards must have at most {MAX_ENTRIES} entries, got {len(given)}"
        )
    return [_entry(check_entry("shards", one, ENTRY, "shard", "epoch")) for one in given]


def _entry(one: dict[str, Any]) -> ShardReport:
    failed = [check_entry("failed", each, FAILED, "offset") for each in one.get("failed", ())]
    running = one.get("running")
    return ShardReport(
        one["shard"],
        one["epoch"],
        tuple((start, end) for start, end in one.get("acked", ())),
        tuple(
            FailureReport(each["offset"], each.get("reason", ""), each.get("attempt"))
            for each in failed
        ),
        None if running is None else bounded_running(running),
        one.get("emitted", 0),
        one.get("redelivered", 0),
        one.get("release", False),
    )


def read_held(given: list[dict[str, Any]]) -> dict[int, HeldPosition]:
    """Return positions by shard. Every fetch sends them, so the common form is checked fast."""
    found = {}
    for each in given:
        one = (
            each
            if _has_common_types(each)
            else check_entry("held", each, HELD, "shard", "epoch", "next")
        )
        flags = one.get("paused", False), one.get("releasing", False)
        found[one["shard"]] = HeldPosition(one["epoch"], one["next"], *flags)
    return found


def _has_common_types(held: dict[str, Any]) -> bool:
    kinds = {key: type(value) for key, value in held.items()}
    return kinds == COMMON_HELD_TYPES and all(
        map(is_count, (held["shard"], held["epoch"], held["next"]))
    )


def read_by_shard(field: str, given: Mapping[str, Any]) -> dict[int, Any]:
    """Return an object {"0": …, "1": …} with numbers for keys."""
    return {parse_shard_number(text, field): value for text, value in given.items()}


def read_running(given: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    found = read_by_shard("running", given)
    for offsets in found.values():
        if not (_is_list(offsets) and all(map(is_count, offsets))):
            raise MalformedRequest('running must be {"SHARD": [offsets], …}')
    return {shard: bounded_running(offsets) for shard, offsets in found.items()}


def read_messages(given: list[dict[str, Any]], now_ms: int) -> dict[str, list[OutputMessage]]:
    """Return messages by topic, in order."""
    found: dict[str, list[OutputMessage]] = {}
    for each in given:
        one = check_entry("messages", each, MESSAGE, "topic", "body")
        message = OutputMessage(
            one.get("shard_key"),
            _bytes("body", one["body"]),
            _headers(one.get("headers")),
            one.get("insertion_ms", now_ms),
        )
        found.setdefault(one["topic"], []).append(message)
    return found


def bounded_running(offsets: list[int]) -> tuple[int, ...]:
    if len(offsets) > MAX_RUNNING:
        text = f"running must have at most {MAX_RUNNING} offsets per shard, got {len(offsets)}"
        raise LimitReached("max_running", text)
    return tuple(offsets)


def check_entry(
    field: str, given: dict[str, Any], checks: Checks, *required: str
) -> dict[str, Any]:
    """Return an entry without nulls; raise `MalformedRequest` if a field is wrong."""
    if not given.keys() <= checks.keys():
        unknown = min(given.keys() - checks.keys())
        raise MalformedRequest(f"{field}: an entry takes no {unknown[:64]!r}")
    held = {key: value for key, value in given.items() if value is not None}
    for key in required:
        if key not in held:
            raise MalformedRequest(f"{field}: an entry needs {key}")
    for key, value in held.items():
        what, check = checks[key]
        if not check(value):
            raise MalformedRequest(f"{field}: {key} of an entry must be {what}")
    return held


def _headers(given: dict[str, str] | None) -> list[tuple[str, bytes]] | None:
    if given is None:
        return None
    return [(name, _bytes("headers", value)) for name, value in given.items()]


def _bytes(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedRequest(f"messages: {what} must be base64") from None


def _is_range(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(is_count, value))
        and value[0] < value[1]
    )


def _is_object(value: object) -> bool:
    return isinstance(value, dict)
