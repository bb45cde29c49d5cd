"""From which offset to which a replay goes, in each shard: what --from and --to say.

Within a shard ids and the bus's times rise with offsets, so a place is one offset of each
shard: the bus (or the archive) finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.model.start_point import EARLIEST, LATEST, parse_start, parse_time_ns

if TYPE_CHECKING:
    from polybus.spark.source.log_access import LogAccess, ShardOffsets

Ends = dict[int, int]  # shard → offset


def offsets_at(access: LogAccess, topic: str, place: str, shards: dict[int, ShardOffsets]) -> Ends:
    """The first offset of each shard that is not before the place."""
    wanted = parse_start(place)
    if wanted == EARLIEST:
        return {shard: there.start for shard, there in shards.items()}
    if wanted == LATEST:
        return {shard: there.end for shard, there in shards.items()}
    if isinstance(wanted, int):
        found = {n: access.find_id(topic, n, wanted) for n in shards}
    else:
        found = {n: access.find_time(topic, n, parse_time_ns(place)) for n in shards}
    return {n: min(max(offset, shards[n].start), shards[n].end) for n, offset in found.items()}
