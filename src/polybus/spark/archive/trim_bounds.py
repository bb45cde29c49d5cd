"""How much of a log is needed no more: archived, acked by every group, read by every
subscriber of Pirate.

A group counts from its first member on, a subscriber from its subscription on, and both until
they are removed: one that nobody runs any more holds the log back for ever, on purpose.
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
    """Who keeps a shard from being trimmed any further."""

    offset: int
    by: str


ARCHIVE = "the archive"


def find_trimmable(
    access: LogAccess,
    manifest: Manifest,
    log: Mapping[int, ShardOffsets],
    stats: Mapping[str, Any],
    further: Mapping[int, TrimHold] | None = None,
) -> dict[int, tuple[OffsetSpan, str]]:
    """Of each shard what may go, from where it begins, and who keeps the rest."""
    found = {}
    for shard, there in log.items():
        holds = [TrimHold(manifest.end(shard) or 0, ARCHIVE)]
        holds += [further[shard]] if further and shard in further else []
        holds += _groups(stats, shard)
        holds += _subscribers(access, manifest.topic, shard, there, stats)
        least = min(holds)
        found[shard] = (
            OffsetSpan(there.start, max(there.start, min(least.offset, there.end))),
            least.by,
        )
    return found


def _groups(stats: Mapping[str, Any], shard: int) -> Iterator[TrimHold]:
    """One that has no position in a shard yet will begin with it."""
    for group in stats["groups"]:
        lows = {one["shard"]: one["low"] for one in group["shards"]}
        yield TrimHold(lows.get(shard, 0), f"group {group['group']}")


def _subscribers(
    access: LogAccess, topic: str, shard: int, there: ShardOffsets, stats: Mapping[str, Any]
) -> Iterator[TrimHold]:
    for one in stats.get("subscribers", ()):
        offset = first_with_id(access, topic, shard, there, one["last"] + 1)
        yield TrimHold(offset, f"subscriber {one['id']}")
