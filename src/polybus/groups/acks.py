"""Acks of a member, over several of its shards, as one commit; and transactions."""

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
    def __init__(self, means: GroupContext) -> None:
        self._means = means

    def commit_entries(
        self, group: Group, consumer: str, max_deliver: int, entries: Sequence[ShardReport]
    ) -> list[dict[str, Any]]:
        """An answer for each entry, once all that is taken is on disk.

        Whoever releases shards holds the group's lock: they go to others in the same commit.
        """
        shards = [group.shard(one.shard) for one in entries]
        ends = self._shard_ends(group, entries)
        with GroupUpdate(self._means, group, shards) as work:
            judged = [
                self._apply_entry(work, shard, consumer, max_deliver, entry, ends[entry.shard])
                for shard, entry in zip(shards, entries, strict=True)
            ]
            failures = [
                one for each in judged if isinstance(each, ReportOutcome) for one in each.failures
            ]
            dead = append_dead_letters(self._means, work, failures)
            if not work.is_empty:
                work.commit()
            released = {
                one.shard
                for one, each in zip(entries, judged, strict=True)
                if one.release and isinstance(each, ReportOutcome)
            }
            for shard in work.shards:
                _reset_samples(shard, shard.number in released)
        return [
            _describe_outcome(shard, each, dead) for shard, each in zip(shards, judged, strict=True)
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
        """The ack of one message and all that was produced with it; None if it is acked already.

        `owner` is the consumer and the shard's epoch, `run` the offset and how many
        failed runs of it the consumer knew of.
        """
        offset, attempt = run
        ends = self._shard_ends(group, [ShardReport(shard.number, 0, ((offset, offset + 1),))])
        if offset >= ends[shard.number]:
            raise MalformedRequest(f"shard {shard.number} has no offset {offset}")
        with GroupUpdate(self._means, group, [shard]) as work:
            progress = shard.progress
            shard_progress.check_owner(progress, shard.number, *owner)
            if offset_ranges.contains(progress.low, progress.ranges, offset):
                return None
            failed = progress.attempts.get(offset, 0)
            if failed != attempt:
                text = f"offset {offset} has failed {failed} times by now, not {attempt}"
                raise Stale(text)
            acked = ((offset, offset + 1),)
            self._set_progress(work, shard, shard_progress.ack_ranges(progress, acked), acked)
            work.appends += appends
            return work.commit(stages)

    def flush_counts(self, group: Group) -> None:
        """Writes what members have counted, which else waits for a commit that is made anyhow."""
        untold = [one for one in group.shards if one.counted != one.progress.counted]
        for some in split_shards(untold, MAX_RECORDS_PER_COMMIT):
            with GroupUpdate(self._means, group, some) as work:
                for shard in some:
                    work.set_progress(shard, shard.progress._replace(counted=shard.counted))
                work.commit()

    def _apply_entry(
        self,
        work: GroupUpdate,
        shard: GroupShard,
        consumer: str,
        max_deliver: int,
        entry: ShardReport,
        end: int,
    ) -> ReportOutcome | PolybusError:
        progress = work.progress(shard)
        try:
            shard_progress.check_owner(progress, shard.number, consumer, entry.epoch)
            if entry.failed:
                progress = self._skip_trimmed(work, shard, progress)
            judged = shard_progress.apply_report(progress, entry, end, max_deliver)
        except PolybusError as error:
            return error
        shard.add_counts(entry.emitted, entry.redelivered)
        if entry.running is not None:
            shard.running = entry.running
        elif entry.failed:  # these have ended, and must not count again should it die now
            ended = {one.offset for one in entry.failed}
            shard.running = tuple(offset for offset in shard.running if offset not in ended)
        if entry.release:
            judged.progress = _reassign(work.group, shard, judged.progress)
        if judged.progress != progress:
            self._set_progress(work, shard, judged.progress, entry.acked)
        return judged

    def _skip_trimmed(
        self, work: GroupUpdate, shard: GroupShard, progress: ShardProgress
    ) -> ShardProgress:
        """A message that was trimmed meanwhile is not tried again: no letter could tell of it."""
        bounds = self._means.durable.store.bounds(work.group.topic.number).shards
        caught_up = shard_progress.skip_trimmed(progress, bounds[shard.number].start)
        if caught_up is not progress:
            work.set_progress(shard, caught_up)
        return caught_up

    def _set_progress(
        self,
        work: GroupUpdate,
        shard: GroupShard,
        progress: ShardProgress,
        acked: Iterable[offset_ranges.Range],
    ) -> None:
        before = work.progress(shard)
        fresh = offset_ranges.unacked_parts(before.low, before.ranges, acked)
        look_up = partial(self._means.commit_time_ns, work.group.topic, shard.number)
        latency = shard.commit_times.count_acked(
            progress.latency, fresh, self._means.wall_ns(), look_up
        )
        is_released = progress.epoch != shard.progress.epoch or progress.owner is None
        counted = (0, 0) if is_released else shard.counted
        work.set_progress(shard, progress._replace(latency=latency, counted=counted))

    def _shard_ends(self, group: Group, entries: Sequence[ShardReport]) -> Sequence[int]:
        """Where shards end: as far as they are known to reach, unless more is spoken of."""
        known = self._means.ends.get_ends(group.topic.number)
        if all(known[one.shard] >= one.last for one in entries):
            return known
        return self._means.ends.refresh_ends(group.topic.number)


def append_dead_letters(
    means: GroupContext, work: GroupUpdate, failures: Sequence[ExhaustedMessage]
) -> set[tuple[int, int]]:
    """Adds the letters of what has failed too often; the (shard, offset) of each."""
    topic = work.group.topic
    if not failures or not dead_letter_queue.has_dead_letter_topic(topic):
        return set()
    appends, dead = dead_letter_queue.write_dead_letters(means, topic, work.group.name, failures)
    work.appends += appends
    for shard in work.shards:
        gone = [offset for number, offset in dead if number == shard.number]
        if gone:
            work.set_progress(shard, shard_progress.mark_dead_lettered(work.progress(shard), gone))
    return dead


def _reassign(group: Group, shard: GroupShard, progress: ShardProgress) -> ShardProgress:
    """To whom it is meant for; nobody's if that one has gone."""
    free = shard_progress.release_owner(shard, progress, progress.suspect_to)
    name = group.target.get(shard.number, "")
    member = group.roster.members.get(name)
    return shard_progress.assign_owner(free, name, member.epoch) if member else free


def _reset_samples(shard: GroupShard, released: bool) -> None:
    if released:
        shard.reset_owner(shard.progress.low)
    else:
        shard.commit_times.discard_below(shard.progress.low)


def _describe_outcome(
    shard: GroupShard, judged: ReportOutcome | PolybusError, dead: set[tuple[int, int]]
) -> dict[str, Any]:
    """`low` is the group's own business if the entry was refused: then it is told as it is."""
    told: dict[str, Any] = {"shard": shard.number, "low": shard.progress.low}
    if isinstance(judged, PolybusError):
        error = {"code": judged.code, "text": str(judged)}
        return {**told, "attempts": {}, "dead": [], "error": error}
    gone = sorted(at for at in judged.attempts if (shard.number, at) in dead)
    attempts = {str(at): n for at, n in judged.attempts.items() if at not in gone}
    return {**told, "attempts": attempts, "dead": gone, "error": None}
