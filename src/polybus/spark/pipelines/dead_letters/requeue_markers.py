"""Which markers of re-queued dead letters are still needed: those whose letters are there.

A letter without its marker would be queued again, so `retain` takes markers after letters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polybus.errors import DoesNotExist
from polybus.spark.archive.trim_bounds import Hold

if TYPE_CHECKING:
    from polybus.spark.source.log_access import Access, Shard

SUFFIX, MARKED = ".dlq", ".requeued"


def holds(access: Access, topic: str, shards: Mapping[int, Shard]) -> dict[int, Hold]:
    """Of a topic of markers: the first of each shard that is needed. Of any other: nothing."""
    letters = topic.removesuffix(MARKED)
    if not topic.endswith(SUFFIX + MARKED):
        return {}
    try:
        there = access.shards(letters)
    except DoesNotExist:
        return {}
    by = f"dead letters of {letters}"
    return {n: Hold(_first(access, topic, n, one, there), by) for n, one in shards.items()}


def _first(
    access: Access, topic: str, shard: int, there: Shard, letters: Mapping[int, Shard]
) -> int:
    for batch in access.read(topic, shard, *there):
        places = map(json.loads, batch.column("body").to_pylist())
        for offset, place in zip(batch.column("offset").to_pylist(), places, strict=True):
            if place["offset"] >= letters[place["shard"]].start:
                return int(offset)
    return there.end
