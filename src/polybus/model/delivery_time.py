"""When a delayed message is due: after a delay, or at a time.

Both are measured by the clock of the bus. A delay begins when the bus takes the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from polybus.errors import MalformedRequest, UsageError

if TYPE_CHECKING:
    from polybus.model.commit import CommitResult

MAX_DELAY_DAYS: Final = 30  # a longer wait is the business of a calendar
MAX_DELAY_S: Final = MAX_DELAY_DAYS * 86_400
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
MAX_TIME_NS: Final = (1 << 63) - 1
# Stored with the stamp of a delayed batch and returned to a repeat; 8 bytes of due time follow.
NOTE: Final = b"due:"
DELAY, DELIVER_AT = "delay_ms", "deliver_at_ns"
FIELDS: Final = frozenset({DELAY, DELIVER_AT})


class DeliveryTime(NamedTuple):
    """One of the two is set."""

    delay_ms: int | None = None
    deliver_at_ns: int | None = None

    @classmethod
    def from_options(
        cls, delay_s: float | None, deliver_at: datetime | float | None
    ) -> Self | None:
        """Return the time of a call of `produce`; None without a delay. Raises `UsageError`."""
        if delay_s is None and deliver_at is None:
            return None
        if delay_s is not None and deliver_at is not None:
            raise UsageError("delay_s and deliver_at exclude each other")
        if delay_s is not None:
            _check_number(delay_s, "delay_s")
            if not 0 <= delay_s <= MAX_DELAY_S:
                text = f"delay_s must be from 0 to {MAX_DELAY_S} ({MAX_DELAY_DAYS} days)"
                raise UsageError(f"{text}, got {delay_s}")
            return cls(delay_ms=math.ceil(delay_s * 1000))
        if isinstance(deliver_at, datetime):
            if deliver_at.tzinfo is None:
                raise UsageError(f"deliver_at must have a time zone, got {deliver_at!r}")
            deliver_at = deliver_at.timestamp()
        assert deliver_at is not None
        _check_number(deliver_at, "deliver_at")
        if not 0 <= deliver_at * NS_PER_S <= MAX_TIME_NS:
            raise UsageError(f"deliver_at must be seconds since 1970, got {deliver_at}")
        return cls(deliver_at_ns=math.ceil(deliver_at * 1e6) * 1000)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> Self | None:
        """Return the time in the metadata of a batch, None if it has none.

        Raises:
            MalformedRequest: both are given, or one is not an integer >= 0.
        """
        found = {name: given[name] for name in FIELDS if given.get(name) is not None}
        if not found:
            return None
        if len(found) > 1:
            raise MalformedRequest(f"{DELAY} and {DELIVER_AT} exclude each other")
        for name, value in found.items():
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or not 0 <= int(value) <= MAX_TIME_NS:  # type: ignore[call-overload]
                raise MalformedRequest(f"{name} must be an integer >= 0, got {str(value)[:64]}")
        return cls(**found)  # type: ignore[arg-type]

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for the metadata of a batch."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def due_ns(self, now_ns: int) -> int:
        """Return the time by the clock of the bus. Raises `MalformedRequest` if it is too far."""
        if self.delay_ms is not None:
            due_ns = now_ns + self.delay_ms * NS_PER_MS
        else:
            assert self.deliver_at_ns is not None
            due_ns = self.deliver_at_ns
        if due_ns - now_ns > MAX_DELAY_S * NS_PER_S:
            days = (due_ns - now_ns) / NS_PER_S / 86_400
            raise MalformedRequest(
                f"a message must be due within {MAX_DELAY_DAYS} days, got {days:.1f}"
            )
        return due_ns


def encode_due(due_ns: int) -> bytes:
    """Return the note of the commit that keeps a delayed batch."""
    return NOTE + due_ns.to_bytes(8, "big")


def due_of(result: CommitResult) -> int | None:
    """Return the due time of a delayed batch from its result, None if it was not delayed."""
    if not result.note.startswith(NOTE):
        return None
    return int.from_bytes(result.note[len(NOTE) :], "big")


def _check_number(value: object, name: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise UsageError(f"{name} must be a finite number, got {value!r}")
