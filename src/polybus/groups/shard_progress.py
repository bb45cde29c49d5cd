"""The effect of acks and failed runs on the record of a shard, without I/O.

A report is accepted as a whole or refused with an error. The work is per range, not per
message. Acking an acked message, or reporting a failed run again, changes nothing, so a call
whose response was lost can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from polybus.errors import Fenced, LimitReached, MalformedRequest
from polybus.groups.group_records import ShardProgress
from polybus.groups.group_state import GroupShard
from polybus.model import offset_ranges
from polybus.model.offset_ranges import Range

# Ranges above the low-water mark. One stuck message stops its shard only after this many gaps.
# The record is rewritten with each ack and stays below 32 KiB.
MAX_RANGES: Final = 1024
# Failed messages of a shard that wait for a retry; about 20 bytes each in the record.
MAX_ATTEMPTS: Final = 4096
# After a restart the bus does not know which offsets a member was handed. It assumes this many
# after the last acked one: twice the read-ahead of our consumer. A backlog of millions must
# not become suspect.
MAX_SUSPECT_ROWS: Final = 32_768
DIED: Final = "the consumer died during the run"


class ExhaustedMessage(NamedTuple):
    """A message that has failed `max_deliver` times."""

    shard: int
    offset: int
    deliveries: int
    reason: str


class FailureReport(NamedTuple):
    """A failed run. `attempt` is the number of failures known before; None if not given."""

    offset: int
    reason: str = ""
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class ShardReport:
    """The report of a member about one shard. `running` is None if not given."""

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
        """The end of the reported offsets."""
        ends = [end for _, end in self.acked] + [failure.offset + 1 for failure in self.failed]
        return max(ends, default=0)


@dataclass(slots=True)
class ReportOutcome:
    """The new progress. `exhausted` messages have failed `max_deliver` times."""

    progress: ShardProgress
    attempts: dict[int, int] = field(default_factory=dict)
    exhausted: list[ExhaustedMessage] = field(default_factory=list)


def check_owner(progress: ShardProgress, shard: int, consumer: str, epoch: int) -> None:
    """Raise `Fenced` unless the consumer owns the shard under this epoch."""
    if progress.owner != consumer or progress.epoch != epoch:
        raise Fenced(f"consumer {consumer} no longer owns shard {shard} with epoch {epoch}")


def apply_report(
    progress: ShardProgress, report: ShardReport, end: int, max_deliver: int
) -> ReportOutcome:
    """Apply acks and failures. Raises `MalformedRequest` for offsets beyond the shard's end."""
    if report.last > end:
        raise MalformedRequest(
            f"offsets of shard {report.shard} must be below {end}, got {report.last - 1}"
        )
    acked = ack_ranges(progress, report.acked) if report.acked else progress
    if not report.failed:
        return ReportOutcome(acked)
    return record_failures(acked, report.shard, report.failed, max_deliver)


def ack_ranges(
    progress: ShardProgress, acked: Iterable[Range], most: int = MAX_RANGES
) -> ShardProgress:
    """Ack ranges. Raises `LimitReached` if that leaves more than `most` ranges."""
    low, above = offset_ranges.add_ranges(progress.low, progress.ranges, acked)
    # A record that is over the limit already may still shrink.
    if len(above) > max(most, len(progress.ranges)):
        raise LimitReached("max_ranges", f"a shard must have at most {most} ranges of acks")
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
    """Count failed runs, except those of acked messages and those reported before."""
    outcome, attempts = ReportOutcome(progress), dict(progress.attempts)
    for failure in failed:
        if offset_ranges.contains(progress.low, progress.ranges, failure.offset):
            continue
        known = attempts.get(failure.offset, 0)
        if known == 0 and len(attempts) >= MAX_ATTEMPTS:
            text = f"shard {shard} must have at most {MAX_ATTEMPTS} messages that wait for a retry"
            raise LimitReached("max_attempts", text)
        # The consumer knew fewer failures than the record: this one is counted already.
        is_repeated = failure.attempt is not None and failure.attempt < known
        count = known if is_repeated else known + 1
        attempts[failure.offset] = outcome.attempts[failure.offset] = count
        if count >= max_deliver:
            exhausted = ExhaustedMessage(shard, failure.offset, count, failure.reason)
            outcome.exhausted.append(exhausted)
    if outcome.attempts:
        outcome.progress = progress._replace(attempts=attempts)
    return outcome


def release_dead_owner(shard: GroupShard, end: int, max_deliver: int) -> ReportOutcome:
    """Release a dead member's shard: its runs have failed, its handed offsets are suspect."""
    progress = shard.progress
    handed_to = shard.handed_to
    if handed_to is None:  # the offsets were handed out before the bus started
        acked = progress.ranges[-1][1] if progress.ranges else progress.low
        handed_to = min(end, acked + MAX_SUSPECT_ROWS)
    suspect_to = max(progress.suspect_to, handed_to)
    released = release_owner(shard, progress, suspect_to if suspect_to > progress.low else 0)
    room = MAX_ATTEMPTS - len(progress.attempts)
    running = [FailureReport(offset, DIED) for offset in shard.running[:room] if offset < end]
    return record_failures(released, shard.number, running, max_deliver)


def release_owner(shard: GroupShard, progress: ShardProgress, suspect_to: int) -> ShardProgress:
    """Remove the owner and add its counts to the totals."""
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
    """Ack messages whose dead letters are in the same commit."""
    dead = [(offset, offset + 1) for offset in offsets]
    acked = ack_ranges(progress, dead, MAX_RANGES + MAX_ATTEMPTS)
    return acked._replace(dead_lettered=progress.dead_lettered + len(dead))


def skip_trimmed(progress: ShardProgress, start: int) -> ShardProgress:
    """Skip messages before `start`, which were trimmed, and count those that were not acked."""
    unread = offset_ranges.count_unacked(progress.low, progress.ranges, start)
    if start <= progress.low:
        return progress
    moved = ack_ranges(progress, [(0, start)])
    return moved._replace(
        start=progress.start + unread, trimmed_unread=progress.trimmed_unread + unread
    )
