"""Bars: of counts under their names, and of a histogram's buckets side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polybus.spark.pipelines.stats.report import axis_scales, histogram
from polybus.spark.pipelines.stats.report.histogram import Buckets
from polybus.spark.pipelines.stats.report.line_plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Show,
)
from polybus.spark.pipelines.stats.report.svg import drawing, tag, text

ROW: Final = 20
NAMES: Final = 150  # pixels for the names of bars...
MAX_NAME: Final = 22  # ...and how many characters these are
VALUES: Final = 110
# A histogram is drawn in buckets of a doubling each, if there are many of them.
FINE: Final = 40


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str  # behind the bar


def draw_ranking(title: str, bars: Sequence[Bar]) -> str:
    """One below the other, in the order given; the longest fills the width."""
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
    """How values are spread: a column a bucket, low ones left, each a step of the same factor."""
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
        told = f"{show(low)} to {show(high)}: {axis_scales.whole(count)}"
        box = {"x": x + 0.5, "y": y, "width": max(1.0, width - 1), "height": _y(0, top) - y}
        drawn.append(tag("rect", tag("title", text(told)), class_="s0 bar", **box))
        if n % every == 0:
            drawn.append(tag("text", text(show(low)), x=x, y=HEIGHT - 8, text_anchor="middle"))
    return drawing(WIDTH, HEIGHT, *drawn, label=title)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _columns(buckets: Buckets) -> list[tuple[float, float, int]]:
    """From, to and count, without holes between the first and the last."""
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
