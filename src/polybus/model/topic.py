"""A durable topic as the store knows it, and where its shards begin and end.

A topic's number is never used for another one, so whoever holds a `Topic` of a
name that was dropped and created again cannot write into the new one by mistake.
A generation is a set of shards side by side; resharding seals one and opens the
next, with new shard numbers: shards 0…15 of a first generation of 16, then 16…47
of a second of 32. What `settings` mean is the bus's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

MAX_SHARDS: Final = 512  # of one generation, so that one commit can reach them all

All = Literal["all"]
ALL: Final = "all"  # the topic read in the order of its ids, over all shards


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    number: int
    generations: tuple[int, ...] = (1,)  # the number of shards of each; the last is open
    settings: Mapping[str, object] = field(default_factory=dict)  # what JSON can hold

    @property
    def shards(self) -> range:
        """All shard numbers, those of sealed generations included."""
        return range(sum(self.generations))

    @property
    def open_shards(self) -> range:
        """The shards that can be appended to."""
        return range(sum(self.generations[:-1]), sum(self.generations))


class ShardBounds(NamedTuple):
    """Offsets `start` to `end` (exclusive) are there, and take up `size_bytes` of blocks.

    Blocks count whole, also if only their last messages are still there.
    """

    start: int
    end: int
    size_bytes: int


class Bounds(NamedTuple):
    """Where a topic begins and ends: ids `first_id` to `next_id` (exclusive) may be there.

    None below `first_id` is; it is `next_id` if there are no messages, and never goes back.
    """

    first_id: int
    next_id: int
    timestamp_ns: int  # of the newest message ever; 0 if there was none
    shards: tuple[ShardBounds, ...]
