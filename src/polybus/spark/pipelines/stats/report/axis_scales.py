"""Round numbers on an axis, and numbers, sizes and times as text."""

from __future__ import annotations

import math
from datetime import UTC, datetime

# Steps between labels: of numbers within a decade, of times in seconds.
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
MINUTE, HOUR, DAY = 60, 3600, 86_400
TIME_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(n * MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * HOUR for n in (1, 2, 3, 6, 12)),
    *(n * DAY for n in (1, 2, 7, 14, 30, 90, 365)),
)
PREFIXES = ("", "k", "M", "G", "T", "P")
UNIT = 1000
MS_PER_US, S_PER_US = 1e-3, 1e-6


def steps(top: float, wanted: int = 4) -> list[float]:
    """Return round numbers from 0 to the first one that is >= `top`."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0, 1.0]
    decade = 10.0 ** math.floor(math.log10(top / wanted))
    step = next(one * decade for one in ROUND if one * decade * wanted >= top * 0.999)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]


def moments(first_s: float, last_s: float, wanted: int = 6) -> list[int]:
    """Return whole minutes, hours or days between two times, in seconds since 1970."""
    span = max(1.0, last_s - first_s)
    step = next((one for one in TIME_STEPS if one * wanted >= span), TIME_STEPS[-1])
    start = math.ceil(first_s / step)
    return [n * step for n in range(start, math.floor(last_s / step) + 1)]


def moment(at_s: float, span_s: float) -> str:
    """Return a label of the time axis, as short as it stays distinct from its neighbours."""
    when = datetime.fromtimestamp(at_s, UTC)
    if span_s > 2 * DAY:
        return when.strftime("%d %b")
    return when.strftime("%H:%M:%S" if span_s < 10 * MINUTE else "%H:%M")


def full(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def short(value: float) -> str:
    """1234567 → 1.23M."""
    amount, prefix = abs(value), 0
    while amount >= UNIT - 0.5 and prefix < len(PREFIXES) - 1:
        amount, prefix = amount / UNIT, prefix + 1
    digits = max(0, 2 - int(math.log10(amount))) if amount >= 1 else 2
    text = f"{amount:.{digits}f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return ("-" if value < 0 else "") + text + PREFIXES[prefix]


def whole(value: int) -> str:
    """1234567 → 1,234,567."""
    return f"{value:,}"


def size(value: float) -> str:
    number = short(value)
    is_plain = number[-1].isdigit()
    return f"{number} B" if is_plain else f"{number[:-1]} {number[-1]}B"


def duration(us: float) -> str:
    """Return microseconds as text in a readable unit."""
    if us < UNIT:
        return f"{short(us)} µs"
    if us < UNIT * UNIT:
        return f"{short(us * MS_PER_US)} ms"
    return f"{short(us * S_PER_US)} s" if us * S_PER_US < 2 * MINUTE else _long(us * S_PER_US)


def _long(seconds: float) -> str:
    if seconds < 2 * HOUR:
        return f"{short(seconds / MINUTE)} min"
    return f"{short(seconds / HOUR)} h" if seconds < 2 * DAY else f"{short(seconds / DAY)} d"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"
