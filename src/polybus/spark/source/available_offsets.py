"""The offsets that a streaming query can read next: from its position to the ends of its topics."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from polybus.errors import DoesNotExist, PolybusError, TopicDeleted, UsageError
from polybus.spark.source.log_access import LogAccess, ShardOffsets, open_log_access
from polybus.spark.source.partitions import OffsetRange, limit_bytes, limit_rows, ranges_between
from polybus.spark.source.read_bounds import Offsets, ReadBound, TopicSelection, clamp_offset

if TYPE_CHECKING:
    from polybus.spark.source.query_position import QueryPosition

Shards = dict[str, dict[int, ShardOffsets]]

# Messages per sample of the message size, for maxBytesPerBatch.
SAMPLE_ROWS = 4


class AvailableOffsets:
    """Finds the next offsets of a query. Pickled with its reader, so it holds no connection."""

    def __init__(
        self, bus: str, wanted: TopicSelection, *, strict: bool, archive: str | None = None
    ) -> None:
        self._bus = bus
        self._archive = archive
        self._wanted = wanted
        self._strict = strict  # failOnDataLoss
        self._target: Offsets | None = None
        self.last_ends: Offsets | None = None  # the ends that `find_available` saw last

    @property
    def access(self) -> LogAccess:
        return open_log_access(self._bus, self._archive)

    def initial_offsets(self, bound: ReadBound) -> Offsets:
        """Return the offsets at which a new query begins."""
        found: Offsets = {}
        topics = self._wanted.shards(self.access)
        bound.check(topics)
        for topic, shards in topics.items():
            start = bound.resolve_offsets(self.access, topic, shards)
            found[topic] = {
                shard: clamp_offset(topic, shard, start[shard], in_log, strict=self._strict)
                for shard, in_log in shards.items()
            }
        return found

    def fix_end(self) -> None:
        """Fix the end of a run with trigger AvailableNow: later messages belong to the next run.

        Skips a topic that does not exist; `find_available` raises if that is an error.
        """
        self._target = {}
        for topic in self._wanted.find_topics(self.access):
            with suppress(DoesNotExist):
                self._target[topic] = _ends(self.access.shards(topic))

    def find_available(self, position: QueryPosition) -> tuple[Offsets, Offsets]:
        """Return the start and the end of each shard that can be read.

        A new shard or topic is read from its first offset.
        """
        self.check(position)
        topics = self._topics(position)
        starts: Offsets = {}
        ends: Offsets = {}
        for topic in sorted({*topics, *position.offsets}):
            known, in_log = position.offsets.get(topic, {}), topics.get(topic, {})
            # A topic created after fix_end belongs to the next AvailableNow run.
            if not known and self._target is not None and topic not in self._target:
                continue
            # The position takes precedence; only new shards start at the log's first offset.
            starts[topic] = {**{n: one.start for n, one in in_log.items()}, **known}
            ends[topic] = {
                n: max(start, self._end(topic, n, start, in_log))
                for n, start in starts[topic].items()
            }
        return starts, ends

    def check(self, position: QueryPosition) -> None:
        """Raise `UsageError` if a position belongs to a query over other topics."""
        foreign = [topic for topic in position.offsets if not self._wanted.covers(topic)]
        if foreign and self._strict:
            raise UsageError(
                f"this checkpoint belongs to a query over topic {foreign[0]!r}, but option topic "
                f"is {self._wanted.text!r}: use another checkpointLocation"
            )

    def shards(self, topic: str) -> dict[int, ShardOffsets]:
        """Return the shards of a topic that the query has read before."""
        return self._shards(topic, known=True)

    def drop_lost(self, ranges: list[OffsetRange]) -> list[OffsetRange]:
        """Return the parts of the ranges that can be read.

        Raises before any task starts if messages are lost and `failOnDataLoss` is set.
        """
        in_log = {topic: self.shards(topic) for topic in {one.topic for one in ranges}}
        found = []
        for one in ranges:
            shard = in_log[one.topic].get(one.shard)
            if shard is not None:
                start = clamp_offset(one.topic, one.shard, one.start, shard, strict=self._strict)
                clamp_offset(one.topic, one.shard, one.end, shard, strict=self._strict)
                found.append(one._replace(start=min(start, one.end)))
        return [one for one in found if one.rows]

    def admit(
        self,
        starts: Offsets,
        ends: Offsets,
        max_rows: int | None,
        max_bytes: int | None,
    ) -> list[OffsetRange]:
        """Return the ranges of the next batch, limited by rows and bytes."""
        ranges = ranges_between(starts, ends)
        if max_bytes is not None:
            ranges = limit_bytes(ranges, max_bytes, self._weigh)
        return ranges if max_rows is None else limit_rows(ranges, max_rows)

    def _topics(self, position: QueryPosition) -> Shards:
        names = {*self._wanted.find_topics(self.access), *position.offsets}
        wanted = sorted(name for name in names if self._wanted.covers(name))
        found: Shards = {}
        for name in wanted:
            shards = self._shards(name, known=name in position.offsets)
            if shards or name in position.offsets:
                found[name] = shards
        self.last_ends = {topic: _ends(shards) for topic, shards in found.items()}
        return found

    def _shards(self, topic: str, *, known: bool) -> dict[int, ShardOffsets]:
        """Return the shards of a topic. A dropped topic has none; raises if that is data loss."""
        try:
            return self.access.shards(topic)
        except DoesNotExist:
            if self._strict if known else topic in self._wanted.names:
                raise _dropped_error(topic, known=known) from None
            return {}

    def _end(self, topic: str, shard: int, start: int, in_log: dict[int, ShardOffsets]) -> int:
        if shard not in in_log:
            return start
        # A log that ends before the position is another log. drop_lost checks trimmed offsets.
        end = clamp_offset(
            topic, shard, start, in_log[shard]._replace(start=0), strict=self._strict
        )
        end = max(end, in_log[shard].end)
        return end if self._target is None else min(end, self._target.get(topic, {}).get(shard, 0))

    def _weigh(self, wanted: OffsetRange, offset: int) -> float:
        """Return the mean size of a message at an offset, in bytes, from a small sample."""
        end = min(wanted.end, offset + SAMPLE_ROWS)
        try:
            sample = list(self.access.read(wanted.topic, wanted.shard, offset, end))
        except DoesNotExist:  # the topic was dropped: nothing to read
            return 0.0
        rows = sum(int(batch.num_rows) for batch in sample)
        return sum(int(batch.nbytes) for batch in sample) / max(1, rows)


def _ends(shards: dict[int, ShardOffsets]) -> dict[int, int]:
    return {number: shard.end for number, shard in shards.items()}


def _dropped_error(topic: str, *, known: bool) -> PolybusError:
    if not known:
        return DoesNotExist(f"there is no durable topic {topic!r}: correct option topic")
    return TopicDeleted(
        f"topic {topic!r} was dropped while this query read it: create it again, or use another "
        "checkpointLocation, or set failOnDataLoss=false"
    )
