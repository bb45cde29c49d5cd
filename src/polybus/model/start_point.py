"""Where to begin in a topic, as people write it: earliest, latest, an id, or @TIME."""

from __future__ import annotations

from datetime import datetime

from polybus.errors import UsageError

EARLIEST, LATEST = "earliest", "latest"
FORMS = "earliest, latest, an id, or @TIME (@2026-01-31T12:00, or @ and milliseconds since 1970)"
NS_PER_MS = 1_000_000
MAX_ID = 2**63 - 1


def parse_start(text: str) -> int | str:
    """An id, or what only the bus can turn into one; `UsageError` if it is neither."""
    if text in (EARLIEST, LATEST):
        return text
    if text.startswith("@"):
        parse_time_ns(text)
        return text
    if text.isascii() and text.isdigit() and int(text) <= MAX_ID:
        return int(text)
    raise UsageError(f"{text!r} is no place to begin: {FORMS}")


def parse_time_ns(text: str) -> int:
    """@TIME as nanoseconds since 1970. A time without a zone is the machine's."""
    given = text.removeprefix("@")
    if given.isascii() and given.isdigit():
        found = int(given) * NS_PER_MS
    else:
        try:
            seconds = datetime.fromisoformat(given).timestamp()
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"{text!r} is no time: {FORMS}") from None
        found = round(seconds * 1000) * NS_PER_MS
    if not 0 <= found <= MAX_ID:
        raise UsageError(f"{text!r} is out of range: {FORMS}")
    return found
