"""Durations as people write them: `500ms`, `2s`, `15m`, `1h`, `7d`."""

from __future__ import annotations

import re
from typing import Final

from polybus.errors import UsageError

UNIT_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_FORM = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?(ms|s|m|h|d)", re.ASCII)


def parse_duration_ms(text: str) -> int:
    """Return the milliseconds of a duration, a part of one rounded up. Raises `UsageError`."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"duration must be a number with ms, s, m, h or d (1.5h), got {text!r}")
    whole, part, unit = match.groups()
    digits = part or ""
    scale: int = 10 ** len(digits)
    return -(-int(whole + digits) * UNIT_MS[unit] // scale)
