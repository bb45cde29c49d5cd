"""Partitions: the ranges of offsets that each task reads, and the limits of a batch.

A long range of a shard is split, so that tasks have about the same size. Short ranges share a
task, because starting a task costs more than reading some thousand messages. The offsets alone
determine the rows of a batch: it may be planned again with other partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from polybus.spark.source.read_bounds import Offsets

# The most rows of a partition by default (option rowsPerPartition), and the size up to which
# short ranges share a partition.
MOST_ROWS = 500_000
FEW_ROWS = 50_000
# Messages between the first two samples for maxBytesPerBatch; the distance doubles.
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


# Returns the mean size of messages at an offset of a range.
MeanBytesAt = Callable[[OffsetRange, int], float]


@dataclass
class Partition(InputPartition):
    """Input of a task. It reports `query` to the bus for each of `announced_topics`."""

    ranges: tuple[OffsetRange, ...] = ()
    query: str = ""
    announced_topics: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.ranges)


def ranges_between(starts: Offsets, ends: Offsets) -> list[OffsetRange]:
    """Return the ranges that are not empty."""
    return [
        OffsetRange(topic, shard, starts[topic][shard], end)
        for topic, shards in ends.items()
        for shard, end in shards.items()
        if starts[topic][shard] < end
    ]


def plan_partitions(
    ranges: Sequence[OffsetRange], rows_per_partition: int | None
) -> list[Partition]:
    """Return at least one partition: without any, Spark would create one of its own."""
    most = rows_per_partition or MOST_ROWS
    groups: list[list[OffsetRange]] = []
    room = 0  # rows that still fit into the last group
    for whole in ranges:
        # Pieces of about the same size, none with more than `most` rows.
        count = -(-whole.rows // most)
        for n in range(count):
            start = whole.start + whole.rows * n // count
            end = whole.start + whole.rows * (n + 1) // count
            piece = whole._replace(start=start, end=end)
            if piece.rows <= room:
                groups[-1].append(piece)
                room -= piece.rows
            else:
                groups.append([piece])
                # Small partitions are not shared if the user asked for them.
                room = FEW_ROWS - piece.rows if most >= FEW_ROWS else 0
    return [Partition(tuple(group)) for group in groups] or [Partition()]


def limit_rows(ranges: Sequence[OffsetRange], max_rows: int) -> list[OffsetRange]:
    """Return the first part of each range, `max_rows` in total.

    Each range gets a share in proportion to its length, and at least one row if there is room.
    """
    total = sum(wanted.rows for wanted in ranges)
    if total <= max_rows:
        return list(ranges)
    least = 1 if len(ranges) <= max_rows else 0
    to_share, room = total - least * len(ranges), max_rows - least * len(ranges)
    admitted, seen, given = [], 0, 0
    for wanted in ranges:
        seen += wanted.rows - least
        share = room * seen // to_share - given
        given += share
        admitted.append(wanted._replace(end=wanted.start + least + share))
    return admitted


def limit_bytes(
    ranges: Sequence[OffsetRange], max_bytes: int, weigh: MeanBytesAt
) -> list[OffsetRange]:
    """Return the first part of each range, about `max_bytes` in total and at least one message."""
    total = sum(wanted.rows for wanted in ranges)
    admitted = [
        wanted._replace(
            end=wanted.start + _rows_within(wanted, max_bytes * wanted.rows / total, weigh)
        )
        for wanted in ranges
    ]
    if ranges and not any(wanted.rows for wanted in admitted):
        admitted[0] = ranges[0]._replace(end=ranges[0].start + 1)
    return admitted


def _rows_within(wanted: OffsetRange, max_bytes: float, weigh: MeanBytesAt) -> int:
    """Return how many of the first messages fit into `max_bytes`, estimated from samples.

    Samples are taken at both ends of stretches that double in length, and the larger mean counts:
    where messages grow, the batch becomes too short rather than too long.
    """
    at, stretch, used, size = wanted.start, FIRST_STRETCH, 0.0, weigh(wanted, wanted.start)
    while at < wanted.end:
        end = min(at + stretch, wanted.end)
        ahead = weigh(wanted, end - 1)
        heavier = max(size, ahead, 1.0)
        if used + heavier * (end - at) > max_bytes:
            return at - wanted.start + int((max_bytes - used) / heavier)
        used += heavier * (end - at)
        at, stretch, size = end, 2 * stretch, ahead
    return wanted.rows
