"""Groups as rows for people: how far each is behind, and how long its acks take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from polybus.cli.table import show

COLUMNS = (
    *("group", "members", "lag", "lag s", "acked", "emitted"),
    *("redelivered", "dead", "ack p50", "ack p99"),
)
COUNTS = ("lag", "lag_s", "acked", "emitted", "redelivered", "dead_lettered")


def show_groups(groups: Iterable[Mapping[str, Any]], *, by_shard: bool) -> None:
    rows = []
    for group in groups:
        latency = group["ack_latency"]
        quantiles = (_shown(quantile_ms(latency, 0.5)), _shown(quantile_ms(latency, 0.99)))
        rows.append([group["group"], len(group["members"]), *_counts(group), *quantiles])
        if by_shard:
            rows += [_shard_row(one) for one in group["shards"]]
    show(COLUMNS, rows)


def quantile_ms(histogram: Mapping[str, int], share: float) -> float | None:
    """At most so long took this share of all: the upper bound of its bucket; None of none."""
    wanted = math.ceil(sum(histogram.values()) * share)
    reached = 0
    for bound in sorted(histogram, key=float):
        reached += histogram[bound]
        if reached >= wanted > 0:
            return float(bound)
    return None


def _shown(bound_ms: float | None) -> str:
    if bound_ms is None:
        return ""
    return "slower" if math.isinf(bound_ms) else f"≤ {bound_ms:g} ms"


def _counts(one: Mapping[str, Any]) -> list[Any]:
    return [one[key] for key in COUNTS]


def _shard_row(one: Mapping[str, Any]) -> list[Any]:
    return [f"  shard {one['shard']}", one["owner"] or "-", *_counts(one), "", ""]
