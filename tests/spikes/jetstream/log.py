"""Reading the log: pieces by sequence, blocks of stages where an extent stands for them.

The stream knows nothing of offsets, so a position is found by bisection over sequences:
each step fetches a whole message. A real engine keeps a sparse index beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from polybus.model.block import BlockSlice, open_layout
from polybus.model.run_table import make_table
from polybus.model.topic import ALL, All, Bounds
from tests.spikes.jetstream import subjects
from tests.spikes.jetstream.link import Link, Stored

Field = Literal["id", "offset", "timestamp_ns"]


@dataclass(frozen=True, slots=True)
class At:
    """Where a message of the log stands: `count` offsets and ids from these on."""

    offset: int
    id: int
    count: int
    timestamp_ns: int

    def of(self, field: Field) -> int:
        value: int = getattr(self, field)
        return value


def at_of(stored: Stored) -> At:
    return At(*map(int, stored.headers["Polybus-At"].split()))


def _shard_of(stored: Stored) -> int:
    return int(stored.subject.rpartition(".")[2])


def _cut(piece: BlockSlice, start: int, end: int) -> Iterator[BlockSlice]:
    """Yield the rows of the piece between these offsets, if there are any."""
    places = (max(start - piece.first_offset, 0), min(end - piece.first_offset, piece.layout.count))
    if places[0] < places[1]:
        yield piece._replace(start=places[0], end=places[1])


class Log:
    def __init__(self, link: Link) -> None:
        self._link = link

    def locate(self, subject: str, position: int, field: Field) -> int:
        """Return the sequence of the last piece that begins at the position or before."""
        low, high = 1, self._link.last_sequence()
        while low < high:
            middle = (low + high + 1) // 2
            found = self._link.following(subject, middle)
            if found is None or at_of(found).of(field) > position:
                high = middle - 1
            else:
                low = found.sequence
        return low

    def of_shard(
        self, topic: int, shard: int, start: int, end: int, max_rows: int
    ) -> list[BlockSlice]:
        """Return slices with the offsets from `start` to `end`."""
        found = self._pieces(subjects.log(topic, shard), start, end, "offset", max_rows)
        return [cut for piece in found for cut in _cut(piece, start, end)]

    def of_topic(
        self, topic: int, start: int, end: int, bounds: Bounds, max_rows: int
    ) -> list[BlockSlice]:
        """Return slices with the ids from `start` to `end`, ordered by shard."""
        found = self._pieces(subjects.log(topic, "*"), start, end, "id", max_rows)
        kept = [
            cut
            for piece in found
            for cut in _cut(piece, bounds.shards[piece.shard].start, bounds.shards[piece.shard].end)
        ]
        return sorted(kept, key=lambda piece: (piece.shard, piece.first_offset))

    def _pieces(
        self, subject: str, start: int, end: int, field: Field, max_rows: int
    ) -> Iterator[BlockSlice]:
        """Yield slices with these positions, until there are `max_rows` rows."""
        sequence, rows = self.locate(subject, start, field), 0
        while rows < max_rows and (found := self._link.following(subject, sequence)):
            sequence, at = found.sequence + 1, at_of(found)
            if at.of(field) >= end:
                return
            if at.of(field) + at.count > start:
                rows += min(at.of(field) + at.count, end) - max(at.of(field), start)
                yield from self._blocks(found, at)

    def since(self, topic: int, shard: int | All, timestamp_ns: int, bounds: Bounds) -> At | None:
        """Return the first message with this timestamp or a later one that was not trimmed."""
        subject = subjects.log(topic, "*" if shard == ALL else shard)
        sequence = self.locate(subject, timestamp_ns - 1, "timestamp_ns")
        while found := self._link.following(subject, sequence):
            sequence, at = found.sequence + 1, at_of(found)
            gone = max(bounds.shards[_shard_of(found)].start - at.offset, 0)
            if at.timestamp_ns >= timestamp_ns and gone < at.count:
                return At(at.offset + gone, at.id + gone, at.count - gone, at.timestamp_ns)
        return None

    def id_at(self, topic: int, shard: int, offset: int) -> int:
        subject = subjects.log(topic, shard)
        found = self._link.following(subject, self.locate(subject, offset, "offset"))
        assert found is not None
        return at_of(found).id + offset - at_of(found).offset

    def _blocks(self, found: Stored, at: At) -> Iterator[BlockSlice]:
        shard, offset, number = _shard_of(found), at.offset, at.id
        for data in self._data(found):
            layout = open_layout(data)
            runs = make_table(number, at.timestamp_ns, layout.count)
            yield BlockSlice(layout, runs, offset, shard, 0, layout.count)
            offset, number = offset + layout.count, number + layout.count

    def _data(self, found: Stored) -> Iterator[bytes]:
        """The block itself, then those that its extent refers to."""
        if found.body:
            yield found.body
        for stage in found.headers.get("Polybus-Stages", "").split():
            subject, sequence = subjects.staged(stage, *found.subject.split(".")[2:]), 1
            while block := self._link.following(subject, sequence):
                yield block.body
                sequence = block.sequence + 1
