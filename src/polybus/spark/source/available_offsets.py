"""What lies ahead of a streaming query: its topics as they are now, beyond its position."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from polybus.errors import DoesNotExist, PolybusError, TopicDeleted, UsageError
from polybus.spark.source.log_access import Access, Shard, opened
from polybus.spark.source.partitions import Range, admit, admit_bytes, ranges_between
from polybus.spark.source.read_bounds import Bound, Offsets, Wanted, settle

if TYPE_CHECKING:
    from polybus.spark.source.query_position import Position

Shards = dict[str, dict[int, Shard]]

# Messages that are weighed for maxBytesPerBatch, at each place.
SAMPLE_ROWS = 4


class Ahead:
    """Pickled with its reader: it keeps no connection."""

    def __init__(
        self, bus: str, wanted: Wanted, *, strict: bool, archive: str | None = None
    ) -> None:
        self._bus = bus
        self._archive = archive
        self._wanted = wanted
        self._strict = strict  # failOnDataLoss
        self._target: Offsets | None = None
        self.seen: Offsets | None = None  # where topics ended at the last look

    @property
    def access(self) -> Access:
        return opened(self._bus, self._archive)

    def first(self, bound: Bound) -> Offsets:
        """Where a new query begins."""
        found: Offsets = {}
        topics = self._wanted.shards(self.access)
        bound.check(topics)
        for topic, shards in topics.items():
            wished = bound.of(self.access, topic, shards)
            found[topic] = {
                shard: settle(topic, shard, wished[shard], there, strict=self._strict)
                for shard, there in shards.items()
            }
        return found

    def end_here(self) -> None:
        """What comes from now on is for another run of the query. Of a topic that is not there
        nothing is read; `look` says so, where that is an error."""
        self._target = {}
        for topic in self._wanted.find(self.access):
            with suppress(DoesNotExist):
                self._target[topic] = _ends(self.access.shards(topic))

    def look(self, position: Position) -> tuple[Offsets, Offsets]:
        """From where to where each shard of its topics can be read.

        A shard or topic that is new begins where it begins.
        """
        self.check(position)
        topics = self._topics(position)
        starts: Offsets = {}
        ends: Offsets = {}
        for topic in sorted({*topics, *position.offsets}):
            known, there = position.offsets.get(topic, {}), topics.get(topic, {})
            if not known and self._target is not None and topic not in self._target:
                continue
            starts[topic] = {**{n: one.start for n, one in there.items()}, **known}
            ends[topic] = {
                n: max(start, self._end(topic, n, start, there))
                for n, start in starts[topic].items()
            }
        return starts, ends

    def check(self, position: Position) -> None:
        """A checkpoint of another query is refused, before anything is read by it."""
        foreign = [topic for topic in position.offsets if not self._wanted.covers(topic)]
        if foreign and self._strict:
            raise UsageError(
                f"this checkpoint is of a query over topic {foreign[0]!r}, and option topic is "
                f"{self._wanted.text!r}: use another checkpointLocation"
            )

    def shards(self, topic: str) -> dict[int, Shard]:
        """Of a topic that the query has read before."""
        return self._shards(topic, known=True)

    def still_there(self, ranges: list[Range]) -> list[Range]:
        """What of it can be read: if something is lost, that is said before tasks start."""
        there = {topic: self.shards(topic) for topic in {one.topic for one in ranges}}
        found = []
        for one in ranges:
            shard = there[one.topic].get(one.shard)
            if shard is not None:
                start = settle(one.topic, one.shard, one.start, shard, strict=self._strict)
                settle(one.topic, one.shard, one.end, shard, strict=self._strict)
                found.append(one._replace(start=min(start, one.end)))
        return [one for one in found if one.rows]

    def admit(
        self,
        starts: Offsets,
        ends: Offsets,
        max_rows: int | None,
        max_bytes: int | None,
    ) -> list[Range]:
        """As much of what lies ahead as one batch may have."""
        ranges = ranges_between(starts, ends)
        if max_bytes is not None:
            ranges = admit_bytes(ranges, max_bytes, self._weigh)
        return ranges if max_rows is None else admit(ranges, max_rows)

    def _topics(self, position: Position) -> Shards:
        names = {*self._wanted.find(self.access), *position.offsets}
        wanted = sorted(name for name in names if self._wanted.covers(name))
        found: Shards = {}
        for name in wanted:
            shards = self._shards(name, known=name in position.offsets)
            if shards or name in position.offsets:
                found[name] = shards
        self.seen = {topic: _ends(shards) for topic, shards in found.items()}
        return found

    def _shards(self, topic: str, *, known: bool) -> dict[int, Shard]:
        """Of a topic that was dropped there are none, where that may be."""
        try:
            return self.access.shards(topic)
        except DoesNotExist:
            if self._strict if known else topic in self._wanted.names:
                raise _gone(topic, known=known) from None
            return {}

    def _end(self, topic: str, shard: int, start: int, there: dict[int, Shard]) -> int:
        if shard not in there:
            return start
        end = settle(topic, shard, start, there[shard]._replace(start=0), strict=self._strict)
        end = max(end, there[shard].end)
        return end if self._target is None else min(end, self._target.get(topic, {}).get(shard, 0))

    def _weigh(self, wanted: Range, offset: int) -> float:
        """Bytes of a message, on average of a few."""
        end = min(wanted.end, offset + SAMPLE_ROWS)
        try:
            sample = list(self.access.read(wanted.topic, wanted.shard, offset, end))
        except DoesNotExist:  # then there is nothing to weigh, nor to read
            return 0.0
        rows = sum(int(batch.num_rows) for batch in sample)
        return sum(int(batch.nbytes) for batch in sample) / max(1, rows)


def _ends(shards: dict[int, Shard]) -> dict[int, int]:
    return {number: shard.end for number, shard in shards.items()}


def _gone(topic: str, *, known: bool) -> PolybusError:
    if not known:
        return DoesNotExist(f"there is no durable topic {topic!r}: correct option topic")
    return TopicDeleted(
        f"topic {topic!r} was dropped while this query read it: create it again, or use another "
        "checkpointLocation, or set failOnDataLoss=false"
    )
