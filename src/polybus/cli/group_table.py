"""Tables of consumer groups: lag and ack latency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from polybus.cli.text_table import count_of, print_fields

COLUMNS = (
    *("group", "members", "lag", "lag s", "acked", "emitted"),
    *("redelivered", "dead", "expired", "ack p50 ms", "ack p99 ms", "paused"),
)
SHORT = {
    **{name: name for name in ("group", "members", "lag", "lag s", "acked")},
    "again": "redelivered",
    "dead": "dead",
    "p50 ms": "ack p50 ms",
    "p99 ms": "ack p99 ms",
    "paused": "paused",
}


def show_groups(groups: Iterable[Mapping[str, Any]], *, by_shard: bool) -> None:
    rows = []
    for group in groups:
        latency = group["ack_latency"]
        rows.append(
            {
                "group": group["group"],
                "members": len(group["members"]),
                **_counts(group),
                "ack p50 ms": _shown(quantile_ms(latency, 0.5)),
                "ack p99 ms": _shown(quantile_ms(latency, 0.99)),
                "paused": "yes" if group.get("paused") else "-",  # older buses do not send it
            }
        )
        drained: list[dict[str, Any]] = []  # in one row: each reshard adds some
        for shard in group["shards"] if by_shard else ():
            # A shard that a reshard has sealed, or that waits for one, has no owner.
            phase = shard.get("phase", "active")
            owner = shard["owner"] or ("-" if phase == "active" else phase)
            if owner == "drained":
                drained.append(_counts(shard))
                continue
            rows.append({"group": f"  shard {shard['shard']}", "members": owner, **_counts(shard)})
        if drained:
            sums = {name: sum(counts[name] for counts in drained) for name in drained[0]}
            shards = count_of(len(drained), "shard")
            rows.append({"group": "  drained", "members": shards, **sums})
    print_fields(COLUMNS, SHORT, rows)


def quantile_ms(histogram: Mapping[str, int], share: float) -> float | None:
    """Return the quantile as the upper bound of its bucket, or None if there are no samples."""
    rank = math.ceil(sum(histogram.values()) * share)
    reached = 0
    for bound in sorted(histogram, key=float):
        reached += histogram[bound]
        if reached >= rank > 0:
            return float(bound)
    return None


def _counts(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts that a group and each of its shards have."""
    counts = {key: progress[key] for key in ("lag", "acked", "emitted", "redelivered")}
    others = {"dead": progress["dead_lettered"], "expired": progress.get("expired", 0)}
    return {**counts, "lag s": progress["lag_s"], **others}


def _shown(bound_ms: float | None) -> str:
    if bound_ms is None:
        return ""
    return "more" if math.isinf(bound_ms) else f"≤ {bound_ms:g}"
