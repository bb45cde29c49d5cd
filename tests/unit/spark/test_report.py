"""Figures of the report, and a page that is valid HTML for any topic name."""

from __future__ import annotations

import math
import random
from html.parser import HTMLParser

import pytest

from polybus.spark.pipelines.stats import plots
from polybus.spark.pipelines.stats.plots import Plot, Series, tag, text
from polybus.spark.pipelines.stats.report_page import page
from polybus.spark.pipelines.stats.topic_figures import (
    PER_DOUBLING,
    GroupSample,
    Histogram,
    KeyCount,
    ShardCount,
    TimeWindow,
    TopicFigures,
    merge_windows,
)

NASTY = "<script>alert(1)</script> \"&' \x00 \U0001f600"


def bucket(value: float) -> int:
    """Return the bucket of a value; the same as `bucket_sql`."""
    return 0 if value < 1 else 1 + math.floor(math.log2(value) * PER_DOUBLING)


def counted(values: list[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket(value)] = counts.get(bucket(value), 0) + 1
    return counts


# --- numbers


def test_quantile_is_exact_within_a_tenth():
    chance = random.Random(1)
    values = sorted(chance.lognormvariate(6, 2) for _ in range(5000))
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = values[math.ceil(len(values) * share) - 1]
        found = Histogram(counted(values), values[-1]).quantile(share)
        assert found is not None
        assert exact <= found <= max(1.0, exact * 1.1)


def test_merged_histograms_equal_the_histogram_of_all_values():
    chance = random.Random(2)
    values = [chance.expovariate(0.001) for _ in range(1000)]
    parts = (counted(values[:1]), counted(values[1:700]), counted(values[700:]))
    assert Histogram.merge(map(Histogram, parts)).buckets == counted(values)


def test_empty_histogram_has_no_quantile():
    assert Histogram().quantile(0.5) is None


def test_quantile_is_at_most_the_largest_value():
    spread = Histogram.merge([Histogram({57: 9}, 128), Histogram({57: 1}, 100)])
    assert [spread.quantile(share) for share in (0.5, 0.99, 1.0)] == [128, 128, 128]


@pytest.mark.parametrize("top", [0.0, 0.003, 1, 9.99, 10, 101, 7e9, math.inf])
def test_steps_of_an_axis_reach_its_top_and_are_few(top):
    steps = plots.axis_steps(top)
    assert steps[0] == 0
    assert 2 <= len(steps) <= 6
    assert steps[-1] >= top or math.isinf(top)


@pytest.mark.parametrize("span_s", [0, 1, 59, 3600, 86_400, 40 * 86_400, 10_000 * 86_400])
def test_moments_of_an_axis_are_between_its_ends_and_few(span_s):
    moments = plots.time_steps(1_790_000_003, 1_790_000_003 + span_s)
    assert all(1_790_000_003 <= one <= 1_790_000_003 + span_s for one in moments)
    assert len(moments) <= 30


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (7, "7"),
        (100, "100"),
        (999.9, "1k"),
        (1234, "1.23k"),
        (1_234_567, "1.23M"),
        (-1500, "-1.5k"),
    ],
)
def test_short_numbers(value, shown):
    assert plots.format_short(value) == shown


@pytest.mark.parametrize(
    ("us", "shown"),
    [(5, "5 µs"), (1500, "1.5 ms"), (2.5e6, "2.5 s"), (600e6, "10 min"), (4 * 86_400e6, "4 d")],
)
def test_duration_units(us, shown):
    assert plots.format_duration(us) == shown


# --- windows


def test_merged_windows_include_times_without_messages():
    windows = [
        TimeWindow(n * 10, 10, 1, 5, Histogram({3: 1}, n), Histogram({7: 2}))
        for n in (*range(100), 900)
    ]
    points = merge_windows(windows, most=50)
    assert len(points) <= 50
    assert sum(one.messages for one in points) == len(windows)
    sizes = Histogram.merge(one.sizes for one in points)
    assert sizes == ({3: len(windows)}, 900)
    latencies = Histogram.merge(one.latencies for one in points)
    assert latencies.buckets == {7: 2 * len(windows)}
    assert min(one.messages for one in points) == 0
    assert len({one.width_s for one in points}) == 1


# --- the page


class Reader(HTMLParser):
    """Parser that checks that tags are closed in order and that links stay within the page."""

    EMPTY = ("meta", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        for name, value in attrs:
            assert name not in ("src", "onload", "onclick"), name
            if name == "href":
                self.links.add(value)
            elif name == "id":
                self.ids.add(value)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def topic_figures(name: str) -> TopicFigures:
    windows = [
        TimeWindow(1_790_000_000 + 10 * n, 10, n, 100 * n, Histogram({50: n}), Histogram({60: n}))
        for n in range(20)
    ]
    groups = [
        GroupSample(1_790_000_000.0 + n, NASTY, 1, n, 0.5, n, 0, 0, {"1": n, "inf": 1})
        for n in (1, 2)
    ]
    return TopicFigures(
        name,
        windows,
        [KeyCount(NASTY, 9, 9), KeyCount("", 3, 3)],
        2,
        1,
        [ShardCount(0, 9, 9)],
        groups,
    )


def test_page_is_well_formed_and_self_contained():
    written = page(
        [topic_figures("orders"), topic_figures(NASTY), TopicFigures("silent", [])],
        "polybus://x",
        1.79e9,
    )
    reader = Reader()
    reader.feed(written)
    assert not reader.open
    assert "script" not in reader.seen
    assert reader.links == {f"#{one}" for one in reader.ids}
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")
    assert "silent" in written


def test_page_without_topics():
    assert "nothing yet" in page([], "polybus://x", 1.79e9)


def test_text_is_escaped():
    assert tag("p", text("<b>\x00"), title='"') == '<p title="&quot;">&lt;b&gt;\ufffd</p>'


def test_line_has_gaps_for_missing_values():
    plot = Plot("p", [0.0, 1.0, 2.0, 3.0, 4.0], [Series("a", [1.0, 2.0, None, 4.0, None])], str)
    drawn = plot.draw()
    assert drawn.count('class="s0 line"') == 1
    assert drawn.count("<circle") == 1
    assert "a: 4.0" in drawn


def test_wide_histogram_has_one_column_per_doubling():
    few = plots.draw_histogram("t", {9: 1, 16: 2}, str)
    assert few.count("<rect") == 8
    many = plots.draw_histogram("t", {0: 1, 9: 2, 16: 4, 99: 8}, str)
    assert "<title>2.0 to 4.0: 6</title>" in many
