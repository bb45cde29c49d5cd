"""The section of one topic: plots over time, distributions, keys, shards and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from polybus.spark.pipelines.stats.report import axis_scales, plots
from polybus.spark.pipelines.stats.report.histogram import Histogram, find_quantile_bound
from polybus.spark.pipelines.stats.report.plots import Plot, Series, Show, tag, text
from polybus.spark.pipelines.stats.report.report_data import GroupSample, TimeWindow, TopicFigures

SHARES = (0.5, 0.9, 0.99)
MOST_BARS = 20
US_PER_MS = 1000.0
INF = "inf"
NOTE = (
    "From the producer's clock, in whole milliseconds, to the bus's commit. "
    "It includes the difference between the two clocks."
)


def section(topic: TopicFigures) -> str:
    cards = [*_over_time(topic), *_distributions(topic), *_skew(topic), *_groups(topic)]
    heading = tag("h2", text(topic.name), id=anchor(topic.name))
    return tag("section", heading, tag("div", *cards, class_="cards"))


def anchor(name: str) -> str:
    return f"topic-{name}"


def card(title: str, *inside: str, note: str = "") -> str:
    note_text = tag("p", text(note), class_="note") if note else ""
    return tag("figure", tag("figcaption", text(title)), *inside, note_text)


# --- over time


def _over_time(topic: TopicFigures) -> list[str]:
    points = topic.points()
    each = axis_scales.duration(points[0].width_s * 1e6) if points else ""
    latency = Plot(
        "Latency",
        _moments(points),
        _quantiles(points, attrgetter("latencies")),
        axis_scales.duration,
    )
    size = Plot("Size", _moments(points), _quantiles(points, attrgetter("sizes")), axis_scales.size)
    return [
        card(
            "Messages per second",
            _rate(points, attrgetter("messages"), axis_scales.short),
            note=f"{each} per point",
        ),
        card(
            "Bytes per second",
            _rate(points, attrgetter("bytes"), axis_scales.size),
            note=f"{each} per point",
        ),
        card("Latency, producer to bus", latency.draw(), latency.legend(), note=NOTE),
        card("Size of messages", size.draw(), size.legend()),
    ]


def _rate(points: Sequence[TimeWindow], value: Callable[[TimeWindow], int], show: Show) -> str:
    rates = [value(one) / one.width_s for one in points]
    return Plot("Rate", _moments(points), [Series("per second", rates)], show).draw()


def _quantiles(points: Sequence[TimeWindow], of: Callable[[TimeWindow], Histogram]) -> list[Series]:
    return [
        Series(f"p{share * 100:g}", [of(one).quantile(share) for one in points]) for share in SHARES
    ]


def _moments(points: Sequence[TimeWindow]) -> list[float]:
    return [float(one.start_s) for one in points]


# --- distributions


def _distributions(topic: TopicFigures) -> list[str]:
    return [
        card(
            f"Distribution of latency: {format_quantiles(topic.latencies, axis_scales.duration)}",
            plots.draw_histogram("Latency", topic.latencies.buckets, axis_scales.duration),
        ),
        card(
            f"Distribution of sizes: {format_quantiles(topic.sizes, axis_scales.size)}",
            plots.draw_histogram("Sizes", topic.sizes.buckets, axis_scales.size),
        ),
    ]


def format_quantiles(histogram: Histogram, show: Show) -> str:
    found = ((share, histogram.quantile(share)) for share in SHARES)
    return ", ".join(f"p{share * 100:g} {show(v)}" for share, v in found if v is not None)


def _skew(topic: TopicFigures) -> list[str]:
    total = max(1, topic.messages)
    keys = [
        plots.Bar(
            repr(one.name)[1:-1] or "(empty)", one.messages, _format_share(one.messages, total)
        )
        for one in topic.keys[:MOST_BARS]
    ]
    shards = [
        plots.Bar(f"shard {one.number}", one.messages, _format_share(one.messages, total))
        for one in topic.shards
    ]
    keyless = _format_share(topic.keyless, total)
    note = f"{axis_scales.whole(topic.distinct_keys)} keys; {keyless} without one"
    return [
        card("Keys with the most messages", plots.draw_ranking("Keys", keys), note=note),
        card("Messages by shard", plots.draw_ranking("Shards", shards)),
    ]


def _format_share(count: int, total: int) -> str:
    return f"{axis_scales.short(count)} ({axis_scales.percent(count / total)})"


# --- groups


def _groups(topic: TopicFigures) -> list[str]:
    by_name: dict[str, list[GroupSample]] = {}
    for one in topic.groups:
        by_name.setdefault(one.name, []).append(one)
    if not by_name:
        return []
    table = card("Groups, at the last sample", _group_table(by_name.values()))
    return [table, *(_one_group(name, samples) for name, samples in by_name.items())]


def _group_table(groups: Iterable[Sequence[GroupSample]]) -> str:
    rows = []
    for *_, last in groups:
        p50, p99 = (_ack_quantile(last.ack_latency, share) for share in (0.5, 0.99))
        values = (
            last.name,
            *(axis_scales.whole(n) for n in (last.members, last.lag)),
            axis_scales.duration(last.lag_s * 1e6) if last.lag else "0",
            *(axis_scales.whole(n) for n in (last.acked, last.redelivered, last.dead_lettered)),
            *(p50, p99),
        )
        rows.append(row("td", values))
    names = ("group", "members", "lag", "oldest", "acked", "again", "dead", "ack p50", "ack p99")
    return tag("table", row("th", names), *rows)


def _one_group(name: str, samples: Sequence[GroupSample]) -> str:
    at_s = [one.at_s for one in samples]
    lag = Plot("Lag", at_s, [Series("lag", [float(one.lag) for one in samples])], axis_scales.short)
    inside = [lag.draw()] if len(samples) > 1 else []
    counts = samples[-1].ack_latency
    bounds = [one for one in sorted(counts, key=float) if counts[one]]
    total = max(1, sum(counts.values()))
    acks = [
        plots.Bar(_bound(one), counts[one], _format_share(counts[one], total)) for one in bounds
    ]
    if acks:
        inside.append(plots.draw_ranking("Acks", acks))
    titles = ["lag over time"] * (len(samples) > 1) + ["from commit to ack"] * bool(acks)
    return card(f"Group {name}: {', '.join(titles) or 'nothing acked yet'}", *inside)


def _ack_quantile(counts: Mapping[str, int], share: float) -> str:
    found = find_quantile_bound(counts, share)
    return "" if found is None else _bound(found)


def _bound(bound_ms: str) -> str:
    if bound_ms == INF:
        return "more"
    return f"≤ {axis_scales.duration(float(bound_ms) * US_PER_MS)}"


def row(kind: str, values: Iterable[object]) -> str:
    return tag("tr", *(tag(kind, text(one) or " ") for one in values))
