"""Statistics of a group: members, positions, lag, counts."""

from __future__ import annotations

from typing import Any

from polybus.groups.ack_latency import BUCKET_NAMES
from polybus.groups.group_records import ShardProgress
from polybus.groups.group_state import Group, GroupContext, GroupShard
from polybus.model import offset_ranges
from polybus.model.topic import ShardBounds


def describe_group(context: GroupContext, group: Group) -> dict[str, Any]:
    """Return all statistics. Reads one row of each shard that has a lag."""
    bounds = context.durable.store.bounds(group.topic.number).shards
    owners: dict[str, list[int]] = {}
    latency = dict.fromkeys(BUCKET_NAMES, 0)
    for shard in group.shards:
        owners.setdefault(shard.progress.owner or "", []).append(shard.number)
        for name, count in shard.progress.latency.items():
            latency[name] = latency.get(name, 0) + count
    members = [
        {
            "consumer": name,
            "epoch": member.epoch,
            "shards": owners.get(name, []),
            "max_deliver": member.max_deliver,
            "heartbeat_ms": member.heartbeat_ms,
            "dead_ms": member.dead_ms,
        }
        for name, member in sorted(group.roster.members.items())
    ]
    shards = [
        _describe_shard(context, group, shard, bounds[shard.number]) for shard in group.shards
    ]
    return {
        "group": group.name,
        "paused": group.roster.is_paused,
        "members": members,
        "shards": shards,
        "ack_latency": latency,
    }


def summarize_group(context: GroupContext, group: Group) -> dict[str, Any]:
    """Return the totals, without reading a message."""
    bounds = context.durable.store.bounds(group.topic.number).shards
    lags = [_lag(shard.progress, bounds[shard.number]) for shard in group.shards]
    return {
        "topic": group.topic.name,
        "group": group.name,
        "members": len(group.roster.members),
        "shards": len(group.shards),
        "acked": sum(shard.progress.acked for shard in group.shards),
        "lag": sum(lags),
        "paused": group.roster.is_paused,
    }


def _describe_shard(
    context: GroupContext, group: Group, shard: GroupShard, bounds: ShardBounds
) -> dict[str, Any]:
    progress, (emitted, redelivered) = shard.progress, shard.counted
    trimmed = offset_ranges.count_unacked(progress.low, progress.ranges, bounds.start)
    lag, lag_s = _lag(progress, bounds), 0.0
    if lag:
        # The age of the oldest message that is not acked.
        oldest = max(progress.low, bounds.start)
        acked = offset_ranges.find_range(progress.ranges, oldest)
        offset = acked[1] if acked else oldest
        written_ns = context.commit_time_ns(group.topic, shard.number, offset)
        if written_ns is not None:
            lag_s = round(max(0, context.wall_ns() - written_ns) / 1e9, 3)
    return {
        "shard": shard.number,
        "phase": group.phase_of(shard.number).value,
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
        "expired": progress.expired,
        "trimmed_unread": progress.trimmed_unread + trimmed,
        "lag": lag,
        "lag_s": lag_s,
    }


def _lag(progress: ShardProgress, bounds: ShardBounds) -> int:
    """Return the number of stored messages that are not acked."""
    end = offset_ranges.count_unacked(progress.low, progress.ranges, bounds.end)
    return end - offset_ranges.count_unacked(progress.low, progress.ranges, bounds.start)
