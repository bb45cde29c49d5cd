"""The whole report: what there is in all, a row a topic, a section a topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from polybus.spark.pipelines.stats.report import axis_scales
from polybus.spark.pipelines.stats.report.report_data import TopicFigures
from polybus.spark.pipelines.stats.report.report_sections import anchor, format_quantiles, section
from polybus.spark.pipelines.stats.report.report_style import STYLE
from polybus.spark.pipelines.stats.report.svg import drawing, tag, text

# A section has some 200 KB of plots: of more topics than these there are rows alone.
MOST_SECTIONS: Final = 30
SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 22
TITLE: Final = "polybus: what went over the topics"
HEAD: Final = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'


def page(topics: Sequence[TopicFigures], bus: str, made_s: float) -> str:
    """HTML. Topics with the most messages come first."""
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
    told = {
        "topics": axis_scales.whole(len(topics)),
        "messages": axis_scales.whole(messages),
        "of bodies": axis_scales.size(size),
        "from": axis_scales.full(min(starts)) if starts else "nothing yet",
        "to": axis_scales.full(max(ends)) if ends else "nothing yet",
    }
    tiles = (
        tag("div", tag("b", text(value)), tag("span", text(name))) for name, value in told.items()
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
        _spark(topic),
        text(format_quantiles(topic.sizes, axis_scales.size)),
        text(format_quantiles(topic.latencies, axis_scales.duration)),
        axis_scales.whole(topic.distinct_keys),
        text(_largest(topic)),
        text(_lag(topic)),
    )
    return tag("tr", *(tag("td", one or " ") for one in cells))


def _spark(topic: TopicFigures) -> str:
    """Its rate over time, as small as a word."""
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
    """Of each group, as last told."""
    last = {one.name: one.lag for one in topic.groups}
    return ", ".join(f"{name} {axis_scales.short(lag)}" for name, lag in last.items())
