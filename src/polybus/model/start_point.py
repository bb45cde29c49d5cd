"""Start positions in a topic: earliest, latest, an id, or @TIME."""

from __future__ import annotations

from datetime import datetime

from polybus.errors import UsageError

EARLIEST, LATEST = "earliest", "latest"
FORMS = "earliest, latest, an id, or @TIME (@2026-01-31T12:00, or @ and milliseconds since 1970)"
NS_PER_MS = 1_000_000
MAX_ID = 2**63 - 1


def parse_start(text: str) -> int | str:
    """Return an id, or the text if only the bus can resolve it. Raises UsageError."""
    if text in (EARLIEST, LATEST):
        return text
    if text.startswith("@"):
        parse_time_ns(text)
        return text
    if text.isascii() and text.isdigit() and int(text) <= MAX_ID:
        return int(text)
    raise UsageError(f"invalid start position {text!r}: expected {FORMS}")


def parse_time_ns(text: str) -> int:
    """Return @TIME as nanoseconds since 1970; a time without a zone is local time."""
    given = text.removeprefix("@")
    if given.isascii() and given.isdigit():
        time_ns = int(given) * NS_PER_MS
    else:
        try:
            seconds = datetime.fromisoformat(given).timestamp()
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"invalid time {text!r}: expected {FORMS}") from None
        time_ns = round(seconds * 1000) * NS_PER_MS
    if not 0 <= time_ns <= MAX_ID:
        raise UsageError(f"time {text!r} is out of range: expected {FORMS}")
    return time_ns
