"""What a member gets to read: rows of its shards, and what has changed about them.

A fetch answers as soon as there is something to say: rows behind where the member is,
a shard that it does not know of, one that it is to release or has lost. Rows that
are acked already may be among them, at most a few: long acked runs are passed over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from polybus.errors import Trimmed
from polybus.groups import shard_progress
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.model import offset_ranges
from polybus.model.rows import EMPTY, Rows
from polybus.store.contract import ShardRange

if TYPE_CHECKING:
    from polybus.groups.group_records import ShardProgress

MIN_SKIP_ROWS: Final = 256  # rows acked in a run, from which on it is worth another read
# A portion of a shard: to read it costs as much as some hundred rows in it.
MIN_SHARE_ROWS: Final = 1024
INT32_BYTES: Final = 4


class HeldPosition(NamedTuple):
    """A shard as the member knows it, and the first offset that it has not got yet."""

    epoch: int
    next: int
    paused: bool = False  # no rows of it now
    releasing: bool = False  # it knows that it is to release it


@dataclass(slots=True)
class FetchResult:
    """`rows` are those of the `places`, one after the other: shard, epoch, from and to each."""

    assigned: list[dict[str, Any]]
    release: list[int]
    lost: list[int]
    places: list[dict[str, int]]
    rows: Rows
    is_change: bool  # something about its shards is new to the member

    def __bool__(self) -> bool:
        return self.is_change or bool(self.places)


EMPTY_FETCH: Final = FetchResult([], [], [], [], EMPTY, False)


class MemberFetch:
    """One fetch of one member. Each `look` is from the start.

    `exact`: it must see what was committed just now, since it will not wait for the news.
    """

    def __init__(
        self,
        means: GroupContext,
        group: Group,
        member: tuple[str, int],
        held: Mapping[int, HeldPosition],
        bounds: tuple[int, int],
        exact: bool,
    ) -> None:
        self._means = means
        self._group = group
        self._consumer, self._epoch = member
        self._held = dict(held)
        self._max_rows, self._max_bytes = bounds
        self._ends = means.ends.refresh_ends if exact else means.ends.get_ends
        # Its shards, and what was known of all when there was nothing to tell about them.
        self._mine: dict[int, GroupShard] = {}
        self._settled: tuple[list[ShardProgress], dict[int, str]] | None = None

    def poll(self) -> FetchResult:
        """What there is now. `Fenced` or `Expired` if it is a member no more."""
        group = self._group
        group.member(self._consumer, self._epoch)
        ends = self._ends(group.topic.number)
        known = [shard.progress for shard in group.shards], group.target
        if known != self._settled:
            return self._poll_assignment(known, ends)
        held = self._held
        moved = [one for n, one in self._mine.items() if held[n].next < ends[n]]
        if not moved:
            return EMPTY_FETCH
        rows = self._read(moved, ends)
        places = self._record_handed_rows(self._mine, rows) if rows.count else []
        return FetchResult([], [], [], places, rows, False)

    def _poll_assignment(
        self, known: tuple[list[ShardProgress], dict[int, str]], ends: Sequence[int]
    ) -> FetchResult:
        """At what has changed about its shards, too."""
        group, held = self._group, self._held
        owned = {one.number: one for one in group.owned_shards(self._consumer, self._epoch)}
        new = [one for one in owned.values() if not self._is_known(one)]
        lost = [n for n in held if n not in owned or not self._is_known(owned[n])]
        release = [n for n, one in owned.items() if not group.can_keep(one, self._consumer)]
        rows = self._read([one for n, one in owned.items() if n not in release], ends)
        places = self._record_handed_rows(owned, rows) if rows.count else []
        untold = [n for n in release if n not in held or not held[n].releasing]
        assigned = [_describe_shard(one, ends) for one in new]
        self._mine, self._settled = owned, None if new or lost or release else known
        return FetchResult(assigned, release, lost, places, rows, bool(new or lost or untold))

    def advance(self, found: FetchResult) -> bool:
        """The member has got these rows, which changed nothing else; whether it wants more."""
        for place in found.places:
            shard = place["shard"]
            self._held[shard] = self._held[shard]._replace(next=place["to"])
        self._max_rows -= found.rows.count
        self._max_bytes -= found.rows.size_bytes
        return self._max_rows > 0 and self._max_bytes > 0

    def _is_known(self, shard: GroupShard) -> bool:
        held = self._held.get(shard.number)
        return held is not None and held.epoch == shard.progress.epoch

    def _read(self, shards: list[GroupShard], ends: Sequence[int]) -> Rows:
        """Trimmed meanwhile, it is read from where it begins now; once more, and the next
        fetch finds it."""
        for _ in range(2):
            parts = self._plan_reads(shards, ends)
            if not parts:
                break
            bounds = {"max_rows": self._max_rows, "max_bytes": self._max_bytes}
            try:
                number, store = self._group.topic.number, self._means.durable.store
                rows = store.read_parts(number, parts, **bounds)
                self._rotate_shards(parts, rows)
                return rows
            except Trimmed:
                wanted = {part.shard for part in parts}
                self._catch_up([shard for shard in shards if shard.number in wanted])
        return EMPTY

    def _plan_reads(self, shards: list[GroupShard], ends: Sequence[int]) -> list[ShardRange]:
        """Each has an equal share of the rows, but none less than is worth a read.

        What one leaves is for the others; who gets nothing is first the next time.
        """
        places = [(shard, self._read_offset(shard, ends[shard.number])) for shard in shards]
        ready = [(shard, at) for shard, at in places if at < ends[shard.number]]
        if len(ready) > 1:
            ready.sort(key=lambda one: one[0].read_turn)
        rows_left, found = self._max_rows, []
        for left, (shard, at) in zip(range(len(ready), 0, -1), ready, strict=True):
            if rows_left <= 0 or self._max_bytes <= 0:
                break
            end = ends[shard.number]
            if shard.progress.ranges:
                end = min(end, _next_run(shard.progress, at, end))
            share = min(rows_left, max(-(-rows_left // left), MIN_SHARE_ROWS), end - at)
            rows_left -= share
            found.append(ShardRange(shard.number, at, end, share))
        return found

    def _rotate_shards(self, parts: Sequence[ShardRange], rows: Rows) -> None:
        """Those behind the last that has rows had no chance: their turn is still to come."""
        last = int.from_bytes(rows.shards[-INT32_BYTES:], "little") if rows.count else -1
        for part in parts:
            self._group.turn += 1
            self._group.shards[part.shard].read_turn = self._group.turn
            if part.shard == last:
                break

    def _read_offset(self, shard: GroupShard, end: int) -> int:
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
        acked = offset_ranges.find_range(progress.ranges, at) if progress.ranges else None
        return acked[1] if acked else at

    def _catch_up(self, shards: list[GroupShard]) -> None:
        """The low mark is never before the first message that is there, and who reads neither."""
        bounds = self._means.durable.store.bounds(self._group.topic.number).shards
        with GroupUpdate(self._means, self._group, shards) as work:
            for shard in work.shards:
                start = bounds[shard.number].start
                held = self._held.get(shard.number)
                if held is not None and held.next < start:
                    self._held[shard.number] = held._replace(next=start)
                trimmed = shard_progress.skip_trimmed(shard.progress, start)
                if trimmed is not shard.progress:
                    work.set_progress(shard, trimmed)
            if not work.is_empty:
                work.commit()

    def _record_handed_rows(
        self, owned: Mapping[int, GroupShard], rows: Rows
    ) -> list[dict[str, int]]:
        offsets = memoryview(rows.offsets).cast("B").cast("q")
        times = memoryview(rows.timestamps_ns).cast("B").cast("q")
        return [
            self._record_handed(owned[shard], offsets[at], times[at])
            for shard, at in _by_shard(rows)
        ]

    def _record_handed(
        self, shard: GroupShard, offsets: memoryview[int], times: memoryview[int]
    ) -> dict[str, int]:
        first, end = offsets[0], offsets[-1] + 1
        if shard.handed_to is not None:
            shard.handed_to = max(shard.handed_to, end)
        shard.commit_times.add_samples(offsets, times)
        return {"shard": shard.number, "epoch": shard.progress.epoch, "from": first, "to": end}


def _by_shard(rows: Rows) -> Iterator[tuple[int, slice]]:
    """Where the rows of each shard stand; they come one shard after the other."""
    shards, start = memoryview(rows.shards).cast("B").cast("i"), 0
    while start < rows.count:
        shard = shards[start]
        behind = range(start + 1, rows.count)
        end = start + 1 + bisect_left(behind, True, key=lambda at: shards[at] != shard)
        yield shard, slice(start, end)
        start = end


def _next_run(progress: ShardProgress, start: int, end: int) -> int:
    """Where the next long run of acked rows begins; the end if there is none."""
    behind = (a for a, b in progress.ranges if a > start and b - a >= MIN_SKIP_ROWS)
    return next(behind, end)


def _describe_shard(shard: GroupShard, ends: Sequence[int]) -> dict[str, Any]:
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
