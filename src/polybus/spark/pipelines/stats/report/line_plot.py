"""A plot over time: one line a series, round labels, and the values where the pointer is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from polybus.spark.pipelines.stats.report import axis_scales
from polybus.spark.pipelines.stats.report.svg import drawing, tag, text

WIDTH: Final = 560
HEIGHT: Final = 210
LEFT: Final = 58
RIGHT: Final = 28  # half of the last moment that is written
TOP: Final = 12
BOTTOM: Final = 26

Show = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One value a moment; None where there is none, and the line has a gap."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Plot:
    """`at_s` are the moments of all series, in seconds since 1970, in order."""

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
        """Of a single line the title says enough."""
        if len(self.series) < 2:
            return ""
        names = (
            tag("span", tag("i", " ", class_=f"s{n}"), text(one.name))
            for n, one in enumerate(self.series)
        )
        return tag("div", *names, class_="legend")


class _Grid:
    """Where values are on the paper."""

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
        """Neighbouring points that have a value."""
        found: list[list[tuple[float, float]]] = [[]]
        for at_s, value in zip(self._plot.at_s, values, strict=True):
            if value is not None:
                found[-1].append((self.x(at_s), self.y(value)))
            elif found[-1]:
                found.append([])
        return [one for one in found if one]

    def pointed_at(self) -> list[str]:
        """A column a moment, seen when the pointer is there; its title has the values."""
        plot = self._plot
        width = (WIDTH - LEFT - RIGHT) / max(1, len(plot.at_s) - 1)
        found = []
        for n, at_s in enumerate(plot.at_s):
            told = [axis_scales.full(at_s)]
            for one in plot.series:
                value = one.values[n]
                if value is not None:
                    told.append(f"{one.name}: {plot.show(value)}")
            x = self.x(at_s) - width / 2
            column = {"x": x, "y": TOP, "width": width, "height": HEIGHT - TOP - BOTTOM}
            found.append(tag("rect", tag("title", text("\n".join(told))), class_="hit", **column))
        return found
