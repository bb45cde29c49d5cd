"""Plots as inline SVG: lines over time, ranked bars, histograms.

Every text from outside is escaped here (`text`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from polybus.spark.pipelines.stats.report import axis_scales, histogram
from polybus.spark.pipelines.stats.report.histogram import Buckets

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


def text(given: object) -> str:
    """Escape a text. Characters that a page cannot show become the replacement character."""
    shown = "".join(
        one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}"
        for one in str(given)
    )
    return escape(shown)


def tag(name: str, *inside: str, **attributes: Attribute) -> str:
    """Return an element; `inside` is markup. Attribute `text_anchor` becomes `text-anchor`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    body = "".join(inside)
    return f"<{name}{written}>{body}</{name}>" if body else f"<{name}{written}/>"


def _value(value: Attribute) -> str:
    """Return an attribute's value. One decimal is enough for pixels."""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return text(value)


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
        filled = len(self.series) == 1
        lines = [grid.line(n, one.values, filled=filled) for n, one in enumerate(self.series)]
        return drawing(WIDTH, HEIGHT, *grid.axes(), *lines, *grid.pointed_at(), label=self.title)

    def legend(self) -> str:
        """Return the legend; empty for a single line, which the title describes."""
        if len(self.series) < 2:
            return ""
        names = (
            tag("span", tag("i", " ", class_=f"s{n}"), text(one.name))
            for n, one in enumerate(self.series)
        )
        return tag("div", *names, class_="legend")


class _Grid:
    """Coordinates and elements of a plot."""

    def __init__(self, plot: Plot) -> None:
        self._plot = plot
        known = [v for one in plot.series for v in one.values if v is not None]
        self._steps = axis_scales.steps(max(known, default=0.0))
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
        found = []
        for step in self._steps:
            y = self.y(step)
            found.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
            label = text(self._plot.show(step))
            found.append(tag("text", label, x=LEFT - 6, y=y + 3.5, text_anchor="end"))
        for at in axis_scales.moments(self._first, self._last):
            label = axis_scales.moment(at, self._span)
            x = self.x(at)
            found.append(tag("line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4))
            found.append(tag("text", label, x=x, y=HEIGHT - 8, text_anchor="middle"))
        return found

    def line(self, number: int, values: Sequence[float | None], *, filled: bool) -> str:
        found = []
        for stretch in self._stretches(values):
            if len(stretch) == 1:
                (x, y), *_ = stretch
                found.append(tag("circle", cx=x, cy=y, r=2.5, class_=f"s{number} dot"))
                continue
            path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in stretch)
            if filled:
                base = self.y(0)
                area = f"{path}L{stretch[-1][0]:.1f},{base:.1f}L{stretch[0][0]:.1f},{base:.1f}Z"
                found.append(tag("path", d=area, class_=f"s{number} area"))
            found.append(tag("path", d=path, class_=f"s{number} line"))
        return "".join(found)

    def _stretches(self, values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
        """Return runs of neighbouring points that have a value."""
        found: list[list[tuple[float, float]]] = [[]]
        for at_s, value in zip(self._plot.at_s, values, strict=True):
            if value is not None:
                found[-1].append((self.x(at_s), self.y(value)))
            elif found[-1]:
                found.append([])
        return [one for one in found if one]

    def pointed_at(self) -> list[str]:
        """Return invisible columns whose title shows the values at the pointer."""
        plot = self._plot
        width = (WIDTH - LEFT - RIGHT) / max(1, len(plot.at_s) - 1)
        found = []
        for n, at_s in enumerate(plot.at_s):
            lines = [axis_scales.full(at_s)]
            for one in plot.series:
                value = one.values[n]
                if value is not None:
                    lines.append(f"{one.name}: {plot.show(value)}")
            x = self.x(at_s) - width / 2
            column = {"x": x, "y": TOP, "width": width, "height": HEIGHT - TOP - BOTTOM}
            found.append(tag("rect", tag("title", text("\n".join(lines))), class_="hit", **column))
        return found


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str  # right of the bar


def draw_ranking(title: str, bars: Sequence[Bar]) -> str:
    """Return bars below each other, in the given order. The longest fills the width."""
    top = max((one.value for one in bars), default=0.0) or 1.0
    room = WIDTH - NAMES - VALUES
    rows = []
    for n, one in enumerate(bars):
        y = n * ROW
        name = one.name if len(one.name) <= MAX_NAME else one.name[: MAX_NAME - 1] + "…"
        rows += [
            tag("text", text(name), x=NAMES - 8, y=y + 14, text_anchor="end"),
            tag(
                "rect",
                tag("title", text(f"{one.name}: {one.label}")),
                x=NAMES,
                y=y + 3,
                width=max(1.0, one.value / top * room),
                height=ROW - 6,
                rx=2,
                class_="s0 bar",
            ),
            tag("text", text(one.label), x=NAMES + max(1.0, one.value / top * room) + 6, y=y + 14),
        ]
    return drawing(WIDTH, max(1, len(bars)) * ROW + 4, *rows, label=title)


def draw_histogram(title: str, buckets: Buckets, show: Show) -> str:
    """Return columns of a histogram from low to high, each a step by the same factor."""
    columns = _columns(buckets)
    steps = axis_scales.steps(max((count for *_, count in columns), default=0))
    top, width = steps[-1], (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    drawn = []
    for step in steps:
        y = _y(step, top)
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", axis_scales.short(step), x=LEFT - 6, y=y + 3.5, text_anchor="end"))
    every = max(1, -(-len(columns) // 7))
    for n, (low, high, count) in enumerate(columns):
        x, y = LEFT + n * width, _y(count, top)
        lines = f"{show(low)} to {show(high)}: {axis_scales.whole(count)}"
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
    step = 1 if last - first < FINE else histogram.PER_DOUBLING
    if step > 1:  # whole doublings: bucket 0, 1 to 8, 9 to 16, …
        first = 0 if first == 0 else first - (first - 1) % step
    found = []
    at = first
    while at <= last:
        end = at if at == 0 else at + step - 1
        count = sum(buckets.get(n, 0) for n in range(at, end + 1))
        found.append((histogram.lower(at), histogram.upper(end), count))
        at = end + 1
    return found
