"""The shards of a resharded topic that a group may read now.

A reshard seals all shards and opens new ones. A key that moves to a new shard still has its
earlier messages in one of the parents of that shard (`polybus.model.topic`). So a group reads a
shard only after it has acked all messages of the parents, and of their parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import gcd

from polybus.model.topic import ShardBounds, Topic, parents_of


class ShardPhase(Enum):
    WAITING = "waiting"  # the group has not acked all messages of the parents
    ACTIVE = "active"  # a member may own it
    DRAINED = "drained"  # sealed, and all of its messages are acked


def find_phases(
    topic: Topic, lows: Sequence[int], bounds: Sequence[ShardBounds]
) -> list[ShardPhase]:
    """Return the phase of each shard of a group with these low-water marks.

    Trimmed messages count as acked, because no member can get them.
    """
    phases: list[ShardPhase] = []
    before, first_open = range(0), topic.open_shards.start
    for shards in topic.shards_by_generation:
        # Shards whose indexes are equal modulo this have the same parents.
        step = gcd(len(before), len(shards))
        ready = [
            all(phases[p] is ShardPhase.DRAINED for p in parents_of(index, len(shards), before))
            for index in range(step)
        ]
        for index, shard in enumerate(shards):
            is_ready = ready[index % step]
            is_read = max(lows[shard], bounds[shard].start) >= bounds[shard].end
            if not is_ready:
                phases.append(ShardPhase.WAITING)
            elif is_read and shard < first_open:
                phases.append(ShardPhase.DRAINED)
            else:
                phases.append(ShardPhase.ACTIVE)
        before = shards
    return phases
