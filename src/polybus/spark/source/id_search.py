"""Where an id is in a shard: ids grow with offsets, so halving finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polybus.errors import Trimmed

if TYPE_CHECKING:
    from polybus.spark.source.log_access import LogAccess, ShardOffsets


def first_with_id(
    access: LogAccess, topic: str, shard: int, there: ShardOffsets, wanted: int
) -> int:
    """The first offset whose id is this one or a later one; the end if there is none."""
    low, high = there.start, there.end
    while low < high:
        middle = (low + high) // 2
        try:
            is_before = _id_at(access, topic, shard, middle) < wanted
        except Trimmed:  # since we looked
            is_before = True
        low, high = (middle + 1, high) if is_before else (low, middle)
    return low


def _id_at(access: LogAccess, topic: str, shard: int, offset: int) -> int:
    for batch in access.read(topic, shard, offset, offset + 1):
        return int(batch.column("id")[0].as_py())
    raise Trimmed(f"topic {topic!r}, shard {shard}: nothing is at {offset}", offset)
