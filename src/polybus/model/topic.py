"""A durable topic and the bounds of its shards.

The number of a topic is never reused, so a caller that holds a `Topic` of a name that was
dropped and created again cannot write into the new one by mistake. A generation is a set of
parallel shards; resharding seals one and opens the next with new shard numbers: shards 0…15
of a first generation of 16, then 16…47 of a second of 32. The bus defines `settings`.

The index of a shard is its place in its generation, and a key goes to index hash mod n. With n
shards before and m after, a key of index i can only go to an index j with i = j modulo
gcd(n, m). These i are the parents of j: messages of j follow those of its parents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd
from typing import Final, Literal, NamedTuple

MAX_SHARDS: Final = 512  # per generation, so that one commit can write to all
# Of all generations together: records of groups name a shard with four hex digits.
MAX_TOTAL_SHARDS: Final = 1 << 16

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

    @property
    def shards_by_generation(self) -> list[range]:
        """Return the shards of each generation, in order."""
        ends = list(accumulate(self.generations))
        return [range(end - n, end) for n, end in zip(self.generations, ends, strict=True)]

    def index_of(self, shard: int) -> int:
        """Return the place of a shard in its generation."""
        return next(shards.index(shard) for shards in self.shards_by_generation if shard in shards)


def parents_of(index: int, shards: int, before: range) -> range:
    """Return the parents of a shard: those shards of the generation before that may have its keys.

    `index` is its place in a generation of `shards`, and `before` are the shards before that.
    """
    step = gcd(len(before), shards)
    return before[index % step :: step]


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
