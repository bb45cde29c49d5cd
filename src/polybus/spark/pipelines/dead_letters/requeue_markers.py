"""Which markers of re-queued dead letters are still needed: those whose letters are there.

A letter without its marker would be queued again, so `retain` takes markers after letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polybus.errors import DoesNotExist
from polybus.spark.archive.trim_bounds import TrimHold

if TYPE_CHECKING:
    from polybus.spark.source.log_access import LogAccess, ShardOffsets

SUFFIX, MARKED = ".dlq", ".requeued"


def find_holds(
    access: LogAccess, topic: str, shards: Mapping[int, ShardOffsets]
) -> dict[int, TrimHold]:
    """Of a topic of markers: the first of each shard that is needed. Of any other: nothing."""
    letters = topic.removesuffix(MARKED)
    if not topic.endswith(SUFFIX + MARKED):
        return {}
    try:
        there = access.shards(letters)
    except DoesNotExist:
        return {}
    by = f"dead letters of {letters}"
    return {n: TrimHold(_first(access, topic, n, one, there), by) for n, one in shards.items()}


def _first(
    access: LogAccess,
    topic: str,
    shard: int,
    there: ShardOffsets,
    letters: Mapping[int, ShardOffsets],
) -> int:
    for batch in access.read(topic, shard, *there):
        places = map(json.loads, batch.column("body").to_pylist())
        for offset, place in zip(batch.column("offset").to_pylist(), places, strict=True):
            if place["offset"] >= letters[place["shard"]].start:
                return int(offset)
    return there.end
