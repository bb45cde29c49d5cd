"""What a member gets to read: rows of its shards, and what has changed about them.

A fetch answers as soon as there is something to say: rows behind where the member is,
a shard that it does not know of, one that it is to release or has lost. Rows that
are acked already may be among them, at most a few: long acked runs are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polybus.bus.groups import judging, ranges
from polybus.bus.groups.state import Group, Means, Shard, Work
from polybus.errors import Trimmed
from polybus.model.rows import EMPTY, Rows

if TYPE_CHECKING:
    from polybus.bus.groups.records import Progress

PASSED_OVER: Final = 256  # rows acked in a run, from which on it is worth another read
# A portion of a shard: to read it costs as much as some hundred rows in it.
WORTH_ROWS: Final = 1024
WORTH_BYTES: Final = 128 << 10
INT64_BYTES: Final = 8

Portion = tuple[dict[str, int], Rows]  # shard, epoch, from and to, and what is there


class Held(NamedTuple):
    """A shard as the member knows it, and the first offset that it has not got yet."""

    epoch: int
    next: int
    paused: bool = False  # no rows of it now
    releasing: bool = False  # it knows that it is to release it


@dataclass(slots=True)
class Fetched:
    """`rows` of each shard: its number, epoch, and the columns."""

    assigned: list[dict[str, Any]]
    release: list[int]
    lost: list[int]
    rows: list[Portion]
    is_news: bool

    def __bool__(self) -> bool:
        return self.is_news


class Fetching:
    """One fetch of one member. Each `look` is from the start.

    `exact`: it must see what was committed just now, since it will not wait for the news.
    """

    def __init__(
        self,
        means: Means,
        group: Group,
        member: tuple[str, int],
        held: Mapping[int, Held],
        bounds: tuple[int, int],
        exact: bool,
    ) -> None:
        self._means = means
        self._group = group
        self._consumer, self._epoch = member
        self._held = held
        self._max_rows, self._max_bytes = bounds
        self._ends = means.ends.look if exact else means.ends.of

    def look(self) -> Fetched:
        """What there is now. `Fenced` or `Expired` if it is a member no more."""
        group, held = self._group, self._held
        group.member(self._consumer, self._epoch)
        ends = self._ends(group.topic.number)
        owned = {one.number: one for one in group.owned(self._consumer, self._epoch)}
        new = [one for one in owned.values() if not self._knows(one)]
        lost = [n for n in held if n not in owned or not self._knows(owned[n])]
        release = [n for n, one in owned.items() if not group.is_for(one, self._consumer)]
        rows = self._read([one for n, one in owned.items() if n not in release], ends)
        untold = [n for n in release if n not in held or not held[n].releasing]
        assigned = [_told(one, ends) for one in new]
        return Fetched(assigned, release, lost, rows, bool(new or lost or rows or untold))

    def _knows(self, shard: Shard) -> bool:
        held = self._held.get(shard.number)
        return held is not None and held.epoch == shard.progress.epoch

    def _read(self, shards: list[Shard], ends: Sequence[int]) -> list[Portion]:
        """Each has an equal share of the bounds, but none less than is worth a read.

        What one leaves is for the others; who gets nothing is first the next time.
        """
        places = [(shard, self._at(shard, ends[shard.number])) for shard in shards]
        ready = [(shard, at) for shard, at in places if at < ends[shard.number]]
        ready.sort(key=lambda one: one[0].turn)
        rows_left, bytes_left = self._max_rows, self._max_bytes
        found = []
        for left, (shard, at) in zip(range(len(ready), 0, -1), ready, strict=True):
            if rows_left <= 0 or bytes_left <= 0:
                break
            max_rows = min(rows_left, max(-(-rows_left // left), WORTH_ROWS))
            max_bytes = min(bytes_left, max(-(-bytes_left // left), WORTH_BYTES))
            rows = self._rows(shard, at, max_rows, max_bytes)
            self._group.turn += 1
            shard.turn = self._group.turn
            if rows.count:
                rows_left -= rows.count
                bytes_left -= rows.size_bytes
                found.append((self._noted(shard, rows), rows))
        return found

    def _at(self, shard: Shard, end: int) -> int:
        """Where to read on, or the shard's end if nothing is wanted of it."""
        progress, held = shard.progress, self._held.get(shard.number)
        if held is None or held.epoch != progress.epoch:
            at = progress.low
        elif held.paused:
            return end
        else:
            at = held.next
            if shard.handed_to is None:  # from before the bus started
                shard.handed_to = at
        acked = ranges.range_of(progress.ranges, at) if progress.ranges else None
        return acked[1] if acked else at

    def _rows(self, shard: Shard, start: int, max_rows: int, max_bytes: int) -> Rows:
        try:
            return self._read_rows(shard, start, max_rows, max_bytes)
        except Trimmed as trimmed:
            self._catch_up(shard, trimmed.start)
            try:
                return self._read_rows(shard, trimmed.start, max_rows, max_bytes)
            except Trimmed:  # once more, meanwhile: the next fetch finds it
                return EMPTY

    def _read_rows(self, shard: Shard, start: int, max_rows: int, max_bytes: int) -> Rows:
        end = _next_run(shard.progress, start) if shard.progress.ranges else None
        number, read = self._group.topic.number, self._means.durable.store.read
        return read(number, shard.number, start, end, max_rows=max_rows, max_bytes=max_bytes)

    def _catch_up(self, shard: Shard, start: int) -> None:
        """The low mark is never before the first message that is there."""
        with Work(self._means, self._group, [shard]) as work:
            work.set(shard, judging.trim(shard.progress, start))
            work.commit()

    def _noted(self, shard: Shard, rows: Rows) -> dict[str, int]:
        first = int.from_bytes(rows.offsets[:INT64_BYTES], "little")
        end = int.from_bytes(rows.offsets[-INT64_BYTES:], "little") + 1
        if shard.handed_to is not None:
            shard.handed_to = max(shard.handed_to, end)
        shard.sightings.note(rows)
        return {"shard": shard.number, "epoch": shard.progress.epoch, "from": first, "to": end}


def _next_run(progress: Progress, start: int) -> int | None:
    """Where the next long run of acked rows begins."""
    behind = (a for a, b in progress.ranges if a > start and b - a >= PASSED_OVER)
    return next(behind, None)


def _told(shard: Shard, ends: Sequence[int]) -> dict[str, Any]:
    progress = shard.progress
    return {
        "shard": shard.number,
        "epoch": progress.epoch,
        "low": progress.low,
        "ranges": [list(one) for one in progress.ranges],
        "attempts": {str(offset): n for offset, n in progress.attempts.items()},
        "suspect_to": progress.suspect_to,
        "end": ends[shard.number],
    }
