"""The page of a report: totals, a row per topic, a section per topic, and the style."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polybus.spark.pipelines.stats.report import axis_scales
from polybus.spark.pipelines.stats.report.plots import drawing, tag, text
from polybus.spark.pipelines.stats.report.report_data import TopicFigures
from polybus.spark.pipelines.stats.report.report_sections import anchor, format_quantiles, section

# A section has about 200 KB of plots, so only the largest topics get one.
MOST_SECTIONS: Final = 30
SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 22
TITLE: Final = "polybus: messages of topics"
HEAD: Final = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'


def page(topics: Sequence[TopicFigures], bus: str, made_s: float) -> str:
    """Return the report as HTML. Topics with the most messages come first."""
    ordered = sorted(topics, key=lambda one: (-one.messages, one.name))
    shown = [one for one in ordered if one.messages][:MOST_SECTIONS]
    body = [
        tag("h1", text(TITLE)),
        tag("p", text(f"{bus}, {axis_scales.full(made_s)}. All times are UTC."), class_="note"),
        _tiles(topics),
        _summary(ordered, {one.name for one in shown}),
        *(section(one) for one in shown),
    ]
    head = HEAD + tag("title", text(TITLE)) + tag("style", STYLE)
    return (
        f"<!doctype html>\n<html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"
    )


def _tiles(topics: Sequence[TopicFigures]) -> str:
    messages, size = sum(one.messages for one in topics), sum(one.bytes for one in topics)
    starts = [one.windows[0].start_s for one in topics if one.windows]
    ends = [one.windows[-1].start_s + one.windows[-1].width_s for one in topics if one.windows]
    tile_values = {
        "topics": axis_scales.whole(len(topics)),
        "messages": axis_scales.whole(messages),
        "of bodies": axis_scales.size(size),
        "from": axis_scales.full(min(starts)) if starts else "nothing yet",
        "to": axis_scales.full(max(ends)) if ends else "nothing yet",
    }
    tiles = (
        tag("div", tag("b", text(value)), tag("span", text(name)))
        for name, value in tile_values.items()
    )
    return tag("div", *tiles, class_="tiles")


def _summary(topics: Sequence[TopicFigures], with_section: set[str]) -> str:
    names = ("topic", "messages", "bodies", "rate", "size", "latency", "keys", "largest key", "lag")
    head = tag("tr", *(tag("th", text(one)) for one in names))
    rows = (_row(one, one.name in with_section) for one in topics)
    return tag("div", tag("table", head, *rows), class_="wide")


def _row(topic: TopicFigures, has_section: bool) -> str:
    name = text(topic.name)
    link = tag("a", name, href=f"#{anchor(topic.name)}") if has_section else name
    cells = (
        link,
        axis_scales.whole(topic.messages),
        axis_scales.size(topic.bytes),
        _sparkline(topic),
        text(format_quantiles(topic.sizes, axis_scales.size)),
        text(format_quantiles(topic.latencies, axis_scales.duration)),
        axis_scales.whole(topic.distinct_keys),
        text(_largest(topic)),
        text(_lag(topic)),
    )
    return tag("tr", *(tag("td", one or " ") for one in cells))


def _sparkline(topic: TopicFigures) -> str:
    """Return a sparkline of the rate."""
    points = [one.messages for one in topic.points()]
    top = max(points, default=0)
    if len(points) < 2 or not top:
        return ""
    step = SPARK_WIDTH / (len(points) - 1)
    path = "M" + "L".join(
        f"{n * step:.1f},{SPARK_HEIGHT - 2 - count / top * (SPARK_HEIGHT - 4):.1f}"
        for n, count in enumerate(points)
    )
    line = tag("path", d=path, class_="s0 line")
    return drawing(SPARK_WIDTH, SPARK_HEIGHT, line, label=f"rate of {topic.name}")


def _largest(topic: TopicFigures) -> str:
    if not topic.keys or not topic.messages:
        return ""
    return axis_scales.percent(topic.keys[0].messages / topic.messages)


def _lag(topic: TopicFigures) -> str:
    """Return the last known lag of each group."""
    last = {one.name: one.lag for one in topic.groups}
    return ", ".join(f"{name} {axis_scales.short(lag)}" for name, lag in last.items())


STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #667085; --line: #e3e6ec; --card: #fff;
  --page: #f6f7f9; --c0: #2f6fde; --c1: #e08a1e; --c2: #c2385a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --dim: #98a2b3; --line: #2d3440;
  --card: #1a1f27; --page: #12161c; --c0: #6ea2ff; --c1: #f0b05a; --c2: #f07a95; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px; max-width: 1280px; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 19px; margin: 36px 0 12px; overflow-wrap: anywhere; }
.note { color: var(--dim); font-size: 13px; margin: 4px 0 0; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; }
.tiles div, figure, .wide { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.tiles div { padding: 12px 18px; }
.tiles b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--dim); font-size: 13px; }
.wide { overflow-x: auto; padding: 6px 12px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr));
  gap: 14px; }
figure { margin: 0; padding: 14px 16px; overflow-x: auto; break-inside: avoid; }
figcaption { font-weight: 600; margin-bottom: 8px; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; white-space: nowrap; }
th, td { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; }
td:first-child { max-width: 260px; overflow-wrap: anywhere; }
td svg { width: 120px; height: 22px; display: block; }
a { color: var(--c0); text-decoration: none; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font-size: 11px; }
svg line { stroke: var(--dim); } svg line.grid { stroke: var(--line); }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.area { fill: var(--c); opacity: .13; }
.dot, .bar { fill: var(--c); } .bar { opacity: .85; } .bar:hover { opacity: 1; }
.hit { fill: transparent; } .hit:hover { fill: var(--dim); opacity: .2; }
.legend { display: flex; gap: 16px; font-size: 13px; color: var(--dim); }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  background: var(--c); vertical-align: middle; }
@media print { body { background: none; padding: 0; } }
"""
