"""The time to live of a message: a header with milliseconds, counted from its commit.

The commit's time is the bus's, so no other clock matters, and the time of a delayed message
begins when it is appended.
"""

from __future__ import annotations

import math
from typing import Final

from polybus.errors import UsageError

TTL_HEADER: Final = "polybus.ttl_ms"
MAX_TTL_S: Final = 10 * 365 * 86_400
MAX_TTL_DIGITS: Final = len(str(MAX_TTL_S * 1000))


def encode_ttl(ttl_s: float) -> bytes:
    """Return the value of the header. Raises `UsageError`."""
    is_number = type(ttl_s) in (int, float) and math.isfinite(ttl_s)
    if not is_number or not 0 < ttl_s <= MAX_TTL_S:
        raise UsageError(f"ttl_s must be above 0 and at most {MAX_TTL_S}, got {ttl_s!r}")
    return b"%d" % math.ceil(ttl_s * 1000)
