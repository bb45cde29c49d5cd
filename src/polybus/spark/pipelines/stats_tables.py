"""From what was counted to what is read: tables of Parquet, and the figures of a report.

windows.parquet   a row a topic and window: messages, bytes, percentiles of size and latency
keys.parquet      the keys with the most messages of each topic
shards.parquet    messages and bytes of each shard
topics.parquet    all of it in a row a topic, with how much the largest keys have
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polybus.spark.pipelines import stats_groups
from polybus.spark.pipelines.report import histogram
from polybus.spark.pipelines.report.figures import Group, Key, Shard, Topic, Window
from polybus.spark.pipelines.stats_parts import Parts, replace_table

MOST_KEYS = 1000  # of a topic
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
TOP = 10
SIZE, LATENCY = "size", "latency"
US_PER_MS = 1000
S = pa.timestamp("s", tz="UTC")

Buckets = dict[tuple[str, int, str], dict[int, int]]


def make(folder: Path, parts: Parts, window_s: int, samples: pa.Table) -> list[Topic]:
    """Writes the tables; the figures of the same."""
    windows = parts.read("windows").to_pylist()
    buckets = _buckets(parts.read("buckets"))
    keys = parts.read("keys")
    replace_table(folder / "windows.parquet", _windows_table(windows, buckets, window_s))
    by_key = _sums(keys, ["topic", "shard_key"]).filter(pc.field("shard_key").is_valid())
    by_shard = _sums(keys, ["topic", "shard"])
    names = sorted({row["topic"] for row in windows})
    largest = {name: _largest(by_key, name) for name in names}
    figures = [
        _figures(name, windows, buckets, window_s, largest[name], by_key, by_shard, samples)
        for name in names
    ]
    top = pa.concat_tables(list(largest.values())) if largest else by_key.slice(0, 0)
    replace_table(folder / "keys.parquet", top)
    replace_table(folder / "shards.parquet", by_shard)
    replace_table(folder / "topics.parquet", _topics_table(figures))
    return figures


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


def _largest(by_key: pa.Table, topic: str) -> pa.Table:
    own = by_key.filter(pc.field("topic") == topic)
    order = [("messages", "descending"), ("shard_key", "ascending")]
    return own.sort_by(order).slice(0, MOST_KEYS)


def _windows_table(windows: list[dict[str, Any]], buckets: Buckets, window_s: int) -> pa.Table:
    rows = []
    for row in windows:
        place = row["topic"], row["start_s"]
        size, latency = buckets[*place, SIZE], buckets[*place, LATENCY]
        rows.append(
            {
                "topic": row["topic"],
                "start": row["start_s"],
                "seconds": window_s,
                "messages": row["messages"],
                "bytes": row["bytes"],
                **{f"size_{n}": histogram.quantile(size, share) for n, share in SHARES.items()},
                **{f"latency_ms_{n}": _ms(latency, share) for n, share in SHARES.items()},
            }
        )
    percentiles = [(f"{what}_{n}", pa.float64()) for what in ("size", "latency_ms") for n in SHARES]
    counts = [(name, pa.int64()) for name in ("seconds", "messages", "bytes")]
    schema = pa.schema([("topic", pa.utf8()), ("start", S), *counts, *percentiles])
    return pa.Table.from_pylist(rows, schema=schema)


def _ms(latency_us: dict[int, int], share: float) -> float | None:
    found = histogram.quantile(latency_us, share)
    return None if found is None else found / US_PER_MS


def _figures(
    name: str,
    windows: list[dict[str, Any]],
    buckets: Buckets,
    window_s: int,
    largest: pa.Table,
    by_key: pa.Table,
    by_shard: pa.Table,
    samples: pa.Table,
) -> Topic:
    own = [row for row in windows if row["topic"] == name]
    with_key = by_key.filter(pc.field("topic") == name)
    shards = by_shard.filter(pc.field("topic") == name).to_pylist()
    total = sum(row["messages"] for row in own)
    return Topic(
        name,
        [
            Window(
                row["start_s"],
                window_s,
                row["messages"],
                row["bytes"],
                buckets[name, row["start_s"], SIZE],
                buckets[name, row["start_s"], LATENCY],
            )
            for row in own
        ],
        [Key(row["shard_key"], row["messages"], row["bytes"]) for row in largest.to_pylist()],
        with_key.num_rows,
        total - (pc.sum(with_key.column("messages")).as_py() or 0),
        [Shard(row["shard"], row["messages"], row["bytes"]) for row in shards],
        [_group(row) for row in stats_groups.of_topic(samples, name)],
    )


def _group(row: dict[str, Any]) -> Group:
    counts = {name: row[name] for name in ("lag", "acked", "redelivered", "dead_lettered")}
    return Group(
        row["at"].timestamp(),
        row["group"],
        members=row["members"],
        lag_s=row["lag_s"],
        ack_latency=dict(row["ack_latency"]),
        **counts,
    )


def _topics_table(figures: list[Topic]) -> pa.Table:
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


def _share(topic: Topic, keys: int) -> float:
    return sum(one.messages for one in topic.keys[:keys]) / max(1, topic.messages)
