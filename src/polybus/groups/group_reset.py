"""A group moved to another position: it starts anew from there.

What it had acked, what had failed and what was suspect is forgotten; counts of what
was emitted and given up stay. Epochs rise, so that nothing that is still under way can
ack what is to come again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polybus.errors import Conflict, MalformedRequest
from polybus.groups.group_registry import EARLIEST, LATEST, MAX_RECORDS_PER_COMMIT, split_shards
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate

if TYPE_CHECKING:
    from polybus.groups.group_records import ShardProgress

Positions = Mapping[int, int]  # offsets by shard
FORMS = '"earliest", "latest", {"id": N}, {"time_ns": N} or {"offsets": {"SHARD": N}}'


def check_has_no_members(group: Group, force: bool) -> None:
    if group.roster.members and not force:
        text = f"group {group.name!r} has consumers: {', '.join(sorted(group.roster.members))}"
        raise Conflict(text)


def reset(means: GroupContext, group: Group, to: Any, force: bool) -> dict[int, int]:
    """The offset from which each shard is read now, of those that were moved."""
    positions = _positions(means, group, to)
    with group.lock:
        group.check_exists()
        check_has_no_members(group, force)
        moved = [group.shard(number) for number in positions]
        for some in split_shards(moved, MAX_RECORDS_PER_COMMIT):
            with GroupUpdate(means, group, some) as work:
                for shard in some:
                    work.set_progress(shard, _reset_progress(shard, positions[shard.number]))
                work.commit()
                for shard in some:
                    shard.reset_owner(shard.progress.low)
    means.wake(group.topic.number)
    return dict(positions)


def _reset_progress(shard: GroupShard, to: int) -> ShardProgress:
    progress, (emitted, redelivered) = shard.progress, shard.counted
    return progress._replace(
        epoch=progress.epoch + 1,
        start=to,
        low=to,
        ranges=(),
        attempts={},
        suspect_to=0,
        emitted=progress.emitted + emitted,
        redelivered=progress.redelivered + redelivered,
        counted=(0, 0),
    )


def _positions(means: GroupContext, group: Group, to: Any) -> Positions:
    store, number = means.durable.store, group.topic.number
    bounds = store.bounds(number).shards
    if to == EARLIEST:
        return {shard: one.start for shard, one in enumerate(bounds)}
    if to == LATEST:
        return {shard: one.end for shard, one in enumerate(bounds)}
    if not isinstance(to, dict) or len(to) != 1:
        raise MalformedRequest(f"a group is reset to {FORMS}")
    ((form, value),) = to.items()
    if form == "time_ns" and _is_count(value):
        return {shard: store.find(number, shard, value) for shard in range(len(bounds))}
    if form == "id" and _is_count(value):
        return _find_offsets(means, group, value)
    if form == "offsets" and isinstance(value, dict):
        return {
            _shard(group, text): _clamp_offset(at, bounds[_shard(group, text)])
            for text, at in value.items()
        }
    raise MalformedRequest(f"a group is reset to {FORMS}")


def _find_offsets(means: GroupContext, group: Group, first: int) -> Positions:
    """The first offset of each shard whose message has this id or a later one.

    Ids rise with offsets within a shard: it is looked for by halves.
    """
    store, number = means.durable.store, group.topic.number
    found = {}
    for shard, (start, end, _) in enumerate(store.bounds(number).shards):
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            rows = store.read(number, shard, middle, middle + 1, max_rows=1)
            if rows.count and int.from_bytes(rows.ids[:8], "little") < first:
                low = middle + 1
            else:
                high = middle
        found[shard] = low
    return found


def _shard(group: Group, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise MalformedRequest(f"{text[:64]!r} is no shard's number")
    return group.shard(int(text)).number


def _clamp_offset(offset: object, bounds: tuple[int, int, int]) -> int:
    start, end, _ = bounds
    if not _is_count(offset):
        raise MalformedRequest("an offset is an integer from 0 on")
    assert isinstance(offset, int)
    return min(max(offset, start), end)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
