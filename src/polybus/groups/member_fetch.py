"""The fetch of a member: rows of its shards, and changes of its assignment.

A fetch responds as soon as there is a row that the member has not got, a new shard, a shard to
release, or a lost one. The rows may include a few acked ones; long acked ranges are skipped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import ne
from typing import Any, Final, NamedTuple

from polybus.errors import Trimmed
from polybus.groups import message_expiry, shard_progress
from polybus.groups.group_records import ShardProgress
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.model import offset_ranges
from polybus.model.rows import EMPTY, Rows
from polybus.store.contract import ShardRange

MIN_SKIP_ROWS: Final = 256  # a shorter acked range is not worth another read
# Per shard and fetch: starting a read costs as much as some hundred rows.
MIN_SHARE_ROWS: Final = 1024
# Reads of a poll that found only expired rows; the member fetches again after these.
MAX_EXPIRED_READS: Final = 16


class HeldPosition(NamedTuple):
    """The member's view of a shard; `next` is the first offset that it has not got."""

    epoch: int
    next: int
    paused: bool = False  # wants no rows now
    releasing: bool = False  # knows that it must release the shard


@dataclass(slots=True)
class FetchResult:
    """A response. `rows` are grouped by `places`: shard, epoch, from, to."""

    assigned: list[dict[str, Any]]
    release: list[int]
    lost: list[int]
    places: list[dict[str, int]]
    rows: Rows
    # The assignment has changed for the member, the topic was resharded, or the member must fetch
    # again because there are more expired messages.
    is_change: bool
    sealed: list[int] = field(default_factory=list)  # its shards that the group drains

    def __bool__(self) -> bool:
        return self.is_change or bool(self.places)


EMPTY_FETCH: Final = FetchResult([], [], [], [], EMPTY, False)


class MemberFetch:
    """One fetch of one member.

    `exact` asks the store for the ends of shards, for a member that does not wait for
    notifications.
    """

    def __init__(
        self,
        context: GroupContext,
        group: Group,
        member: tuple[str, int],
        held: Mapping[int, HeldPosition],
        bounds: tuple[int, int],
        exact: bool,
    ) -> None:
        self._context = context
        self._group = group
        self._consumer, self._epoch = member
        self._held = dict(held)
        self._max_rows, self._max_bytes = bounds
        self._ends = context.ends.refresh_ends if exact else context.ends.get_ends
        # The member's shards, and the state of the group when it had no changes to report.
        self._mine: dict[int, GroupShard] = {}
        self._settled: tuple[list[ShardProgress], dict[int, str]] | None = None
        self._generations = len(group.topic.generations)
        self._has_more_expired = False

    def poll(self) -> FetchResult:
        """Return the current result. Raises `Fenced` or `Expired` if it is no longer a member."""
        group, held = self._group, self._held
        group.member(self._consumer, self._epoch)
        ends = self._ends(group.topic.number)
        known = [shard.progress for shard in group.live], group.target
        if known == self._settled:
            # The usual wake-up: nothing has changed but the ends of some shards.
            moved = [shard for n, shard in self._mine.items() if held[n].next < ends[n]]
            if not moved:
                return EMPTY_FETCH
            rows, places = self._read(moved, ends)
            return FetchResult([], [], [], places, rows, self._has_more_expired)
        owned = {shard.number: shard for shard in group.owned_shards(self._consumer, self._epoch)}
        current = {
            n for n, shard in owned.items() if n in held and held[n].epoch == shard.progress.epoch
        }
        new = [shard for n, shard in owned.items() if n not in current]
        lost = [n for n in held if n not in current]
        release = [n for n, shard in owned.items() if not group.can_keep(shard, self._consumer)]
        rows, places = self._read([owned[n] for n in owned if n not in release], ends)
        # A release that the member knows of must not end its wait for rows.
        unknown = [n for n in release if n not in held or not held[n].releasing]
        assigned = [_describe_shard(group, shard, ends) for shard in new]
        # Changes are reported until the member has applied them, so only then it is settled.
        self._mine, self._settled = owned, None if new or lost or release else known
        # The next fetch begins with the new generation, so this is reported once.
        is_resharded = len(group.topic.generations) != self._generations
        is_change = bool(new or lost or unknown) or is_resharded or self._has_more_expired
        sealed = [n for n in owned if n in group.seals and n not in release]
        return FetchResult(assigned, release, lost, places, rows, is_change, sealed)

    def advance(self, result: FetchResult) -> bool:
        """Advance past rows that the member has got. Returns whether it has room for more."""
        for place in result.places:
            shard = place["shard"]
            self._held[shard] = self._held[shard]._replace(next=place["to"])
        self._max_rows -= result.rows.count
        self._max_bytes -= result.rows.size_bytes
        return self._max_rows > 0 and self._max_bytes > 0

    def _read(
        self, shards: list[GroupShard], ends: Sequence[int]
    ) -> tuple[Rows, list[dict[str, int]]]:
        """Read rows. If a shard is trimmed meanwhile, try once more from its new start.

        Returns none while the group, or consuming the topic, is paused.
        """
        topic, durable = self._group.topic.number, self._context.durable
        if self._group.roster.is_paused or durable.is_consume_paused(topic):
            return EMPTY, []
        store = durable.store
        has_caught_up, reads_left = False, MAX_EXPIRED_READS
        while parts := self._plan_reads(shards, ends):
            try:
                rows = store.read_parts(
                    topic, parts, max_rows=self._max_rows, max_bytes=self._max_bytes
                )
            except Trimmed:
                if has_caught_up:
                    break
                has_caught_up = True
                wanted = {part.shard for part in parts}
                self._catch_up([shard for shard in shards if shard.number in wanted])
                continue
            expired = message_expiry.find_expired(rows, self._context.wall_ns())
            if not expired:
                return rows, self._record_handed(parts, rows)
            rows, has_acked = self._drop_expired(rows, expired)
            if rows.count or not has_acked:
                return rows, self._record_handed(parts, rows) if rows.count else []
            reads_left -= 1
            self._has_more_expired = not reads_left
            if self._has_more_expired:
                break
        return EMPTY, []

    def _drop_expired(self, rows: Rows, indexes: Sequence[int]) -> tuple[Rows, bool]:
        """Ack expired rows. Returns the rows to hand out, and whether any row was acked."""
        numbers = memoryview(rows.shards).cast("B").cast("i")
        offsets = memoryview(rows.offsets).cast("B").cast("q")
        expired: dict[GroupShard, list[int]] = {}
        for at in indexes:
            expired.setdefault(self._group.shards[numbers[at]], []).append(offsets[at])
        with GroupUpdate(self._context, self._group, expired) as update:
            message_expiry.ack_expired(self._context, update, expired)
            if update.changed:
                update.commit()
        if self._group.has_reached_seal(shard.number for shard in expired):
            self._group.needs_rebalance = True  # by the next tick
        return message_expiry.keep_rows(rows, expired, indexes), bool(update.changed)

    def _plan_reads(self, shards: list[GroupShard], ends: Sequence[int]) -> list[ShardRange]:
        """Return the ranges to read: an equal share per shard, at least `MIN_SHARE_ROWS`.

        Rows that one shard does not use go to the others. Shards that get none come first in
        the next fetch.
        """
        ready: list[tuple[GroupShard, int]] = []  # with the next offset to read
        for shard in shards:
            progress, held = shard.progress, self._held.get(shard.number)
            at = progress.low
            if held is not None and held.epoch == progress.epoch:
                if held.paused:
                    continue
                at = max(held.next, progress.low)  # the bus acks expired messages itself
                if shard.handed_to is None:  # handed out before the bus started
                    shard.handed_to = at
            acked = offset_ranges.find_range(progress.ranges, at) if progress.ranges else None
            if acked:
                at = acked[1]
            if at < ends[shard.number]:
                ready.append((shard, at))
        if len(ready) > 1:
            ready.sort(key=lambda pair: pair[0].read_turn)
        rows_left, parts = self._max_rows, []
        for left, (shard, at) in zip(range(len(ready), 0, -1), ready, strict=True):
            if rows_left <= 0 or self._max_bytes <= 0:
                break
            end = ends[shard.number]
            long = (a for a, b in shard.progress.ranges if a > at and b - a >= MIN_SKIP_ROWS)
            end = min(end, next(long, end))  # the read stops before a long acked range
            share = min(rows_left, max(-(-rows_left // left), MIN_SHARE_ROWS), end - at)
            rows_left -= share
            parts.append(ShardRange(shard.number, at, end, share))
        return parts

    def _record_handed(self, parts: Sequence[ShardRange], rows: Rows) -> list[dict[str, int]]:
        """Record that the member gets these rows. Returns their `places`.

        The shards that were read move to the end of the order. Shards after the last one with
        rows were not reached and keep their place.
        """
        shards = memoryview(rows.shards).cast("B").cast("i")
        offsets = memoryview(rows.offsets).cast("B").cast("q")
        times = memoryview(rows.timestamps_ns).cast("B").cast("q")
        places: list[dict[str, int]] = []
        begin, group = 0, self._group
        for number, *_ in parts:  # rows are grouped by shard, in the order of the parts
            shard = group.shards[number]
            group.turn += 1
            shard.read_turn = group.turn
            if begin == rows.count or shards[begin] != number:
                continue
            is_other = partial(ne, number)
            end = bisect_left(shards, True, begin + 1, rows.count, key=is_other)
            first, last = offsets[begin], offsets[end - 1]
            if shard.handed_to is not None:
                shard.handed_to = max(shard.handed_to, last + 1)
            shard.commit_times.add_samples(offsets[begin:end], times[begin:end])
            epoch = shard.progress.epoch
            places.append({"shard": number, "epoch": epoch, "from": first, "to": last + 1})
            begin = end
            if begin == rows.count:
                break
        return places

    def _catch_up(self, shards: list[GroupShard]) -> None:
        """Move the low-water mark and the member to the first message that is not trimmed."""
        bounds = self._context.durable.store.bounds(self._group.topic.number).shards
        with GroupUpdate(self._context, self._group, shards) as update:
            for shard in shards:
                start = bounds[shard.number].start
                held = self._held.get(shard.number)
                if held is not None and held.next < start:
                    self._held[shard.number] = held._replace(next=start)
                trimmed = shard_progress.skip_trimmed(shard.progress, start)
                if trimmed is not shard.progress:
                    update.changed[shard] = trimmed
            if update.changed:
                update.commit()
        if self._group.has_reached_seal(shard.number for shard in shards):
            self._group.needs_rebalance = True  # by the next tick


def _describe_shard(group: Group, shard: GroupShard, ends: Sequence[int]) -> dict[str, Any]:
    progress = shard.progress
    return {
        "shard": shard.number,
        "index": group.topic.index_of(shard.number),
        "epoch": progress.epoch,
        "low": progress.low,
        "ranges": [list(acked) for acked in progress.ranges],
        "attempts": {str(offset): n for offset, n in progress.attempts.items()},
        "suspect_to": progress.suspect_to,
        "end": ends[shard.number],
    }
