"""Reset: move a group to another position, where it starts again.

Acks, failures and suspect offsets are cleared. Counts of emitted messages and dead letters
stay. Epochs rise, so that active runs cannot ack messages that will be delivered again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polybus.errors import Conflict, MalformedRequest
from polybus.groups.group_registry import MAX_RECORDS_PER_COMMIT, split_shards
from polybus.groups.group_state import Group, GroupContext, GroupUpdate
from polybus.groups.shard_phases import ShardPhase, find_phases
from polybus.groups.shard_progress import skip_trimmed
from polybus.model.start_point import EARLIEST, LATEST

Positions = Mapping[int, int]  # offsets by shard
FORMS = '"earliest", "latest", {"id": N}, {"time_ns": N} or {"offsets": {"SHARD": N}}'


def check_has_no_members(group: Group, force: bool) -> None:
    """Raise `Conflict` if the group has members, unless forced."""
    if group.roster.members and not force:
        names = ", ".join(sorted(group.roster.members))
        raise Conflict(f"group {group.name!r} has consumers: {names}")


def reset(context: GroupContext, group: Group, to: Any, force: bool) -> dict[int, int]:
    """Move the group. Returns the new offset of each shard that was moved."""
    positions = _find_positions(context, group, to)
    with group.lock:
        group.check_exists()
        check_has_no_members(group, force)
        phases = _phases_after(context, group, positions)
        # The newest first: a shard must have no owner when its parents are moved back.
        shards = [group.shard(number) for number in sorted(positions, reverse=True)]
        bounds = context.durable.store.bounds(group.topic.number).shards
        for chunk in split_shards(shards, MAX_RECORDS_PER_COMMIT):
            with GroupUpdate(context, group, chunk) as update:
                for shard in chunk:
                    # Trimmed messages that it had not skipped yet stay counted.
                    progress = skip_trimmed(shard.progress, bounds[shard.number].start)
                    emitted, redelivered = shard.counted
                    to_offset = positions[shard.number]
                    if phases and phases[shard.number] is not ShardPhase.ACTIVE:
                        progress = progress._replace(owner=None, member=0)
                    update.changed[shard] = progress._replace(
                        epoch=progress.epoch + 1,
                        start=to_offset,
                        low=to_offset,
                        ranges=(),
                        attempts={},
                        suspect_to=0,
                        emitted=progress.emitted + emitted,
                        redelivered=progress.redelivered + redelivered,
                        counted=(0, 0),
                    )
                update.commit()
                for shard in chunk:
                    shard.reset_owner()
    context.wake(group.topic.number)
    return dict(positions)


def _phases_after(context: GroupContext, group: Group, positions: Positions) -> list[ShardPhase]:
    """Return the phase of each shard after the reset; none if the topic was never resharded."""
    if len(group.topic.generations) == 1:
        return []
    lows = [positions.get(shard.number, shard.progress.low) for shard in group.shards]
    return find_phases(group.topic, lows, context.durable.store.bounds(group.topic.number).shards)


def _find_positions(context: GroupContext, group: Group, to: Any) -> Positions:
    store, number = context.durable.store, group.topic.number
    # Without shards that were opened since: the group gets them from their start.
    bounds = store.bounds(number).shards[: len(group.shards)]
    if to == EARLIEST:
        return {shard: each.start for shard, each in enumerate(bounds)}
    if to == LATEST:
        return {shard: each.end for shard, each in enumerate(bounds)}
    if not isinstance(to, dict) or len(to) != 1:
        raise MalformedRequest(f"position of a reset must be {FORMS}")
    ((form, value),) = to.items()
    if form == "time_ns" and _is_count(value):
        return {shard: store.find(number, shard, value) for shard in range(len(bounds))}
    if form == "id" and _is_count(value):
        return {shard: store.find_id(number, shard, value) for shard in range(len(bounds))}
    if form == "offsets" and isinstance(value, dict):
        positions = {}
        for text, offset in value.items():
            if not (text.isascii() and text.isdigit() and len(text) < 6):
                raise MalformedRequest(f"shard must be a number, got {text[:64]!r}")
            shard = group.shard(int(text)).number
            if not _is_count(offset):
                raise MalformedRequest("offset must be an integer >= 0")
            positions[shard] = min(max(offset, bounds[shard].start), bounds[shard].end)
        return positions
    raise MalformedRequest(f"position of a reset must be {FORMS}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
