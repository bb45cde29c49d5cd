"""How far a log may be trimmed: archived, acked by every group, read by every Pirate subscriber.

A group counts from its first member, a subscriber from its subscription, and both until they are
removed. A group or subscriber that is no longer in use therefore holds the log forever, on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from polybus.spark.archive.manifest import OffsetSpan
from polybus.spark.source.log_access import first_with_id

if TYPE_CHECKING:
    from polybus.spark.archive.manifest import Manifest
    from polybus.spark.source.log_access import LogAccess, ShardOffsets


class TrimHold(NamedTuple):
    """The first offset that must be kept, and what it is kept for."""

    offset: int
    by: str


ARCHIVE = "the archive"


def find_trimmable(
    access: LogAccess,
    manifest: Manifest,
    log: Mapping[int, ShardOffsets],
    stats: Mapping[str, Any],
    extra_holds: Mapping[int, TrimHold] | None = None,
) -> dict[int, tuple[OffsetSpan, str]]:
    """Return for each shard the offsets that may be trimmed, and the name of the lowest hold."""
    found = {}
    for shard, log_offsets in log.items():
        holds = [TrimHold(manifest.end(shard) or 0, ARCHIVE)]
        holds += [extra_holds[shard]] if extra_holds and shard in extra_holds else []
        holds += _groups(stats, shard)
        holds += _subscribers(access, manifest.topic, shard, log_offsets, stats)
        # TrimHold compares by offset first.
        least = min(holds)
        found[shard] = (
            OffsetSpan(
                log_offsets.start, max(log_offsets.start, min(least.offset, log_offsets.end))
            ),
            least.by,
        )
    return found


def _groups(stats: Mapping[str, Any], shard: int) -> Iterator[TrimHold]:
    """Yield the holds of consumer groups. A group without a position in a shard will begin at 0."""
    for group in stats["groups"]:
        lows = {one["shard"]: one["low"] for one in group["shards"]}
        yield TrimHold(lows.get(shard, 0), f"group {group['group']}")


def _subscribers(
    access: LogAccess, topic: str, shard: int, log_offsets: ShardOffsets, stats: Mapping[str, Any]
) -> Iterator[TrimHold]:
    """Yield the holds of Pirate subscribers."""
    for one in stats.get("subscribers", ()):
        offset = first_with_id(access, topic, shard, log_offsets, one["last"] + 1)
        yield TrimHold(offset, f"subscriber {one['id']}")
