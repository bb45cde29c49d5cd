"""Entries of group.* requests, checked before any change is made."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

from polybus.errors import LimitReached, MalformedRequest
from polybus.groups.member_fetch import HeldPosition
from polybus.groups.message_block import OutputMessage
from polybus.groups.shard_progress import FailureReport, ShardReport
from polybus.native.protocol.fields import KINDS, Kind, is_count, is_text, parse_shard_number

# Shards of one ack; with their dead letters they fit into one commit.
MAX_ENTRIES: Final = 256
# Messages of a shard that one consumer runs at once, one per executor.
MAX_RUNNING: Final = 1024
MAX_REASON_CHARACTERS: Final = 65_536  # longer reasons are refused; the stored reason is truncated

Checks = Mapping[str, Kind]
COUNT, FLAG, TEXT = KINDS["count"], KINDS["flag"], KINDS["text"]


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(map(is_count, value))
    return is_pair and value[0] < value[1]


ENTRY: Checks = {
    "shard": COUNT,
    "epoch": COUNT,
    "acked": Kind(
        "ranges",
        "a list of [from, to) pairs",
        lambda v: isinstance(v, list) and all(map(_is_range, v)),
    ),
    "failed": KINDS["objects"],
    "running": Kind(
        "offsets", "a list of offsets", lambda v: isinstance(v, list) and all(map(is_count, v))
    ),
    "emitted": COUNT,
    "redelivered": COUNT,
    "release": FLAG,
}
FAILED: Checks = {
    "offset": COUNT,
    "reason": Kind(
        "reason",
        "a short text",
        lambda v: isinstance(v, str) and len(v) <= MAX_REASON_CHARACTERS,
    ),
    "attempt": COUNT,
}
COMMON_HELD_TYPES = {"shard": int, "epoch": int, "next": int, "paused": bool, "releasing": bool}
HELD: Checks = {"shard": COUNT, "epoch": COUNT, "next": COUNT, "paused": FLAG, "releasing": FLAG}
MESSAGE: Checks = {
    "topic": TEXT,
    "shard_key": TEXT,
    "body": TEXT,
    "headers": Kind(
        "headers",
        "an object of strings",
        lambda v: isinstance(v, dict) and all(map(is_text, (*v, *v.values()))),
    ),
    "insertion_ms": COUNT,
}


def read_entries(given: list[dict[str, Any]]) -> list[ShardReport]:
    if len(given) > MAX_ENTRIES:
        raise LimitReached(
            "max_entries", f"shards must have at most {MAX_ENTRIES} entries, got {len(given)}"
        )
    reports = []
    for each in given:
        entry = check_entry("shards", each, ENTRY, "shard", "epoch")
        failed = [check_entry("failed", run, FAILED, "offset") for run in entry.get("failed", ())]
        running = entry.get("running")
        report = ShardReport(
            entry["shard"],
            entry["epoch"],
            tuple((start, end) for start, end in entry.get("acked", ())),
            tuple(
                FailureReport(run["offset"], run.get("reason", ""), run.get("attempt"))
                for run in failed
            ),
            None if running is None else bounded_running(running),
            entry.get("emitted", 0),
            entry.get("redelivered", 0),
            entry.get("release", False),
        )
        reports.append(report)
    return reports


def read_held(given: list[dict[str, Any]]) -> dict[int, HeldPosition]:
    """Return positions by shard. Every fetch sends them, so the common form is checked fast."""
    held = {}
    for entry in given:
        types = {key: type(value) for key, value in entry.items()}
        counts = entry.get("shard"), entry.get("epoch"), entry.get("next")
        if types != COMMON_HELD_TYPES or not all(map(is_count, counts)):
            entry = check_entry("held", entry, HELD, "shard", "epoch", "next")
        flags = entry.get("paused", False), entry.get("releasing", False)
        held[entry["shard"]] = HeldPosition(entry["epoch"], entry["next"], *flags)
    return held


def read_running(given: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    running = {}
    for key, offsets in given.items():
        shard = parse_shard_number(key, "running")
        if not ENTRY["running"].accepts(offsets):
            raise MalformedRequest('running must be {"SHARD": [offsets], …}')
        running[shard] = bounded_running(offsets)
    return running


def read_messages(given: list[dict[str, Any]], now_ms: int) -> dict[str, list[OutputMessage]]:
    """Return messages by topic, in order."""
    messages: dict[str, list[OutputMessage]] = {}
    for each in given:
        entry = check_entry("messages", each, MESSAGE, "topic", "body")
        headers = entry.get("headers")
        if headers is not None:
            headers = [(name, _decode_base64("headers", v)) for name, v in headers.items()]
        message = OutputMessage(
            entry.get("shard_key"),
            _decode_base64("body", entry["body"]),
            headers,
            entry.get("insertion_ms", now_ms),
        )
        messages.setdefault(entry["topic"], []).append(message)
    return messages


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
    entry = {key: value for key, value in given.items() if value is not None}
    for key in required:
        if key not in entry:
            raise MalformedRequest(f"{field}: an entry needs {key}")
    for key, value in entry.items():
        if not checks[key].accepts(value):
            raise MalformedRequest(f"{field}: {key} of an entry must be {checks[key].expected}")
    return entry


def _decode_base64(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedRequest(f"messages: {what} must be base64") from None
