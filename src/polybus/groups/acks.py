"""Acks of a member, over several of its shards, as one commit; and transactions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from polybus.errors import MalformedRequest, PolybusError, Stale
from polybus.groups import acked_ranges, dead_letter_queue, shard_progress
from polybus.groups.dead_letter_queue import Failure
from polybus.groups.group_registry import AT_ONCE, at_once
from polybus.groups.group_state import Group, Means, Shard, Work
from polybus.groups.shard_progress import Entry, Judged

if TYPE_CHECKING:
    from polybus.groups.group_records import Progress
    from polybus.model.commit import Append, Committed


class Acks:
    def __init__(self, means: Means) -> None:
        self._means = means

    def take(
        self, group: Group, consumer: str, max_deliver: int, entries: Sequence[Entry]
    ) -> list[dict[str, Any]]:
        """An answer for each entry, once all that is taken is on disk.

        Whoever releases shards holds the group's lock: they go to others in the same commit.
        """
        shards = [group.shard(one.shard) for one in entries]
        ends = self._ends(group, entries)
        with Work(self._means, group, shards) as work:
            judged = [
                self._judge(work, shard, consumer, max_deliver, entry, ends[entry.shard])
                for shard, entry in zip(shards, entries, strict=True)
            ]
            failures = [one for each in judged if isinstance(each, Judged) for one in each.failures]
            dead = give_up(self._means, work, failures)
            if not work.is_empty:
                work.commit()
            released = {
                one.shard
                for one, each in zip(entries, judged, strict=True)
                if one.release and isinstance(each, Judged)
            }
            for shard in work.shards:
                _tidy(shard, shard.number in released)
        return [_told(shard, each, dead) for shard, each in zip(shards, judged, strict=True)]

    def transact(
        self,
        group: Group,
        shard: Shard,
        owner: tuple[str, int],
        run: tuple[int, int],
        appends: Sequence[Append],
        stages: tuple[str, ...],
    ) -> Committed | None:
        """The ack of one message and all that was produced with it; None if it is acked already.

        `owner` is the consumer and the shard's epoch, `run` the offset and how many
        failed runs of it the consumer knew of.
        """
        offset, attempt = run
        ends = self._ends(group, [Entry(shard.number, 0, ((offset, offset + 1),))])
        if offset >= ends[shard.number]:
            raise MalformedRequest(f"shard {shard.number} has no offset {offset}")
        with Work(self._means, group, [shard]) as work:
            progress = shard.progress
            shard_progress.check_owner(progress, shard.number, *owner)
            if acked_ranges.contains(progress.low, progress.ranges, offset):
                return None
            failed = progress.attempts.get(offset, 0)
            if failed != attempt:
                text = f"offset {offset} has failed {failed} times by now, not {attempt}"
                raise Stale(text)
            acked = ((offset, offset + 1),)
            self._set(work, shard, shard_progress.ack(progress, acked), acked)
            work.appends += appends
            return work.commit(stages)

    def keep_counts(self, group: Group) -> None:
        """Writes what members have counted, which else waits for a commit that is made anyhow."""
        untold = [one for one in group.shards if one.counted != one.progress.counted]
        for some in at_once(untold, AT_ONCE):
            with Work(self._means, group, some) as work:
                for shard in some:
                    work.set(shard, shard.progress._replace(counted=shard.counted))
                work.commit()

    def _judge(
        self,
        work: Work,
        shard: Shard,
        consumer: str,
        max_deliver: int,
        entry: Entry,
        end: int,
    ) -> Judged | PolybusError:
        progress = work.progress(shard)
        try:
            shard_progress.check_owner(progress, shard.number, consumer, entry.epoch)
            if entry.failed:
                progress = self._caught_up(work, shard, progress)
            judged = shard_progress.judge(progress, entry, end, max_deliver)
        except PolybusError as error:
            return error
        shard.count(entry.emitted, entry.redelivered)
        if entry.running is not None:
            shard.running = entry.running
        elif entry.failed:  # these have ended, and must not count again should it die now
            ended = {one.offset for one in entry.failed}
            shard.running = tuple(offset for offset in shard.running if offset not in ended)
        if entry.release:
            judged.progress = _handed_over(work.group, shard, judged.progress)
        if judged.progress != progress:
            self._set(work, shard, judged.progress, entry.acked)
        return judged

    def _caught_up(self, work: Work, shard: Shard, progress: Progress) -> Progress:
        """A message that was trimmed meanwhile is not tried again: no letter could tell of it."""
        bounds = self._means.durable.store.bounds(work.group.topic.number).shards
        caught_up = shard_progress.trim(progress, bounds[shard.number].start)
        if caught_up is not progress:
            work.set(shard, caught_up)
        return caught_up

    def _set(
        self, work: Work, shard: Shard, progress: Progress, acked: Iterable[acked_ranges.Range]
    ) -> None:
        before = work.progress(shard)
        fresh = acked_ranges.fresh(before.low, before.ranges, acked)
        look_up = partial(self._means.written_ns, work.group.topic, shard.number)
        latency = shard.sightings.add(progress.latency, fresh, self._means.wall_ns(), look_up)
        is_released = progress.epoch != shard.progress.epoch or progress.owner is None
        counted = (0, 0) if is_released else shard.counted
        work.set(shard, progress._replace(latency=latency, counted=counted))

    def _ends(self, group: Group, entries: Sequence[Entry]) -> Sequence[int]:
        """Where shards end: as far as they are known to reach, unless more is spoken of."""
        known = self._means.ends.of(group.topic.number)
        if all(known[one.shard] >= one.last for one in entries):
            return known
        return self._means.ends.look(group.topic.number)


def give_up(means: Means, work: Work, failures: Sequence[Failure]) -> set[tuple[int, int]]:
    """Adds the letters of what has failed too often; the (shard, offset) of each."""
    topic = work.group.topic
    if not failures or not dead_letter_queue.has_letters(topic):
        return set()
    appends, dead = dead_letter_queue.write(means, topic, work.group.name, failures)
    work.appends += appends
    for shard in work.shards:
        gone = [offset for number, offset in dead if number == shard.number]
        if gone:
            work.set(shard, shard_progress.give_up(work.progress(shard), gone))
    return dead


def _handed_over(group: Group, shard: Shard, progress: Progress) -> Progress:
    """To whom it is meant for; nobody's if that one has gone."""
    free = shard_progress.let_go(shard, progress, progress.suspect_to)
    name = group.target.get(shard.number, "")
    member = group.roster.members.get(name)
    return shard_progress.give(free, name, member.epoch) if member else free


def _tidy(shard: Shard, released: bool) -> None:
    if released:
        shard.new_owner(shard.progress.low)
    else:
        shard.sightings.forget(shard.progress.low)


def _told(
    shard: Shard, judged: Judged | PolybusError, dead: set[tuple[int, int]]
) -> dict[str, Any]:
    """`low` is the group's own business if the entry was refused: then it is told as it is."""
    told: dict[str, Any] = {"shard": shard.number, "low": shard.progress.low}
    if isinstance(judged, PolybusError):
        error = {"code": judged.code, "text": str(judged)}
        return {**told, "attempts": {}, "dead": [], "error": error}
    gone = sorted(at for at in judged.attempts if (shard.number, at) in dead)
    attempts = {str(at): n for at, n in judged.attempts.items() if at not in gone}
    return {**told, "attempts": attempts, "dead": gone, "error": None}
