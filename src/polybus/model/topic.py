"""A durable topic and the bounds of its shards.

The number of a topic is never reused, so a caller that holds a `Topic` of a name that was
dropped and created again cannot write into the new one by mistake. A generation is a set of
parallel shards; resharding seals one and opens the next with new shard numbers: shards 0…15
of a first generation of 16, then 16…47 of a second of 32. The bus defines `settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

MAX_SHARDS: Final = 512  # per generation, so that one commit can write to all

All = Literal["all"]
ALL: Final = "all"  # all shards, read in the order of ids


@dataclass(frozen=True, slots=True)
class Topic:
    name: str
    number: int
    generations: tuple[int, ...] = (1,)  # number of shards of each; the last is open
    settings: Mapping[str, object] = field(default_factory=dict)  # JSON values

    @property
    def shards(self) -> range:
        """Return all shard numbers, including sealed generations."""
        return range(sum(self.generations))

    @property
    def open_shards(self) -> range:
        """Return the shards of the open generation."""
        return range(sum(self.generations[:-1]), sum(self.generations))


class ShardBounds(NamedTuple):
    """A shard has offsets `start` to `end` (exclusive) in `size_bytes` of blocks.

    Blocks count completely, even if a trim has removed their first messages.
    """

    start: int
    end: int
    size_bytes: int


class Bounds(NamedTuple):
    """The bounds of a topic: ids `first_id` to `next_id` (exclusive) may exist.

    `first_id` equals `next_id` if there are no messages, and never decreases.
    """

    first_id: int
    next_id: int
    timestamp_ns: int  # of the newest message ever; 0 if there was none
    shards: tuple[ShardBounds, ...]
