"""The members of a group, and the change of shard owners.

Every change of the roster ends in `rebalance`: shards of members that are gone are released,
and unowned shards go to the member they are assigned to, under a new epoch. A shard that is
assigned to another member stays with its owner, which gets a release request and
releases it after it has drained it.
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

# Shards of dead members per commit. Their dead letters may touch all shards of the .dlq topic.
MAX_ORPHANS_PER_COMMIT: Final = 200
DEFAULT_MAX_DELIVER: Final = 5  # for a dead member that is no longer in the roster


class Membership:
    def __init__(self, context: GroupContext, registry: GroupRegistry, max_members: int) -> None:
        self._context = context
        self._registry = registry
        self._max_members = max_members

    def join(
        self, topic: Topic, name: str, consumer: str, requested: Member, start: str, creator: str
    ) -> Member:
        """Add a member with a new epoch. It replaces one of the same name, as if that had died."""
        while True:
            group = self._registry.get_or_create(topic, name, start, creator)
            with group.lock:
                if group.is_removed:  # between the lookup and the lock
                    topic = self._context.durable.get(topic.name)
                    continue
                try:
                    return self._join(group, consumer, requested)
                except BaseException:
                    if not group.version:  # the group was never written
                        self._registry.discard(group)
                    raise

    def _join(self, group: Group, consumer: str, requested: Member) -> Member:
        roster = group.roster
        if consumer not in roster.members and len(roster.members) >= self._max_members:
            text = f"group {group.name!r} must have at most {self._max_members} members"
            raise LimitReached("max_members", text)
        member = replace(requested, epoch=roster.next_epoch)
        members = {**roster.members, consumer: member}
        group.last_seen_s[consumer] = self._context.clock()
        changed = replace(
            roster, generation=roster.generation + 1, next_epoch=member.epoch + 1, members=members
        )
        self.rebalance(group, changed)
        return member

    def leave(self, group: Group, consumer: str, epoch: int) -> None:
        """Remove a member. Its shards go to others at once and are not suspect."""
        with group.lock:
            group.member(consumer, epoch)
            self.rebalance(group, _remove_members(group.roster, {consumer}), leaving=consumer)

    def expire(self, group: Group) -> list[str]:
        """Drop members without a sign of life, and rebalance if needed. Returns their names."""
        with group.lock:
            now = self._context.clock()
            dead = {
                name
                for name, member in group.roster.members.items()
                if now - group.last_seen_s.setdefault(name, now) > member.dead_ms / 1000
            }
            if dead:
                self.rebalance(group, _remove_members(group.roster, dead))
            elif group.needs_rebalance:
                self.rebalance(group)
            return sorted(dead)

    def rebalance(self, group: Group, roster: Roster | None = None, leaving: str = "") -> None:
        """Assign shards to members; a given roster replaces the one of the group.

        `leaving` is a member that has drained its shards, so they are not suspect.
        """
        with group.lock:
            group.check_exists()
            group.needs_rebalance = True
            members = (roster or group.roster).members
            holders = {shard.number: shard.progress.owner for shard in group.shards}
            previous = {**holders, **group.target}
            target = assign_shards(members, previous, holders)
            self._move_shards(group, roster, target, leaving)
            group.target, group.needs_rebalance = target, False
            for gone in group.last_seen_s.keys() - members.keys():
                del group.last_seen_s[gone]
        self._context.wake(group.topic.number)

    def _move_shards(
        self, group: Group, roster: Roster | None, target: Mapping[int, str], leaving: str
    ) -> None:
        before = group.roster.members
        members = roster.members if roster else before
        moving = [shard for shard in group.shards if _needs_move(shard, members, target)]
        has_running = any(shard.running for shard in moving)
        most = MAX_ORPHANS_PER_COMMIT if has_running else MAX_RECORDS_PER_COMMIT
        # Without a shard to move, one commit still writes the roster.
        for chunk in list(split_shards(moving, most)) or [[]]:
            with GroupUpdate(self._context, group, chunk) as update:
                if roster is not group.roster:
                    update.roster = roster
                self._release_orphans(update, members, before, leaving)
                for shard in chunk:
                    _assign_shard(update, shard, members, target)
                if not update.is_empty:
                    update.commit()
                for shard in chunk:
                    shard.reset_owner(shard.progress.low)

    def _release_orphans(
        self,
        update: GroupUpdate,
        members: Mapping[str, Member],
        before: Mapping[str, Member],
        leaving: str,
    ) -> None:
        """Release shards whose owner is gone; runs of a dead owner count as failed."""
        orphans = [shard for shard in update.shards if _is_orphan(shard, members)]
        topic, exhausted = update.group.topic, list[dead_letter_queue.ExhaustedMessage]()
        bounds = self._context.durable.store.bounds(topic.number).shards if orphans else ()
        for shard in orphans:
            progress = shard.progress
            owner = progress.owner or ""
            if owner == leaving:
                released = shard_progress.release_owner(shard, progress, progress.suspect_to)
                update.set_progress(shard, released)
                continue
            most = before[owner].max_deliver if owner in before else DEFAULT_MAX_DELIVER
            outcome = shard_progress.release_dead_owner(shard, bounds[shard.number].end, most)
            update.set_progress(shard, outcome.progress)
            exhausted += outcome.exhausted
        append_dead_letters(self._context, update, exhausted)


def _remove_members(roster: Roster, names: set[str]) -> Roster:
    members = {name: member for name, member in roster.members.items() if name not in names}
    return replace(roster, generation=roster.generation + 1, members=members)


def _needs_move(
    shard: GroupShard, members: Mapping[str, Member], target: Mapping[int, str]
) -> bool:
    """Return whether the shard is orphaned, unowned with a target, or not on disk yet."""
    if shard.progress.owner is None:
        return shard.number in target or not shard.version
    return _is_orphan(shard, members)


def _is_orphan(shard: GroupShard, members: Mapping[str, Member]) -> bool:
    if shard.progress.owner is None:
        return False
    member = members.get(shard.progress.owner)
    return member is None or member.epoch != shard.progress.member


def _assign_shard(
    update: GroupUpdate, shard: GroupShard, members: Mapping[str, Member], target: Mapping[int, str]
) -> None:
    name = target.get(shard.number)
    progress = update.progress(shard)
    if name is not None:
        progress = shard_progress.assign_owner(progress, name, members[name].epoch)
    update.set_progress(shard, progress)
