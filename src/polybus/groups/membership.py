"""Who is in a group, and how shards change hands.

Whatever changes the roster ends in `settle`: shards of those who are not there any
more are buried, and what is nobody's is given to whom it is meant for, with a new
epoch. A shard that is meant for another is left with its owner, who learns that it is
to be released, and does so when it has drained it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from polybus.errors import LimitReached
from polybus.groups import dead_letter_queue, shard_progress
from polybus.groups.acks import append_dead_letters
from polybus.groups.assignment import assign_shards
from polybus.groups.group_records import Member, Roster
from polybus.groups.group_registry import MAX_RECORDS_PER_COMMIT, GroupRegistry, split_shards
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate

if TYPE_CHECKING:
    from polybus.model.topic import Topic

MAX_ORPHANS_PER_COMMIT: Final = (
    200  # shards, whose dead letters may touch all shards of their topic
)
DEFAULT_MAX_DELIVER: Final = 5  # of a dead member that is not in the roster any more


class Membership:
    def __init__(self, means: GroupContext, table: GroupRegistry, max_members: int) -> None:
        self._means = means
        self._table = table
        self._max_members = max_members

    def join(
        self, topic: Topic, name: str, consumer: str, asked: Member, start: str, creator: str
    ) -> Member:
        """A member with a new epoch. One of the same name is replaced, as if it had died."""
        while True:
            group = self._table.get_or_create(topic, name, start, creator)
            with group.lock:
                if group.is_removed:  # removed in between
                    topic = self._means.durable.get(topic.name)
                    continue
                try:
                    return self._join(group, consumer, asked)
                except BaseException:
                    if not group.version:
                        self._table.discard(group)
                    raise

    def _join(self, group: Group, consumer: str, asked: Member) -> Member:
        roster = group.roster
        if consumer not in roster.members and len(roster.members) >= self._max_members:
            text = f"group {group.name!r} has {self._max_members} members already"
            raise LimitReached("max_members", text)
        member = replace(asked, epoch=roster.next_epoch)
        members = {**roster.members, consumer: member}
        group.last_seen_s[consumer] = self._means.clock()
        changed = replace(
            roster, generation=roster.generation + 1, next_epoch=member.epoch + 1, members=members
        )
        self.rebalance(group, changed)
        return member

    def leave(self, group: Group, consumer: str, epoch: int) -> None:
        """Its shards go to others at once; they are not suspect."""
        with group.lock:
            group.member(consumer, epoch)
            self.rebalance(group, _remove_members(group.roster, {consumer}), leaving=consumer)

    def expire(self, group: Group) -> list[str]:
        """Drops members that have not been heard of for too long; gives shards that wait."""
        with group.lock:
            now = self._means.clock()
            dead = {
                name
                for name, one in group.roster.members.items()
                if now - group.last_seen_s.setdefault(name, now) > one.dead_ms / 1000
            }
            if dead:
                self.rebalance(group, _remove_members(group.roster, dead))
            elif group.needs_rebalance:
                self.rebalance(group)
            return sorted(dead)

    def rebalance(self, group: Group, roster: Roster | None = None, leaving: str = "") -> None:
        """Gives shards to whom they are for; with a roster, that is the group's from then on.

        Who is leaving has drained its shards: they are not suspect.
        """
        with group.lock:
            group.check_exists()
            group.needs_rebalance = True
            members = (roster or group.roster).members
            holders = {one.number: one.progress.owner for one in group.shards}
            meant = {**holders, **group.target}
            target = assign_shards(members, meant, holders)
            self._move_shards(group, roster, target, leaving)
            group.target, group.needs_rebalance = target, False
            for gone in group.last_seen_s.keys() - members.keys():
                del group.last_seen_s[gone]
        self._means.wake(group.topic.number)

    def _move_shards(
        self, group: Group, roster: Roster | None, target: Mapping[int, str], leaving: str
    ) -> None:
        before = group.roster.members
        members = roster.members if roster else before
        moving = [one for one in group.shards if _needs_move(one, members, target)]
        most = (
            MAX_ORPHANS_PER_COMMIT if any(one.running for one in moving) else MAX_RECORDS_PER_COMMIT
        )
        for some in list(split_shards(moving, most)) or [[]]:
            with GroupUpdate(self._means, group, some) as work:
                if roster is not group.roster:
                    work.roster = roster
                self._release_orphans(work, members, before, leaving)
                for shard in some:
                    _assign_shard(work, shard, members, target)
                if not work.is_empty:
                    work.commit()
                for shard in some:
                    shard.reset_owner(shard.progress.low)

    def _release_orphans(
        self,
        work: GroupUpdate,
        members: Mapping[str, Member],
        before: Mapping[str, Member],
        leaving: str,
    ) -> None:
        orphans = [one for one in work.shards if _is_orphan(one, members)]
        topic, failures = work.group.topic, list[dead_letter_queue.ExhaustedMessage]()
        bounds = self._means.durable.store.bounds(topic.number).shards if orphans else ()
        for shard in orphans:
            owner = shard.progress.owner or ""
            if owner == leaving:
                work.set_progress(
                    shard,
                    shard_progress.release_owner(shard, shard.progress, shard.progress.suspect_to),
                )
                continue
            most = before[owner].max_deliver if owner in before else DEFAULT_MAX_DELIVER
            judged = shard_progress.release_dead_owner(shard, bounds[shard.number].end, most)
            work.set_progress(shard, judged.progress)
            failures += judged.failures
        append_dead_letters(self._means, work, failures)


def _remove_members(roster: Roster, names: set[str]) -> Roster:
    members = {name: one for name, one in roster.members.items() if name not in names}
    return replace(roster, generation=roster.generation + 1, members=members)


def _needs_move(
    shard: GroupShard, members: Mapping[str, Member], target: Mapping[int, str]
) -> bool:
    """Is it orphaned, or nobody's and meant for somebody, or not on disk yet?"""
    if shard.progress.owner is None:
        return shard.number in target or not shard.version
    return _is_orphan(shard, members)


def _is_orphan(shard: GroupShard, members: Mapping[str, Member]) -> bool:
    if shard.progress.owner is None:
        return False
    member = members.get(shard.progress.owner)
    return member is None or member.epoch != shard.progress.member


def _assign_shard(
    work: GroupUpdate, shard: GroupShard, members: Mapping[str, Member], target: Mapping[int, str]
) -> None:
    name = target.get(shard.number)
    progress = work.progress(shard)
    if name is not None:
        progress = shard_progress.assign_owner(progress, name, members[name].epoch)
    work.set_progress(shard, progress)
