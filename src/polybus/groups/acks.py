"""Commits of acks: the reports of a member over several shards, and transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.errors import MalformedRequest, PolybusError, Stale
from polybus.groups import dead_letter_queue, shard_progress
from polybus.groups.dead_letter_queue import ExhaustedMessage
from polybus.groups.group_registry import MAX_RECORDS_PER_COMMIT, split_shards
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.groups.shard_progress import ReportOutcome, ShardReport
from polybus.model import offset_ranges

if TYPE_CHECKING:
    from polybus.groups.group_records import ShardProgress
    from polybus.model.commit import Append, CommitResult


class AckCommitter:
    def __init__(self, context: GroupContext) -> None:
        self._context = context

    def commit_reports(
        self, group: Group, consumer: str, max_deliver: int, reports: Sequence[ShardReport]
    ) -> list[dict[str, Any]]:
        """Commit the reports that are valid. Returns a response per report when durable.

        The caller must hold the group's lock if a report releases its shard, because the same
        commit gives the shard to another member.
        """
        shards = [group.shard(report.shard) for report in reports]
        ends = self._shard_ends(group, reports)
        with GroupUpdate(self._context, group, shards) as update:
            outcomes = [
                self._apply_report(update, shard, consumer, max_deliver, report, ends[report.shard])
                for shard, report in zip(shards, reports, strict=True)
            ]
            accepted = [outcome for outcome in outcomes if isinstance(outcome, ReportOutcome)]
            exhausted = [message for outcome in accepted for message in outcome.exhausted]
            dead = append_dead_letters(self._context, update, exhausted)
            if not update.is_empty:
                update.commit()
            released = {
                report.shard
                for report, outcome in zip(reports, outcomes, strict=True)
                if report.release and isinstance(outcome, ReportOutcome)
            }
            for shard in update.shards:
                if shard.number in released:
                    shard.reset_owner(shard.progress.low)
                else:
                    shard.commit_times.discard_below(shard.progress.low)
        return [
            _build_response(shard, outcome, dead)
            for shard, outcome in zip(shards, outcomes, strict=True)
        ]

    def commit_transaction(
        self,
        group: Group,
        shard: GroupShard,
        owner: tuple[str, int],
        run: tuple[int, int],
        appends: Sequence[Append],
        stages: tuple[str, ...],
    ) -> CommitResult | None:
        """Commit the ack of one message and its outputs. Returns None if it is acked already.

        `owner` is the consumer and the shard's epoch. `run` is the offset and the number of
        failed runs that the consumer knew of.
        """
        offset, attempt = run
        ends = self._shard_ends(group, [ShardReport(shard.number, 0, ((offset, offset + 1),))])
        if offset >= ends[shard.number]:
            raise MalformedRequest(f"shard {shard.number} has no offset {offset}")
        with GroupUpdate(self._context, group, [shard]) as update:
            progress = shard.progress
            shard_progress.check_owner(progress, shard.number, *owner)
            if offset_ranges.contains(progress.low, progress.ranges, offset):
                return None
            failed = progress.attempts.get(offset, 0)
            if failed != attempt:
                raise Stale(
                    f"attempt of offset {offset} must be {failed}, got {attempt};"
                    " the run was given up"
                )
            acked = ((offset, offset + 1),)
            self._set_progress(update, shard, shard_progress.ack_ranges(progress, acked), acked)
            update.appends += appends
            return update.commit(stages)

    def flush_counts(self, group: Group) -> None:
        """Write the counts of members, which otherwise wait for the next ack."""
        unwritten = [shard for shard in group.shards if shard.counted != shard.progress.counted]
        for chunk in split_shards(unwritten, MAX_RECORDS_PER_COMMIT):
            with GroupUpdate(self._context, group, chunk) as update:
                for shard in chunk:
                    update.set_progress(shard, shard.progress._replace(counted=shard.counted))
                update.commit()

    def _apply_report(
        self,
        update: GroupUpdate,
        shard: GroupShard,
        consumer: str,
        max_deliver: int,
        report: ShardReport,
        end: int,
    ) -> ReportOutcome | PolybusError:
        """Apply one report to the update. Returns the error instead if it is refused."""
        progress = update.progress(shard)
        try:
            shard_progress.check_owner(progress, shard.number, consumer, report.epoch)
            if report.failed:
                progress = self._skip_trimmed(update, shard, progress)
            outcome = shard_progress.apply_report(progress, report, end, max_deliver)
        except PolybusError as error:
            return error
        shard.add_counts(report.emitted, report.redelivered)
        if report.running is not None:
            shard.running = report.running
        elif report.failed:  # these have ended, and must not fail again if the owner dies now
            ended = {failure.offset for failure in report.failed}
            shard.running = tuple(offset for offset in shard.running if offset not in ended)
        if report.release:
            outcome.progress = _reassign(update.group, shard, outcome.progress)
        if outcome.progress != progress:
            self._set_progress(update, shard, outcome.progress, report.acked)
        return outcome

    def _skip_trimmed(
        self, update: GroupUpdate, shard: GroupShard, progress: ShardProgress
    ) -> ShardProgress:
        """Skip trimmed messages: they can neither run again nor become dead letters."""
        bounds = self._context.durable.store.bounds(update.group.topic.number).shards
        caught_up = shard_progress.skip_trimmed(progress, bounds[shard.number].start)
        if caught_up is not progress:
            update.set_progress(shard, caught_up)
        return caught_up

    def _set_progress(
        self,
        update: GroupUpdate,
        shard: GroupShard,
        progress: ShardProgress,
        acked: Iterable[offset_ranges.Range],
    ) -> None:
        """Set the progress, with the latency of the newly acked messages and the counts."""
        before = update.progress(shard)
        fresh = offset_ranges.unacked_parts(before.low, before.ranges, acked)
        look_up = partial(self._context.commit_time_ns, update.group.topic, shard.number)
        latency = shard.commit_times.count_acked(
            progress.latency, fresh, self._context.wall_ns(), look_up
        )
        is_released = progress.epoch != shard.progress.epoch or progress.owner is None
        counted = (0, 0) if is_released else shard.counted
        update.set_progress(shard, progress._replace(latency=latency, counted=counted))

    def _shard_ends(self, group: Group, reports: Sequence[ShardReport]) -> Sequence[int]:
        """Return the ends of the shards; asks the store only if a report goes beyond them."""
        known = self._context.ends.get_ends(group.topic.number)
        if all(known[report.shard] >= report.last for report in reports):
            return known
        return self._context.ends.refresh_ends(group.topic.number)


def append_dead_letters(
    context: GroupContext, update: GroupUpdate, exhausted: Sequence[ExhaustedMessage]
) -> set[tuple[int, int]]:
    """Add dead letters to the update. Returns their (shard, offset) pairs."""
    topic = update.group.topic
    if not exhausted or not dead_letter_queue.has_dead_letter_topic(topic):
        return set()
    appends, dead = dead_letter_queue.write_dead_letters(
        context, topic, update.group.name, exhausted
    )
    update.appends += appends
    for shard in update.shards:
        gone = [offset for number, offset in dead if number == shard.number]
        if gone:
            progress = shard_progress.mark_dead_lettered(update.progress(shard), gone)
            update.set_progress(shard, progress)
    return dead


def _reassign(group: Group, shard: GroupShard, progress: ShardProgress) -> ShardProgress:
    """Give a released shard to its target, or leave it unowned if that member is gone."""
    free = shard_progress.release_owner(shard, progress, progress.suspect_to)
    name = group.target.get(shard.number, "")
    member = group.roster.members.get(name)
    return shard_progress.assign_owner(free, name, member.epoch) if member else free


def _build_response(
    shard: GroupShard, outcome: ReportOutcome | PolybusError, dead: set[tuple[int, int]]
) -> dict[str, Any]:
    response: dict[str, Any] = {"shard": shard.number, "low": shard.progress.low}
    if isinstance(outcome, PolybusError):
        error = {"code": outcome.code, "text": str(outcome)}
        return {**response, "attempts": {}, "dead": [], "error": error}
    gone = sorted(at for at in outcome.attempts if (shard.number, at) in dead)
    attempts = {str(at): n for at, n in outcome.attempts.items() if at not in gone}
    return {**response, "attempts": attempts, "dead": gone, "error": None}
