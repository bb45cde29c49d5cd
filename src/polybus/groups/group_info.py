"""What there is to know of a group: members, positions, lag, counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polybus.groups.ack_latency import BUCKET_NAMES
from polybus.groups.group_state import Group, GroupContext, GroupShard
from polybus.model import offset_ranges

if TYPE_CHECKING:
    from polybus.groups.group_records import ShardProgress
    from polybus.model.topic import ShardBounds


def describe_group(means: GroupContext, group: Group) -> dict[str, Any]:
    """All of it. One row is read of each shard that has a lag."""
    bounds = means.durable.store.bounds(group.topic.number).shards
    return {
        "group": group.name,
        "members": _members(group),
        "shards": [_shard(means, group, one, bounds[one.number]) for one in group.shards],
        "ack_latency": _latency(group),
    }


def summarize_group(means: GroupContext, group: Group) -> dict[str, Any]:
    """Without reading any message."""
    bounds = means.durable.store.bounds(group.topic.number).shards
    lags = [_lag(one.progress, bounds[one.number]) for one in group.shards]
    return {
        "topic": group.topic.name,
        "group": group.name,
        "members": len(group.roster.members),
        "shards": len(group.shards),
        "acked": sum(one.progress.acked for one in group.shards),
        "lag": sum(lags),
    }


def _members(group: Group) -> list[dict[str, Any]]:
    owners: dict[str, list[int]] = {}
    for shard in group.shards:
        owners.setdefault(shard.progress.owner or "", []).append(shard.number)
    return [
        {
            "consumer": name,
            "epoch": one.epoch,
            "shards": owners.get(name, []),
            "max_deliver": one.max_deliver,
            "heartbeat_ms": one.heartbeat_ms,
            "dead_ms": one.dead_ms,
        }
        for name, one in sorted(group.roster.members.items())
    ]


def _shard(
    means: GroupContext, group: Group, shard: GroupShard, bounds: ShardBounds
) -> dict[str, Any]:
    progress, (emitted, redelivered) = shard.progress, shard.counted
    trimmed = offset_ranges.count_unacked(progress.low, progress.ranges, bounds.start)
    lag = _lag(progress, bounds)
    return {
        "shard": shard.number,
        "epoch": progress.epoch,
        "owner": progress.owner,
        "start": progress.start,
        "low": progress.low,
        "ranges": len(progress.ranges),
        "attempts": len(progress.attempts),
        "suspect_to": progress.suspect_to,
        "acked": progress.acked,
        "emitted": progress.emitted + emitted,
        "redelivered": progress.redelivered + redelivered,
        "dead_lettered": progress.dead_lettered,
        "trimmed_unread": progress.trimmed_unread + trimmed,
        "lag": lag,
        "lag_s": _lag_s(means, group, shard, bounds) if lag else 0.0,
    }


def _lag(progress: ShardProgress, bounds: ShardBounds) -> int:
    """Messages that are there and not acked."""
    end = offset_ranges.count_unacked(progress.low, progress.ranges, bounds.end)
    return end - offset_ranges.count_unacked(progress.low, progress.ranges, bounds.start)


def _lag_s(means: GroupContext, group: Group, shard: GroupShard, bounds: ShardBounds) -> float:
    """How long ago the oldest of them was written."""
    oldest = max(shard.progress.low, bounds.start)
    acked = offset_ranges.find_range(shard.progress.ranges, oldest)
    at = acked[1] if acked else oldest
    written_ns = means.commit_time_ns(group.topic, shard.number, at)
    if written_ns is None:
        return 0.0
    return round(max(0, means.wall_ns() - written_ns) / 1e9, 3)


def _latency(group: Group) -> dict[str, int]:
    found = dict.fromkeys(BUCKET_NAMES, 0)
    for shard in group.shards:
        for name, count in shard.progress.latency.items():
            found[name] = found.get(name, 0) + count
    return found
