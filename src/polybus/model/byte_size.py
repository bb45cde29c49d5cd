"""Sizes as people write them: `512KiB`, `64MiB`, `10GiB`."""

from __future__ import annotations

import re
from typing import Final

from polybus.errors import UsageError

UNIT_BYTES: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FORM = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?(|B|KiB|MiB|GiB)", re.ASCII)


def parse_size_bytes(text: str) -> int:
    """Return the bytes of a size, a part of one rounded up. Raises `UsageError`."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"size must be a number with KiB, MiB or GiB (1.5GiB), got {text!r}")
    whole, part, unit = match.groups()
    digits = part or ""
    scaled = int(whole + digits) * UNIT_BYTES[unit]
    return -(-scaled // int(10 ** len(digits)))


def format_size_bytes(size: int) -> str:
    """Return a size in the largest unit of which it is a multiple: 10737418240 → 10GiB."""
    units = [unit for unit, factor in UNIT_BYTES.items() if size % factor == 0]
    return f"{size // UNIT_BYTES[units[-1]]}{units[-1]}" if size else "0"
