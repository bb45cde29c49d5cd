"""The way of a block to its shards: by key, over the shards of one generation.

The bus splits a batch over the open shards before it submits the commit. If the topic is
resharded in between, the shards are sealed when the commit is executed. The engine then splits
the blocks again, at the place of the commit in the order of all commits. So commits of one
producer keep their order per key, and no producer has to wait for a reshard or to retry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.model.block import KEYLESS_RUN
from polybus.model.commit import Append

if TYPE_CHECKING:
    from polybus.model.block import Block
    from polybus.model.topic import Topic


def split_block(topic: int, shards: range, block: Block, turn: int) -> tuple[Append, ...]:
    """Return appends to the shards of a generation, by key.

    Messages without a key go round the shards in runs; `turn` chooses the first shard.
    """
    count = len(shards)
    if count == 1:
        return (Append(topic, shards[0], block),)
    keyless = turn % count
    # Ids run by shard, so a batch without keys stays in order if its runs do not wrap around.
    runs = count_runs(block)
    if keyless + runs > count >= runs:
        keyless = 0
    parts = block.split(count, keyless)
    return tuple([Append(topic, shards[index], part) for index, part in parts])


def count_runs(block: Block) -> int:
    """Return the number of runs if no message has a key."""
    return -(-block.count // KEYLESS_RUN)


def open_appends(topic: Topic, append: Append) -> Iterator[Append]:
    """Yield the append, split over the open shards if its shard is sealed."""
    number, shard, block = append
    if shard in topic.open_shards:
        yield append
    else:
        yield from split_block(number, topic.open_shards, block, shard)
