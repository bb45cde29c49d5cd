"""The report as one HTML file: plots are inline SVG, nothing is fetched, no script runs.

The page has totals, a row per topic, and for the largest topics a section with plots over time,
distributions, keys, shards and groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Final

from polybus.spark.pipelines.stats.plots import (
    Bar,
    Plot,
    Series,
    Show,
    draw_histogram,
    draw_ranking,
    drawing,
    format_duration,
    format_percent,
    format_short,
    format_size,
    format_time,
    format_whole,
    tag,
    text,
)
from polybus.spark.pipelines.stats.topic_figures import (
    GroupSample,
    Histogram,
    TimeWindow,
    TopicFigures,
    find_quantile_bound,
)

# A section has about 200 KB of plots, so only the largest topics get one.
MOST_SECTIONS: Final = 30
MOST_BARS: Final = 20
SPARK_WIDTH: Final = 120
SPARK_HEIGHT: Final = 22
SHARES: Final = (0.5, 0.9, 0.99)
US_PER_MS: Final = 1000.0
TITLE: Final = "polybus: messages of topics"
HEAD: Final = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
COLUMNS: Final = (
    *("topic", "messages", "bodies", "rate", "size", "latency", "keys", "largest key", "lag"),
)
GROUP_COLUMNS: Final = (
    *("group", "members", "lag", "oldest", "acked", "again", "dead", "ack p50", "ack p99"),
)
LATENCY_NOTE: Final = (
    "From the producer's clock, in whole milliseconds, to the bus's commit. "
    "It includes the difference between the two clocks."
)


def page(topics: Sequence[TopicFigures], bus: str, made_s: float) -> str:
    """Return the report as HTML. Topics with the most messages come first."""
    ordered = sorted(topics, key=lambda topic: (-topic.messages, topic.name))
    shown = [topic for topic in ordered if topic.messages][:MOST_SECTIONS]
    starts = [topic.windows[0].start_s for topic in topics if topic.windows]
    last_windows = [topic.windows[-1] for topic in topics if topic.windows]
    ends = [window.start_s + window.width_s for window in last_windows]
    totals = {
        "topics": format_whole(len(topics)),
        "messages": format_whole(sum(topic.messages for topic in topics)),
        "of bodies": format_size(sum(topic.bytes for topic in topics)),
        "from": format_time(min(starts)) if starts else "nothing yet",
        "to": format_time(max(ends)) if ends else "nothing yet",
    }
    tiles = (
        tag("div", tag("b", text(value)), tag("span", text(name))) for name, value in totals.items()
    )
    with_section = {topic.name for topic in shown}
    rows = (_row(topic, has_section=topic.name in with_section) for topic in ordered)
    body = [
        tag("h1", text(TITLE)),
        tag("p", text(f"{bus}, {format_time(made_s)}. All times are UTC."), class_="note"),
        tag("div", *tiles, class_="tiles"),
        tag("div", tag("table", _table_row("th", COLUMNS), *rows), class_="wide"),
    ]
    for topic in shown:
        cards = [*_time_cards(topic), *_distribution_cards(topic), *_group_cards(topic)]
        heading = tag("h2", text(topic.name), id=_anchor(topic))
        body.append(tag("section", heading, tag("div", *cards, class_="cards")))
    head = HEAD + tag("title", text(TITLE)) + tag("style", STYLE)
    return (
        f"<!doctype html>\n<html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"
    )


def _row(topic: TopicFigures, *, has_section: bool) -> str:
    name = text(topic.name)
    lags = {sample.name: sample.lag for sample in topic.groups}  # the last sample of each group
    has_keys = topic.keys and topic.messages
    cells = (
        tag("a", name, href=f"#{_anchor(topic)}") if has_section else name,
        format_whole(topic.messages),
        format_size(topic.bytes),
        _sparkline(topic),
        text(_format_quantiles(topic.sizes, format_size)),
        text(_format_quantiles(topic.latencies, format_duration)),
        format_whole(topic.distinct_keys),
        format_percent(topic.keys[0].messages / topic.messages) if has_keys else "",
        text(", ".join(f"{group} {format_short(lag)}" for group, lag in lags.items())),
    )
    return tag("tr", *(tag("td", cell or " ") for cell in cells))


def _sparkline(topic: TopicFigures) -> str:
    """Return a sparkline of the rate."""
    points = [window.messages for window in topic.points()]
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


# --- the section of one topic


def _anchor(topic: TopicFigures) -> str:
    return f"topic-{topic.name}"


def _card(title: str, *inside: str, note: str = "") -> str:
    note_text = tag("p", text(note), class_="note") if note else ""
    return tag("figure", tag("figcaption", text(title)), *inside, note_text)


def _time_cards(topic: TopicFigures) -> list[str]:
    points = topic.points()
    at_s = [float(point.start_s) for point in points]
    per_point = f"{format_duration(points[0].width_s * 1e6) if points else ''} per point"

    def rate(value: Callable[[TimeWindow], int], show: Show) -> str:
        rates = [value(point) / point.width_s for point in points]
        return Plot("Rate", at_s, [Series("per second", rates)], show).draw()

    def quantiles(title: str, of: Callable[[TimeWindow], Histogram], show: Show) -> Plot:
        series = [
            Series(f"p{share * 100:g}", [of(point).quantile(share) for point in points])
            for share in SHARES
        ]
        return Plot(title, at_s, series, show)

    latency = quantiles("Latency", attrgetter("latencies"), format_duration)
    size = quantiles("Size", attrgetter("sizes"), format_size)
    messages = rate(attrgetter("messages"), format_short)
    return [
        _card("Messages per second", messages, note=per_point),
        _card("Bytes per second", rate(attrgetter("bytes"), format_size), note=per_point),
        _card("Latency, producer to bus", latency.draw(), latency.legend(), note=LATENCY_NOTE),
        _card("Size of messages", size.draw(), size.legend()),
    ]


def _distribution_cards(topic: TopicFigures) -> list[str]:
    total = max(1, topic.messages)
    keys = [
        Bar(repr(key.name)[1:-1] or "(empty)", key.messages, _format_share(key.messages, total))
        for key in topic.keys[:MOST_BARS]
    ]
    shards = [
        Bar(f"shard {shard.number}", shard.messages, _format_share(shard.messages, total))
        for shard in topic.shards
    ]
    keyless = _format_share(topic.keyless, total)
    note = f"{format_whole(topic.distinct_keys)} keys; {keyless} without one"
    return [
        _card(
            f"Distribution of latency: {_format_quantiles(topic.latencies, format_duration)}",
            draw_histogram("Latency", topic.latencies.buckets, format_duration),
        ),
        _card(
            f"Distribution of sizes: {_format_quantiles(topic.sizes, format_size)}",
            draw_histogram("Sizes", topic.sizes.buckets, format_size),
        ),
        _card("Keys with the most messages", draw_ranking("Keys", keys), note=note),
        _card("Messages by shard", draw_ranking("Shards", shards)),
    ]


def _group_cards(topic: TopicFigures) -> list[str]:
    """Return a table of all groups, and a card per group; none if there are no groups."""
    by_name: dict[str, list[GroupSample]] = {}
    for sample in topic.groups:
        by_name.setdefault(sample.name, []).append(sample)
    if not by_name:
        return []
    rows, cards = [], []
    for name, samples in by_name.items():
        last = samples[-1]
        quantiles = (find_quantile_bound(last.ack_latency, share) for share in (0.5, 0.99))
        values = (
            name,
            *(format_whole(n) for n in (last.members, last.lag)),
            format_duration(last.lag_s * 1e6) if last.lag else "0",
            *(format_whole(n) for n in (last.acked, last.redelivered, last.dead_lettered)),
            *("" if bound is None else _format_bound(bound) for bound in quantiles),
        )
        rows.append(_table_row("td", values))
        cards.append(_group_card(name, samples))
    table = tag("table", _table_row("th", GROUP_COLUMNS), *rows)
    return [_card("Groups, at the last sample", table), *cards]


def _group_card(name: str, samples: Sequence[GroupSample]) -> str:
    titles, inside = [], []
    if len(samples) > 1:
        lags = Series("lag", [float(sample.lag) for sample in samples])
        titles.append("lag over time")
        inside.append(Plot("Lag", [sample.at_s for sample in samples], [lags], format_short).draw())
    counts = samples[-1].ack_latency
    total = max(1, sum(counts.values()))
    bars = [
        Bar(_format_bound(bound), counts[bound], _format_share(counts[bound], total))
        for bound in sorted(counts, key=float)
        if counts[bound]
    ]
    if bars:
        titles.append("from commit to ack")
        inside.append(draw_ranking("Acks", bars))
    return _card(f"Group {name}: {', '.join(titles) or 'nothing acked yet'}", *inside)


def _format_bound(bound_ms: str) -> str:
    if bound_ms == "inf":
        return "more"
    return f"≤ {format_duration(float(bound_ms) * US_PER_MS)}"


def _format_quantiles(histogram: Histogram, show: Show) -> str:
    values = ((share, histogram.quantile(share)) for share in SHARES)
    return ", ".join(f"p{share * 100:g} {show(v)}" for share, v in values if v is not None)


def _format_share(count: int, total: int) -> str:
    return f"{format_short(count)} ({format_percent(count / total)})"


def _table_row(kind: str, values: Iterable[object]) -> str:
    return tag("tr", *(tag(kind, text(value) or " ") for value in values))


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
