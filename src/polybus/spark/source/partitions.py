"""Which task reads what, and how much one batch of a stream may have.

A partition is a few ranges of offsets. A range of a shard that is long is cut, so that
tasks have about the same to do; short ones share a task, since a task costs more than
some thousand messages. The rows of a batch are fixed by its offsets alone: it may be
planned again in other partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from polybus.spark.source.read_bounds import Offsets

# Unless rowsPerPartition says otherwise.
MOST_ROWS = 500_000
FEW_ROWS = 50_000
# Of messages that are weighed for maxBytesPerBatch.
FIRST_STRETCH = 64


class OffsetRange(NamedTuple):
    """Offsets `start` to `end` (exclusive) of a shard."""

    topic: str
    shard: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


# How large messages are at an offset of a range.
MeanBytesAt = Callable[[OffsetRange, int], float]


@dataclass
class Partition(InputPartition):
    """`introduces` are topics whose bus is to be told which query this is."""

    ranges: tuple[OffsetRange, ...] = ()
    query: str = ""
    announced_topics: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.ranges)


def ranges_between(starts: Offsets, ends: Offsets) -> list[OffsetRange]:
    return [
        OffsetRange(topic, shard, starts[topic][shard], end)
        for topic, shards in ends.items()
        for shard, end in shards.items()
        if starts[topic][shard] < end
    ]


def plan_partitions(
    ranges: Sequence[OffsetRange], rows_per_partition: int | None
) -> list[Partition]:
    """One partition or more: Spark would make one of its own if there were none."""
    most = rows_per_partition or MOST_ROWS
    cut = [piece for one in ranges for piece in _cut(one, most)]
    if most < FEW_ROWS:
        return [Partition((piece,)) for piece in cut] or [Partition()]
    return list(_group_ranges(cut)) or [Partition()]


def _cut(whole: OffsetRange, rows: int) -> Iterator[OffsetRange]:
    """Pieces of about the same size, none with more than `rows`."""
    pieces = -(-whole.rows // rows)
    for piece in range(pieces):
        start = whole.start + whole.rows * piece // pieces
        end = whole.start + whole.rows * (piece + 1) // pieces
        yield whole._replace(start=start, end=end)


def _group_ranges(ranges: Iterable[OffsetRange]) -> Iterator[Partition]:
    waiting: list[OffsetRange] = []
    for one in ranges:
        if waiting and one.rows + sum(each.rows for each in waiting) > FEW_ROWS:
            yield Partition(tuple(waiting))
            waiting = []
        waiting.append(one)
    if waiting:
        yield Partition(tuple(waiting))


def limit_rows(ranges: Sequence[OffsetRange], max_rows: int) -> list[OffsetRange]:
    """The first of each range, `max_rows` in all: each a share by its length, none nothing."""
    total = sum(one.rows for one in ranges)
    if total <= max_rows:
        return list(ranges)
    least = 1 if len(ranges) <= max_rows else 0
    to_share, room = total - least * len(ranges), max_rows - least * len(ranges)
    admitted, seen, given = [], 0, 0
    for one in ranges:
        seen += one.rows - least
        share = room * seen // to_share - given
        given += share
        admitted.append(one._replace(end=one.start + least + share))
    return admitted


def limit_bytes(
    ranges: Sequence[OffsetRange], max_bytes: int, weigh: MeanBytesAt
) -> list[OffsetRange]:
    """The same for about so many bytes, and for one message at least."""
    total = sum(one.rows for one in ranges)
    admitted = [
        one._replace(end=one.start + _rows_within(one, max_bytes * one.rows / total, weigh))
        for one in ranges
    ]
    if ranges and not any(one.rows for one in admitted):
        admitted[0] = ranges[0]._replace(end=ranges[0].start + 1)
    return admitted


def _rows_within(one: OffsetRange, max_bytes: float, weigh: MeanBytesAt) -> int:
    """How many of the first messages weigh no more than that, by weighing a few.

    They are weighed at both ends of stretches that double, and the heavier end counts: where
    messages become larger the batch becomes too short rather than too long.
    """
    at, stretch, used, size = one.start, FIRST_STRETCH, 0.0, weigh(one, one.start)
    while at < one.end:
        end = min(at + stretch, one.end)
        ahead = weigh(one, end - 1)
        heavier = max(size, ahead, 1.0)
        if used + heavier * (end - at) > max_bytes:
            return at - one.start + int((max_bytes - used) / heavier)
        used += heavier * (end - at)
        at, stretch, size = end, 2 * stretch, ahead
    return one.rows
