"""Positions and times as programs give them."""

from __future__ import annotations

from datetime import datetime, timedelta

from polybus.errors import UsageError

MAX_POSITION = 2**63 - 1
NS_PER_US = 1000


def check_position(name: str, given: object) -> int:
    """An id, an offset, or nanoseconds since 1970."""
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= MAX_POSITION:
        raise UsageError(f"{name} is an integer from 0 on, not {given!r}")
    return given


def to_nanoseconds(name: str, moment: object) -> int:
    """A time of the bus's clock; an int is nanoseconds since 1970 already."""
    if not isinstance(moment, datetime):
        return check_position(name, moment)
    if moment.tzinfo is None:
        raise UsageError(f"{name} is a time with a zone, as datetime.now(UTC) gives it")
    since = moment - datetime.fromtimestamp(0, moment.tzinfo)
    return check_position(name, since // timedelta(microseconds=1) * NS_PER_US)
