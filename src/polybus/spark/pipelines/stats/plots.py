"""Plots as inline SVG: lines over time, ranked bars, histograms, and the labels of their axes.

Every text from outside is escaped here (`text`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Final

from polybus.spark.pipelines.stats.topic_figures import PER_DOUBLING, Buckets, lower, upper

Attribute = str | float | int
WIDTH: Final = 560
HEIGHT: Final = 210
LEFT: Final = 58
RIGHT: Final = 28  # half of the last time label
TOP: Final = 12
BOTTOM: Final = 26
ROW: Final = 20
NAMES: Final = 150  # pixels for the names of bars
MAX_NAME: Final = 22  # characters of a name that fit
VALUES: Final = 110
# With more buckets than this, a histogram is drawn with one column per doubling.
FINE: Final = 40

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


# --- numbers, sizes and times as text, and round numbers on an axis


def axis_steps(top: float, wanted: int = 4) -> list[float]:
    """Return round numbers from 0 to the first one that is >= `top`."""
    if not (top > 0 and math.isfinite(top)):
        return [0.0, 1.0]
    decade = 10.0 ** math.floor(math.log10(top / wanted))
    step = next(n * decade for n in ROUND if n * decade * wanted >= top * 0.999)
    return [step * n for n in range(math.ceil(top / step - 1e-9) + 1)]


def time_steps(first_s: float, last_s: float, wanted: int = 6) -> list[int]:
    """Return whole minutes, hours or days between two times, in seconds since 1970."""
    span = max(1.0, last_s - first_s)
    step = next((step for step in TIME_STEPS if step * wanted >= span), TIME_STEPS[-1])
    start = math.ceil(first_s / step)
    return [n * step for n in range(start, math.floor(last_s / step) + 1)]


def time_label(at_s: float, span_s: float) -> str:
    """Return a label of the time axis, as short as it stays distinct from its neighbours."""
    when = datetime.fromtimestamp(at_s, UTC)
    if span_s > 2 * DAY:
        return when.strftime("%d %b")
    return when.strftime("%H:%M:%S" if span_s < 10 * MINUTE else "%H:%M")


def format_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_short(value: float) -> str:
    """1234567 → 1.23M."""
    amount, prefix = abs(value), 0
    while amount >= UNIT - 0.5 and prefix < len(PREFIXES) - 1:
        amount, prefix = amount / UNIT, prefix + 1
    digits = max(0, 2 - int(math.log10(amount))) if amount >= 1 else 2
    number = f"{amount:.{digits}f}"
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return ("-" if value < 0 else "") + number + PREFIXES[prefix]


def format_whole(value: int) -> str:
    """1234567 → 1,234,567."""
    return f"{value:,}"


def format_size(value: float) -> str:
    number = format_short(value)
    is_plain = number[-1].isdigit()
    return f"{number} B" if is_plain else f"{number[:-1]} {number[-1]}B"


def format_duration(us: float) -> str:
    """Return microseconds as text in a readable unit."""
    if us < UNIT:
        return f"{format_short(us)} µs"
    if us < UNIT * UNIT:
        return f"{format_short(us * MS_PER_US)} ms"
    seconds = us * S_PER_US
    if seconds < 2 * MINUTE:
        return f"{format_short(seconds)} s"
    if seconds < 2 * HOUR:
        return f"{format_short(seconds / MINUTE)} min"
    if seconds < 2 * DAY:
        return f"{format_short(seconds / HOUR)} h"
    return f"{format_short(seconds / DAY)} d"


def format_percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 0.1 else f"{share * 100:.0f} %"


# --- elements


def text(given: object) -> str:
    """Escape a text. Characters that a page cannot show become the replacement character."""
    shown = "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in str(given)
    )
    return escape(shown)


def tag(name: str, *inside: str, **attributes: Attribute) -> str:
    """Return an element; `inside` is markup. Attribute `text_anchor` becomes `text-anchor`."""
    written = ""
    for key, value in attributes.items():
        # One decimal is enough for pixels.
        shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else text(value)
        written += f' {key.rstrip("_").replace("_", "-")}="{shown}"'
    body = "".join(inside)
    return f"<{name}{written}>{body}</{name}>" if body else f"<{name}{written}/>"


def drawing(width: int, height: int, *inside: str, label: str) -> str:
    return tag(
        "svg",
        *inside,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


Show = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One value per time; None where there is no value, which leaves a gap in the line."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Plot:
    """Lines over time. `at_s` are the times of all series, in seconds since 1970, in order."""

    title: str
    at_s: Sequence[float]
    series: Sequence[Series]
    show: Show

    def draw(self) -> str:
        grid = _Grid(self)
        lines = [grid.line(n, series.values) for n, series in enumerate(self.series)]
        return drawing(WIDTH, HEIGHT, *grid.axes(), *lines, *grid.tooltips(), label=self.title)

    def legend(self) -> str:
        """Return the legend; empty for a single line, which the title describes."""
        if len(self.series) < 2:
            return ""
        names = (
            tag("span", tag("i", " ", class_=f"s{n}"), text(series.name))
            for n, series in enumerate(self.series)
        )
        return tag("div", *names, class_="legend")


class _Grid:
    """Coordinates and elements of a plot."""

    def __init__(self, plot: Plot) -> None:
        self._plot = plot
        known = [v for series in plot.series for v in series.values if v is not None]
        self._steps = axis_steps(max(known, default=0.0))
        self._first, self._last = plot.at_s[0], plot.at_s[-1]
        if self._first == self._last:
            self._first, self._last = self._first - 1, self._last + 1

    @property
    def _span(self) -> float:
        return self._last - self._first

    def x(self, at_s: float) -> float:
        return LEFT + (at_s - self._first) / self._span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._steps[-1] * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> list[str]:
        elements = []
        for step in self._steps:
            y = self.y(step)
            elements.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
            label = text(self._plot.show(step))
            elements.append(tag("text", label, x=LEFT - 6, y=y + 3.5, text_anchor="end"))
        for at in time_steps(self._first, self._last):
            label = time_label(at, self._span)
            x = self.x(at)
            elements.append(tag("line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4))
            elements.append(tag("text", label, x=x, y=HEIGHT - 8, text_anchor="middle"))
        return elements

    def line(self, number: int, values: Sequence[float | None]) -> str:
        """Return the line of a series. A single series is filled down to the axis."""
        # Neighbouring points that have a value; a missing value leaves a gap.
        runs: list[list[tuple[float, float]]] = [[]]
        for at_s, value in zip(self._plot.at_s, values, strict=True):
            if value is not None:
                runs[-1].append((self.x(at_s), self.y(value)))
            elif runs[-1]:
                runs.append([])
        elements = []
        for points in filter(None, runs):
            (first_x, first_y), (last_x, _) = points[0], points[-1]
            if len(points) == 1:
                elements.append(
                    tag("circle", cx=first_x, cy=first_y, r=2.5, class_=f"s{number} dot")
                )
                continue
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
            if len(self._plot.series) == 1:
                base = self.y(0)
                area = f"{path}L{last_x:.1f},{base:.1f}L{first_x:.1f},{base:.1f}Z"
                elements.append(tag("path", d=area, class_=f"s{number} area"))
            elements.append(tag("path", d=path, class_=f"s{number} line"))
        return "".join(elements)

    def tooltips(self) -> list[str]:
        """Return invisible columns whose title shows the values at the pointer."""
        plot = self._plot
        width = (WIDTH - LEFT - RIGHT) / max(1, len(plot.at_s) - 1)
        elements = []
        for n, at_s in enumerate(plot.at_s):
            lines = [format_time(at_s)]
            for series in plot.series:
                value = series.values[n]
                if value is not None:
                    lines.append(f"{series.name}: {plot.show(value)}")
            x = self.x(at_s) - width / 2
            column = {"x": x, "y": TOP, "width": width, "height": HEIGHT - TOP - BOTTOM}
            title = tag("title", text("\n".join(lines)))
            elements.append(tag("rect", title, class_="hit", **column))
        return elements


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str  # right of the bar


def draw_ranking(title: str, bars: Sequence[Bar]) -> str:
    """Return bars below each other, in the given order. The longest fills the width."""
    top = max((bar.value for bar in bars), default=0.0) or 1.0
    room = WIDTH - NAMES - VALUES
    rows = []
    for n, bar in enumerate(bars):
        y = n * ROW
        width = max(1.0, bar.value / top * room)
        name = bar.name if len(bar.name) <= MAX_NAME else bar.name[: MAX_NAME - 1] + "…"
        rows += [
            tag("text", text(name), x=NAMES - 8, y=y + 14, text_anchor="end"),
            tag(
                "rect",
                tag("title", text(f"{bar.name}: {bar.label}")),
                x=NAMES,
                y=y + 3,
                width=width,
                height=ROW - 6,
                rx=2,
                class_="s0 bar",
            ),
            tag("text", text(bar.label), x=NAMES + width + 6, y=y + 14),
        ]
    return drawing(WIDTH, max(1, len(bars)) * ROW + 4, *rows, label=title)


def draw_histogram(title: str, buckets: Buckets, show: Show) -> str:
    """Return columns of a histogram from low to high, each a step by the same factor."""
    columns = _columns(buckets)
    steps = axis_steps(max((count for *_, count in columns), default=0))
    top, width = steps[-1], (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    drawn = []
    for step in steps:
        y = _y(step, top)
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", format_short(step), x=LEFT - 6, y=y + 3.5, text_anchor="end"))
    every = max(1, -(-len(columns) // 7))
    for n, (low, high, count) in enumerate(columns):
        x, y = LEFT + n * width, _y(count, top)
        lines = f"{show(low)} to {show(high)}: {format_whole(count)}"
        box = {"x": x + 0.5, "y": y, "width": max(1.0, width - 1), "height": _y(0, top) - y}
        drawn.append(tag("rect", tag("title", text(lines)), class_="s0 bar", **box))
        if n % every == 0:
            drawn.append(tag("text", text(show(low)), x=x, y=HEIGHT - 8, text_anchor="middle"))
    return drawing(WIDTH, HEIGHT, *drawn, label=title)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _columns(buckets: Buckets) -> list[tuple[float, float, int]]:
    """Return lower bound, upper bound and count of the columns, without holes."""
    if not buckets:
        return []
    first, last = min(buckets), max(buckets)
    step = 1 if last - first < FINE else PER_DOUBLING
    if step > 1:  # whole doublings: bucket 0, 1 to 8, 9 to 16, …
        first = 0 if first == 0 else first - (first - 1) % step
    columns = []
    at = first
    while at <= last:
        end = at if at == 0 else at + step - 1
        count = sum(buckets.get(n, 0) for n in range(at, end + 1))
        columns.append((lower(at), upper(end), count))
        at = end + 1
    return columns
