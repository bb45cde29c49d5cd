"""Parquet tables and the figures of a report, from partial sums and samples of groups.

windows.parquet   a row per topic and window: messages, bytes, percentiles of size and latency
keys.parquet      the keys with the most messages of each topic
shards.parquet    messages and bytes of each shard
topics.parquet    a row per topic, with the share of the largest keys
groups.parquet    a row per group and sample: its lag, and the time until messages are acked
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.errors import DoesNotExist
from polybus.native import Client
from polybus.spark.pipelines.stats.partial_sums import PartialSums, replace_table
from polybus.spark.pipelines.stats.topic_figures import (
    GroupSample,
    Histogram,
    KeyCount,
    ShardCount,
    TimeWindow,
    TopicFigures,
    find_quantile_bound,
)
from polybus.spark.source.log_access import RECONNECT_OPTIONS
from polybus.store.engine_registry import is_store_url

MOST_KEYS = 1000  # of a topic
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TOP = 10
US_PER_MS = 1000
# The oldest samples of groups are dropped beyond this number.
MOST_SAMPLES = 200_000
GROUP_COUNTS = ("lag", "acked", "emitted", "redelivered", "dead_lettered", "trimmed_unread")
GROUP_SCHEMA = pa.schema(
    [
        ("at", pa.timestamp("ms", tz="UTC")),
        ("topic", pa.utf8()),
        ("group", pa.utf8()),
        ("members", pa.int32()),
        *((name, pa.int64()) for name in GROUP_COUNTS),
        ("lag_s", pa.float64()),
        ("ack_p50_ms", pa.float64()),
        ("ack_p99_ms", pa.float64()),
        ("ack_latency", pa.map_(pa.utf8(), pa.int64())),
    ]
)


def write_tables(
    folder: Path, parts: PartialSums, window_s: int, samples: pa.Table
) -> list[TopicFigures]:
    """Write the tables. Returns the same figures for the report."""
    windows = _read_windows(parts, window_s)
    keys = parts.read("keys")
    by_key = _sum_by(keys, ["topic", "shard_key"]).filter(pc.field("shard_key").is_valid())
    by_shard = _sum_by(keys, ["topic", "shard"])
    figures: list[TopicFigures] = []
    top: list[dict[str, Any]] = []
    for topic in sorted(windows):
        own_keys, own_shards, own_samples = (
            table.filter(pc.field("topic") == topic) for table in (by_key, by_shard, samples)
        )
        order = [("messages", "descending"), ("shard_key", "ascending")]
        largest = own_keys.sort_by(order).slice(0, MOST_KEYS).to_pylist()
        top += largest
        keyed = pc.sum(own_keys.column("messages")).as_py() or 0
        shards = own_shards.to_pylist()
        figures.append(
            TopicFigures(
                topic,
                windows[topic],
                [KeyCount(row["shard_key"], row["messages"], row["bytes"]) for row in largest],
                distinct_keys=own_keys.num_rows,
                keyless=sum(row["messages"] for row in shards) - keyed,
                shards=[ShardCount(row["shard"], row["messages"], row["bytes"]) for row in shards],
                groups=[_group_sample(row) for row in own_samples.to_pylist()],
            )
        )
    replace_table(folder / "windows.parquet", _windows_table(windows))
    replace_table(folder / "keys.parquet", pa.Table.from_pylist(top, schema=by_key.schema))
    replace_table(folder / "shards.parquet", by_shard)
    replace_table(folder / "topics.parquet", _topics_table(figures))
    return figures


def _read_windows(parts: PartialSums, window_s: int) -> dict[str, list[TimeWindow]]:
    """Return the windows of each topic, in the order of time."""
    buckets: dict[tuple[str, int, str], dict[int, int]] = defaultdict(dict)
    table = parts.read("buckets")
    columns = (table.column(name).to_pylist() for name in table.column_names)
    for topic, start_s, kind, bucket, messages in zip(*columns, strict=True):
        buckets[topic, start_s, kind][bucket] = messages
    windows: dict[str, list[TimeWindow]] = defaultdict(list)
    for row in parts.read("windows").to_pylist():
        topic, start_s = row["topic"], row["start_s"]
        window = TimeWindow(
            start_s,
            window_s,
            row["messages"],
            row["bytes"],
            Histogram(buckets[topic, start_s, "size"], row["size_max"]),
            Histogram(buckets[topic, start_s, "latency"], row["latency_us_max"]),
        )
        windows[topic].append(window)
    return windows


def _sum_by(keys: pa.Table, by: list[str]) -> pa.Table:
    sums = keys.group_by(by).aggregate([("messages", "sum"), ("bytes", "sum")])
    order = [(name, "ascending") for name in by]
    return sums.rename_columns([*by, "messages", "bytes"]).sort_by(order)


def _group_sample(row: Mapping[str, Any]) -> GroupSample:
    return GroupSample(
        row["at"].timestamp(),
        row["group"],
        members=row["members"],
        lag=row["lag"],
        lag_s=row["lag_s"],
        acked=row["acked"],
        redelivered=row["redelivered"],
        dead_lettered=row["dead_lettered"],
        ack_latency=dict(row["ack_latency"]),
    )


def _windows_table(windows: Mapping[str, Sequence[TimeWindow]]) -> pa.Table:
    rows = []
    for topic, of_topic in windows.items():
        for window in of_topic:
            row: dict[str, Any] = {
                "topic": topic,
                "start": window.start_s,
                "seconds": window.width_s,
                "messages": window.messages,
                "bytes": window.bytes,
            }
            for name, share in SHARES.items():
                latency_us = window.latencies.quantile(share)
                row[f"size_{name}"] = window.sizes.quantile(share)
                row[f"latency_ms_{name}"] = None if latency_us is None else latency_us / US_PER_MS
            rows.append(row)
    percentiles = [(f"{what}_{n}", pa.float64()) for what in ("size", "latency_ms") for n in SHARES]
    counts = [(name, pa.int64()) for name in ("seconds", "messages", "bytes")]
    start = ("start", pa.timestamp("s", tz="UTC"))
    schema = pa.schema([("topic", pa.utf8()), start, *counts, *percentiles])
    return pa.Table.from_pylist(rows, schema=schema)


def _topics_table(figures: Iterable[TopicFigures]) -> pa.Table:
    rows = []
    for topic in figures:
        total = max(1, topic.messages)
        row = {
            "topic": topic.name,
            "messages": topic.messages,
            "bytes": topic.bytes,
            "shards": len(topic.shards),
            "keys": topic.distinct_keys,
            "keyless": topic.keyless,
            "largest_key": topic.keys[0].name if topic.keys else None,
            "largest_key_share": sum(key.messages for key in topic.keys[:1]) / total,
            f"top_{TOP}_share": sum(key.messages for key in topic.keys[:TOP]) / total,
        }
        rows.append(row)
    counts = [(name, pa.int64()) for name in ("messages", "bytes", "shards", "keys", "keyless")]
    shares = [(name, pa.float64()) for name in ("largest_key_share", f"top_{TOP}_share")]
    text = [("largest_key", pa.utf8())]
    schema = pa.schema([("topic", pa.utf8()), *counts, *text, *shares])
    return pa.Table.from_pylist(rows, schema=schema)


# --- samples of consumer groups


def sample_groups(bus: str, topics: Iterable[str], now_s: float) -> pa.Table:
    """Return one sample of each group. Files of a store know no members and give no samples."""
    rows: list[dict[str, Any]] = []
    if is_store_url(bus):
        return GROUP_SCHEMA.empty_table()
    with Client(bus, RECONNECT_OPTIONS) as client:
        for topic in topics:
            try:
                topic_stats = client.topic_stats(topic)
            except DoesNotExist:  # dropped after it was counted
                continue
            for group in topic_stats["groups"]:
                row = {
                    "at": int(now_s * 1000),
                    "topic": topic,
                    "group": group["group"],
                    "members": len(group["members"]),
                    **{name: group[name] for name in GROUP_COUNTS},
                    "lag_s": float(group["lag_s"]),
                    "ack_latency": sorted(
                        group["ack_latency"].items(), key=lambda bucket: float(bucket[0])
                    ),
                }
                for name, share in (("ack_p50_ms", 0.5), ("ack_p99_ms", 0.99)):
                    bound = find_quantile_bound(group["ack_latency"], share)
                    row[name] = None if bound is None else float(bound)
                rows.append(row)
    return pa.Table.from_pylist(rows, schema=GROUP_SCHEMA)


def append_samples(folder: Path, new: pa.Table) -> pa.Table:
    """Store new samples and return all of them, the oldest first."""
    path = folder / "groups.parquet"
    old = pq.read_table(path, schema=GROUP_SCHEMA) if path.exists() else GROUP_SCHEMA.empty_table()
    samples = pa.concat_tables([old, new])
    samples = samples.slice(max(0, samples.num_rows - MOST_SAMPLES))
    replace_table(path, samples)
    return samples
