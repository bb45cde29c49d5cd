"""Acks and failed runs: what becomes of a shard's record by them, and nothing else.

An entry is judged as a whole: taken, or refused with an error of its own. The work is
by range, not by message. To ack what is acked already, or to report a failed run
again, changes nothing, so a call whose answer was lost can be made again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.errors import Fenced, LimitReached, MalformedRequest
from polybus.groups.dead_letter_queue import ExhaustedMessage
from polybus.model import offset_ranges

if TYPE_CHECKING:
    from polybus.groups.group_records import ShardProgress
    from polybus.groups.group_state import GroupShard
    from polybus.model.offset_ranges import Range

# Ranges above a low mark: one stuck message holds up its shard only after so many others;
# a record is rewritten with each ack, and stays below 32 KiB by this.
MAX_RANGES: Final = 1024
# Messages of a shard that have failed and wait to be tried again; some 20 bytes each.
MAX_ATTEMPTS: Final = 4096
# What a bus that has just started takes a member to have been handed, beyond what it has acked:
# twice as much as our own consumer fetches ahead. A backlog of millions is not all suspect.
MAX_SUSPECT_ROWS: Final = 32_768
DIED: Final = "the consumer died while it was running"


class FailureReport(NamedTuple):
    """A failed run. `attempt`: how many its consumer knew of before; None: it does not say."""

    offset: int
    reason: str = ""
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a member says of one shard. None: it does not say."""

    shard: int
    epoch: int
    acked: tuple[Range, ...] = ()
    failed: tuple[FailureReport, ...] = ()
    running: tuple[int, ...] | None = None
    emitted: int = 0
    redelivered: int = 0
    release: bool = False

    @property
    def last(self) -> int:
        """The end of what it speaks of."""
        ends = [to for _, to in self.acked] + [one.offset + 1 for one in self.failed]
        return max(ends, default=0)


@dataclass(slots=True)
class ReportOutcome:
    """`failures` have come to their end, if they can be given up."""

    progress: ShardProgress
    attempts: dict[int, int] = field(default_factory=dict)
    failures: list[ExhaustedMessage] = field(default_factory=list)


def check_owner(progress: ShardProgress, shard: int, consumer: str, epoch: int) -> None:
    if progress.owner != consumer or progress.epoch != epoch:
        raise Fenced(f"shard {shard} is no longer {consumer}'s by epoch {epoch}")


def apply_report(
    progress: ShardProgress, entry: ShardReport, end: int, max_deliver: int
) -> ReportOutcome:
    """`end` is the shard's: nobody can have seen more."""
    if entry.last > end:
        raise MalformedRequest(f"shard {entry.shard} ends at {end}, not at {entry.last}")
    acked = ack_ranges(progress, entry.acked) if entry.acked else progress
    return (
        record_failures(acked, entry.shard, entry.failed, max_deliver)
        if entry.failed
        else ReportOutcome(acked)
    )


def ack_ranges(
    progress: ShardProgress, acked: Iterable[Range], most: int = MAX_RANGES
) -> ShardProgress:
    low, above = offset_ranges.add_ranges(progress.low, progress.ranges, acked)
    if len(above) > max(most, len(progress.ranges)):
        raise LimitReached("max_ranges", f"a shard has at most {most} ranges of acks")
    attempts = progress.attempts
    if attempts:
        attempts = {
            at: n for at, n in attempts.items() if not offset_ranges.contains(low, above, at)
        }
    suspect_to = progress.suspect_to if progress.suspect_to > low else 0
    return progress._replace(low=low, ranges=above, attempts=attempts, suspect_to=suspect_to)


def record_failures(
    progress: ShardProgress, shard: int, failed: Iterable[FailureReport], max_deliver: int
) -> ReportOutcome:
    """Runs that have failed, but for those of messages that are acked."""
    judged, attempts = ReportOutcome(progress), dict(progress.attempts)
    for one in failed:
        if offset_ranges.contains(progress.low, progress.ranges, one.offset):
            continue
        known = attempts.get(one.offset, 0)
        if known == 0 and len(attempts) >= MAX_ATTEMPTS:
            text = f"{MAX_ATTEMPTS} messages of shard {shard} wait to be tried again already"
            raise LimitReached("max_attempts", text)
        told_before = one.attempt is not None and one.attempt < known
        count = known if told_before else known + 1
        attempts[one.offset] = judged.attempts[one.offset] = count
        if count >= max_deliver:
            judged.failures.append(ExhaustedMessage(shard, one.offset, count, one.reason))
    if judged.attempts:
        judged.progress = progress._replace(attempts=attempts)
    return judged


def release_dead_owner(shard: GroupShard, end: int, max_deliver: int) -> ReportOutcome:
    """The owner is dead: what it was running has failed, what it was handed is suspect."""
    progress = shard.progress
    handed_to = _estimate_handed_to(progress, end) if shard.handed_to is None else shard.handed_to
    suspect_to = max(progress.suspect_to, handed_to)
    left = release_owner(shard, progress, suspect_to if suspect_to > progress.low else 0)
    room = MAX_ATTEMPTS - len(progress.attempts)
    running = [FailureReport(offset, DIED) for offset in shard.running[:room] if offset < end]
    return record_failures(left, shard.number, running, max_deliver)


def _estimate_handed_to(progress: ShardProgress, end: int) -> int:
    """What was handed out before the bus started: nobody knows."""
    acked = progress.ranges[-1][1] if progress.ranges else progress.low
    return min(end, acked + MAX_SUSPECT_ROWS)


def release_owner(shard: GroupShard, progress: ShardProgress, suspect_to: int) -> ShardProgress:
    """Nobody's from now on; what its owner has counted stays."""
    emitted, redelivered = shard.counted
    return progress._replace(
        owner=None,
        member=0,
        suspect_to=suspect_to,
        emitted=progress.emitted + emitted,
        redelivered=progress.redelivered + redelivered,
        counted=(0, 0),
    )


def assign_owner(progress: ShardProgress, owner: str, member: int) -> ShardProgress:
    return progress._replace(owner=owner, member=member, epoch=progress.epoch + 1)


def mark_dead_lettered(progress: ShardProgress, offsets: Iterable[int]) -> ShardProgress:
    """Their letters are in the same commit: they count as acked."""
    dead = [(offset, offset + 1) for offset in offsets]
    if not dead:
        return progress
    given_up = ack_ranges(progress, dead, MAX_RANGES + MAX_ATTEMPTS)
    return given_up._replace(dead_lettered=progress.dead_lettered + len(dead))


def skip_trimmed(progress: ShardProgress, start: int) -> ShardProgress:
    """Messages before `start` are there no more: what was not acked of them is counted."""
    unread = offset_ranges.count_unacked(progress.low, progress.ranges, start)
    if start <= progress.low:
        return progress
    moved = ack_ranges(progress, [(0, start)])
    return moved._replace(
        start=progress.start + unread, trimmed_unread=progress.trimmed_unread + unread
    )
