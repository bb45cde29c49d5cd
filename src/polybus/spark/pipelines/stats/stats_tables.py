"""Parquet tables and the figures of a report, from partial sums.

windows.parquet   a row per topic and window: messages, bytes, percentiles of size and latency
keys.parquet      the keys with the most messages of each topic
shards.parquet    messages and bytes of each shard
topics.parquet    a row per topic, with the share of the largest keys
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.spark.pipelines.stats import group_samples
from polybus.spark.pipelines.stats.partial_sums import PartialSums, replace_table
from polybus.spark.pipelines.stats.report.histogram import Histogram
from polybus.spark.pipelines.stats.report.report_data import (
    GroupSample,
    KeyCount,
    ShardCount,
    TimeWindow,
    TopicFigures,
)

MOST_KEYS = 1000  # of a topic
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TOP = 10
SIZE, LATENCY = "size", "latency"
US_PER_MS = 1000
S = pa.timestamp("s", tz="UTC")

Buckets = dict[tuple[str, int, str], dict[int, int]]


def write_tables(
    folder: Path, parts: PartialSums, window_s: int, samples: pa.Table
) -> list[TopicFigures]:
    """Write the tables. Returns the same figures for the report."""
    windows = _windows(parts, window_s)
    keys = parts.read("keys")
    by_key = _sums(keys, ["topic", "shard_key"]).filter(pc.field("shard_key").is_valid())
    by_shard = _sums(keys, ["topic", "shard"])
    replace_table(folder / "windows.parquet", _windows_table(windows))
    names = sorted({topic for topic, _ in windows})
    largest = {name: _largest(by_key, name) for name in names}
    figures = [
        TopicFigures(
            name,
            [window for topic, window in windows if topic == name],
            [KeyCount(row["shard_key"], row["messages"], row["bytes"]) for row in largest[name]],
            *_count_keys(by_key, by_shard, name),
            [
                ShardCount(row["shard"], row["messages"], row["bytes"])
                for row in _of(by_shard, name)
            ],
            [_group(row) for row in group_samples.select_topic(samples, name)],
        )
        for name in names
    ]
    top = [row for one in largest.values() for row in one]
    replace_table(folder / "keys.parquet", pa.Table.from_pylist(top, schema=by_key.schema))
    replace_table(folder / "shards.parquet", by_shard)
    replace_table(folder / "topics.parquet", _topics_table(figures))
    return figures


def _windows(parts: PartialSums, window_s: int) -> list[tuple[str, TimeWindow]]:
    """Return the windows with their topics, in the order of time."""
    buckets = _buckets(parts.read("buckets"))
    found = []
    for row in parts.read("windows").to_pylist():
        place = row["topic"], row["start_s"]
        sizes = Histogram(buckets[*place, SIZE], row["size_max"])
        latencies = Histogram(buckets[*place, LATENCY], row["latency_us_max"])
        window = TimeWindow(
            row["start_s"], window_s, row["messages"], row["bytes"], sizes, latencies
        )
        found.append((row["topic"], window))
    return found


def _buckets(table: pa.Table) -> Buckets:
    found: Buckets = defaultdict(dict)
    columns = (table.column(name).to_pylist() for name in table.column_names)
    for topic, start_s, kind, bucket, messages in zip(*columns, strict=False):
        found[topic, start_s, kind][bucket] = messages
    return found


def _sums(keys: pa.Table, by: list[str]) -> pa.Table:
    found = keys.group_by(by).aggregate([("messages", "sum"), ("bytes", "sum")])
    order = [(name, "ascending") for name in by]
    return found.rename_columns([*by, "messages", "bytes"]).sort_by(order)


def _largest(by_key: pa.Table, topic: str) -> list[dict[str, Any]]:
    own = by_key.filter(pc.field("topic") == topic)
    order = [("messages", "descending"), ("shard_key", "ascending")]
    found: list[dict[str, Any]] = own.sort_by(order).slice(0, MOST_KEYS).to_pylist()
    return found


def _of(table: pa.Table, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table.filter(pc.field("topic") == topic).to_pylist()
    return found


def _count_keys(by_key: pa.Table, by_shard: pa.Table, topic: str) -> tuple[int, int]:
    """Return the number of keys, and the number of messages without a key."""
    own = by_key.filter(pc.field("topic") == topic)
    keyed = pc.sum(own.column("messages")).as_py() or 0
    return own.num_rows, sum(row["messages"] for row in _of(by_shard, topic)) - keyed


def _windows_table(windows: Sequence[tuple[str, TimeWindow]]) -> pa.Table:
    rows = [
        {
            "topic": topic,
            "start": one.start_s,
            "seconds": one.width_s,
            "messages": one.messages,
            "bytes": one.bytes,
            **{f"size_{n}": one.sizes.quantile(share) for n, share in SHARES.items()},
            **{f"latency_ms_{n}": _ms(one.latencies, share) for n, share in SHARES.items()},
        }
        for topic, one in windows
    ]
    percentiles = [(f"{what}_{n}", pa.float64()) for what in ("size", "latency_ms") for n in SHARES]
    counts = [(name, pa.int64()) for name in ("seconds", "messages", "bytes")]
    schema = pa.schema([("topic", pa.utf8()), ("start", S), *counts, *percentiles])
    return pa.Table.from_pylist(rows, schema=schema)


def _ms(latency_us: Histogram, share: float) -> float | None:
    found = latency_us.quantile(share)
    return None if found is None else found / US_PER_MS


def _group(row: dict[str, Any]) -> GroupSample:
    counts = {name: row[name] for name in ("lag", "acked", "redelivered", "dead_lettered")}
    return GroupSample(
        row["at"].timestamp(),
        row["group"],
        members=row["members"],
        lag_s=row["lag_s"],
        ack_latency=dict(row["ack_latency"]),
        **counts,
    )


def _topics_table(figures: list[TopicFigures]) -> pa.Table:
    rows = [
        {
            "topic": one.name,
            "messages": one.messages,
            "bytes": one.bytes,
            "shards": len(one.shards),
            "keys": one.distinct_keys,
            "keyless": one.keyless,
            "largest_key": one.keys[0].name if one.keys else None,
            "largest_key_share": _share(one, 1),
            f"top_{TOP}_share": _share(one, TOP),
        }
        for one in figures
    ]
    counts = [(name, pa.int64()) for name in ("messages", "bytes", "shards", "keys", "keyless")]
    shares = [(name, pa.float64()) for name in ("largest_key_share", f"top_{TOP}_share")]
    text = [("largest_key", pa.utf8())]
    schema = pa.schema([("topic", pa.utf8()), *counts, *text, *shares])
    return pa.Table.from_pylist(rows, schema=schema)


def _share(topic: TopicFigures, keys: int) -> float:
    return sum(one.messages for one in topic.keys[:keys]) / max(1, topic.messages)
