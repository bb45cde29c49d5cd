"""Commits of acks: the reports of a member over several shards, and transactions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from polybus.errors import MalformedRequest, PolybusError, Stale
from polybus.groups import shard_progress
from polybus.groups.dead_letter_queue import append_dead_letters
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.groups.shard_progress import ReportOutcome, ShardReport
from polybus.model import offset_ranges
from polybus.model.commit import Append, CommitResult


def commit_reports(
    context: GroupContext,
    group: Group,
    consumer: str,
    max_deliver: int,
    reports: Sequence[ShardReport],
) -> list[dict[str, Any]]:
    """Commit the reports that are valid. Returns a response per report when durable.

    The caller must hold the group's lock if a report releases its shard, because the same
    commit gives the shard to another member.
    """
    shards = [group.shard(report.shard) for report in reports]
    # Before the locks are taken, because it may have to wait for the store.
    reached = [(report.shard, report.last) for report in reports]
    ends = context.ends.get_ends(group.topic.number, reached)
    with GroupUpdate(context, group, shards) as update:
        outcomes = [
            _apply_report(context, update, shard, consumer, report, ends[report.shard], max_deliver)
            for shard, report in zip(shards, reports, strict=True)
        ]
        # One commit for all shards: a dead letter is written if and only if its message is acked.
        accepted = [outcome for outcome in outcomes if isinstance(outcome, ReportOutcome)]
        exhausted = [message for outcome in accepted for message in outcome.exhausted]
        dead = append_dead_letters(context, update, exhausted) if exhausted else set()
        if update.changed:
            update.commit()
        responses = []
        for shard, report, outcome in zip(shards, reports, outcomes, strict=True):
            response: dict[str, Any] = {"shard": shard.number, "low": shard.progress.low}
            if isinstance(outcome, PolybusError):
                error_fields = {"code": outcome.code, "text": str(outcome)}
                responses.append({**response, "attempts": {}, "dead": [], "error": error_fields})
                continue
            if report.release:
                shard.reset_owner()
            else:
                shard.commit_times.discard_below(shard.progress.low)
            gone = sorted(at for at in outcome.attempts if (shard.number, at) in dead)
            attempts = {str(at): n for at, n in outcome.attempts.items() if at not in gone}
            responses.append({**response, "attempts": attempts, "dead": gone, "error": None})
    return responses


def _apply_report(
    context: GroupContext,
    update: GroupUpdate,
    shard: GroupShard,
    consumer: str,
    report: ShardReport,
    end: int,
    max_deliver: int,
) -> ReportOutcome | PolybusError:
    """Apply one report to the update. Returns the error instead if the report is refused."""
    group, before = update.group, update.progress(shard)
    topic = group.topic
    try:
        shard_progress.check_owner(before, shard.number, consumer, report.epoch)
        if report.failed:
            # Trimmed messages can neither run again nor become dead letters.
            start = context.durable.store.bounds(topic.number).shards[shard.number].start
            caught_up = shard_progress.skip_trimmed(before, start)
            if caught_up is not before:
                before = update.changed[shard] = caught_up
        outcome = shard_progress.apply_report(before, report, end, max_deliver)
    except PolybusError as error:
        return error  # the other reports of the call are independent of this one
    # An error below fails the whole call: the state of the shard has changed.
    emitted, redelivered = shard.counted
    # The owner reports totals, and a delayed report must not set them back.
    shard.counted = max(emitted, report.emitted), max(redelivered, report.redelivered)
    if report.running is not None:
        shard.running = report.running
    elif report.failed:  # these have ended, and must not fail again if the owner dies now
        ended = {failure.offset for failure in report.failed}
        shard.running = tuple(offset for offset in shard.running if offset not in ended)
    progress, counted = outcome.progress, shard.counted
    if report.release:
        # The shard goes to its target, or stays unowned if that member is gone or it is drained.
        progress = shard_progress.release_owner(shard, progress, progress.suspect_to)
        name, counted = group.target.get(shard.number, ""), (0, 0)
        member = group.roster.members.get(name)
        if member is not None and not group.is_at_seal(shard.number, progress.low):
            progress = shard_progress.assign_owner(progress, name, member.epoch)
    # Also if only the counts have changed, as after transactions: they outlive a kill of the bus.
    if progress != before or counted != before.counted:
        fresh = offset_ranges.unacked_parts(before.low, before.ranges, report.acked)
        look_up = partial(context.commit_time_ns, topic, shard.number)
        latency = shard.commit_times.count_acked(
            progress.latency, fresh, context.wall_ns(), look_up
        )
        update.changed[shard] = progress._replace(latency=latency, counted=counted)
    return outcome


def commit_transaction(
    context: GroupContext,
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
    reached = [(shard.number, offset + 1)]
    end = context.ends.get_ends(group.topic.number, reached)[shard.number]
    if offset >= end:
        raise MalformedRequest(f"shard {shard.number} has no offset {offset}")
    with GroupUpdate(context, group, [shard]) as update:
        progress = shard.progress
        shard_progress.check_owner(progress, shard.number, *owner)
        if offset_ranges.contains(progress.low, progress.ranges, offset):
            return None
        failed = progress.attempts.get(offset, 0)
        if failed != attempt:
            raise Stale(
                f"attempt of offset {offset} must be {failed}, got {attempt}; the run was given up"
            )
        report = ShardReport(shard.number, owner[1], ((offset, offset + 1),))
        # A transaction has no failed run, so its `max_deliver` does not matter.
        outcome = _apply_report(context, update, shard, owner[0], report, end, max_deliver=1)
        if isinstance(outcome, PolybusError):
            raise outcome
        update.appends += appends
        return update.commit(stages)
