"""Samples of consumer groups: their lag, and the time until messages are acked.

Taken from the bus at intervals and kept in a table with a row per group and sample. The oldest rows
are dropped beyond MOST_ROWS.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polybus.errors import DoesNotExist
from polybus.native import Client
from polybus.spark.pipelines.stats.partial_sums import replace_table
from polybus.spark.pipelines.stats.report.histogram import find_quantile_bound
from polybus.spark.source.log_access import RECONNECT_OPTIONS
from polybus.store.engine_registry import is_store_url

GROUPS = "groups.parquet"
MOST_ROWS = 200_000
COUNTS = ("lag", "acked", "emitted", "redelivered", "dead_lettered", "trimmed_unread")
SCHEMA = pa.schema(
    [
        ("at", pa.timestamp("ms", tz="UTC")),
        ("topic", pa.utf8()),
        ("group", pa.utf8()),
        ("members", pa.int32()),
        *((name, pa.int64()) for name in COUNTS),
        ("lag_s", pa.float64()),
        ("ack_p50_ms", pa.float64()),
        ("ack_p99_ms", pa.float64()),
        ("ack_latency", pa.map_(pa.utf8(), pa.int64())),
    ]
)


def sample_groups(bus: str, topics: Iterable[str], now_s: float) -> pa.Table:
    """Return one sample of each group. Files of a store know no members and give no samples."""
    if is_store_url(bus):
        return SCHEMA.empty_table()
    rows = []
    with Client(bus, RECONNECT_OPTIONS) as client:
        for topic in topics:
            try:
                topic_stats = client.act("topic.stats", topic=topic)
            except DoesNotExist:  # dropped after it was counted
                continue
            rows += [_row(topic, group, now_s) for group in topic_stats["groups"]]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def append_samples(folder: Path, new: pa.Table | None = None) -> pa.Table:
    """Store new samples and return all of them, the oldest first."""
    path = folder / GROUPS
    old = pq.read_table(path, schema=SCHEMA) if path.exists() else SCHEMA.empty_table()
    if new is None:
        return old
    whole = pa.concat_tables([old, new])
    whole = whole.slice(max(0, whole.num_rows - MOST_ROWS))
    replace_table(path, whole)
    return whole


def select_topic(samples: pa.Table, topic: str) -> list[dict[str, Any]]:
    """Return the samples of a topic."""
    topic_samples: list[dict[str, Any]] = samples.filter(pc.field("topic") == topic).to_pylist()
    return topic_samples


def _row(topic: str, group: dict[str, Any], now_s: float) -> dict[str, Any]:
    latency = group["ack_latency"]
    bounds = {
        name: find_quantile_bound(latency, share) for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        "at": int(now_s * 1000),
        "topic": topic,
        "group": group["group"],
        "members": len(group["members"]),
        **{name: group[name] for name in COUNTS},
        "lag_s": float(group["lag_s"]),
        **{f"ack_{name}_ms": None if one is None else float(one) for name, one in bounds.items()},
        "ack_latency": sorted(latency.items(), key=lambda one: float(one[0])),
    }
