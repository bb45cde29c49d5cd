"""The members of a group, and the change of shard owners.

Every change of the roster ends in `rebalance`: shards of members that are gone are released,
and unowned shards go to the member they are assigned to, under a new epoch. A shard that is
assigned to another member stays with its owner, which gets a release request and
releases it after it has drained it. A shard that a reshard has sealed is released in the same
way when the group has acked all of it, and its children are assigned (shard_phases).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from polybus.errors import LimitReached
from polybus.groups import shard_progress
from polybus.groups.assignment import assign_shards
from polybus.groups.dead_letter_queue import append_dead_letters
from polybus.groups.group_records import Member, Roster
from polybus.groups.group_registry import MAX_RECORDS_PER_COMMIT, GroupRegistry, split_shards
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.groups.shard_phases import ShardPhase
from polybus.model.identity import Identity
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
        self,
        topic: Topic,
        name: str,
        consumer: str,
        requested: Member,
        start: str,
        creator: Identity,
    ) -> Member:
        """Add a member with a new epoch. It replaces one of the same name, as if that had died."""
        while True:
            group = self._registry.get_or_create(topic, name, start, creator)
            with group.lock:
                if group.is_removed:  # between the lookup and the lock
                    topic = self._context.durable.get(topic.name)
                    continue
                roster = group.roster
                try:
                    if consumer not in roster.members and len(roster.members) >= self._max_members:
                        text = f"group {name!r} must have at most {self._max_members} members"
                        raise LimitReached("max_members", text)
                    # A new epoch, also for a known name: it fences the earlier consumer.
                    member = replace(requested, epoch=roster.next_epoch)
                    group.last_seen_s[consumer] = self._context.clock()
                    changed = replace(
                        roster,
                        generation=roster.generation + 1,
                        next_epoch=member.epoch + 1,
                        members={**roster.members, consumer: member},
                    )
                    self.rebalance(group, changed)
                    return member
                except BaseException:
                    if not group.version:  # the group was never written
                        self._registry.discard(group)
                    raise

    def pause(self, group: Group, is_paused: bool) -> None:
        """Pause or resume a group. Waiting fetches are woken."""
        with group.lock:
            group.check_exists()
            if group.roster.is_paused != is_paused:
                with GroupUpdate(self._context, group, ()) as update:
                    generation = group.roster.generation + 1
                    update.roster = replace(
                        group.roster, generation=generation, is_paused=is_paused
                    )
                    update.commit()
        self._context.wake(group.topic.number)

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
            if len(group.topic.generations) > 1:
                group.set_phases(self._context.durable.store.bounds(group.topic.number).shards)
            holders = {
                shard.number: shard.progress.owner
                for shard in group.live
                if group.phase_of(shard.number) is ShardPhase.ACTIVE
            }
            # A shard that is about to move keeps its target, or it would move twice.
            previous = {n: group.target.get(n, owner) for n, owner in holders.items()}
            target = assign_shards(members, previous, holders)
            self._move_shards(group, roster, target, leaving)
            # An ack may have drained a shard meanwhile, as may the dead letters of a dead member.
            group.target, group.needs_rebalance = target, group.has_reached_seal(group.seals)
            for gone in group.last_seen_s.keys() - members.keys():
                del group.last_seen_s[gone]
        self._context.wake(group.topic.number)

    def _move_shards(
        self, group: Group, roster: Roster | None, target: Mapping[int, str], leaving: str
    ) -> None:
        """Commit the roster, release shards of members that are gone, and assign unowned ones."""
        before = group.roster.members
        members = roster.members if roster else before
        # Shards to write: orphaned, revoked, unowned with a target, or not on disk yet.
        moving = [
            shard
            for shard in group.shards
            if _is_orphan(shard, members)
            or _is_revoked(group, shard)
            or (shard.progress.owner is None and (shard.number in target or not shard.version))
        ]
        has_running = any(shard.running for shard in moving)
        most = MAX_ORPHANS_PER_COMMIT if has_running else MAX_RECORDS_PER_COMMIT
        # Without a shard to move, one commit still writes the roster.
        for chunk in list(split_shards(moving, most)) or [[]]:
            with GroupUpdate(self._context, group, chunk) as update:
                if roster is not group.roster:
                    update.roster = roster
                self._release_orphans(update, members, before, leaving)
                for shard in chunk:
                    if _is_revoked(group, shard) and shard not in update.changed:
                        suspect_to = max(shard.progress.suspect_to, shard.handed_to or 0)
                        update.changed[shard] = shard_progress.release_owner(
                            shard, shard.progress, suspect_to
                        )
                    progress, name = update.progress(shard), target.get(shard.number)
                    if name is not None:
                        epoch = members[name].epoch
                        progress = shard_progress.assign_owner(progress, name, epoch)
                    update.changed[shard] = progress
                if update.changed or update.roster:
                    update.commit()
                for shard in chunk:
                    shard.reset_owner()

    def _release_orphans(
        self,
        update: GroupUpdate,
        members: Mapping[str, Member],
        before: Mapping[str, Member],
        leaving: str,
    ) -> None:
        """Release shards whose owner is gone; runs of a dead owner count as failed."""
        orphans = [shard for shard in update.shards if _is_orphan(shard, members)]
        topic, exhausted = update.group.topic, list[shard_progress.ExhaustedMessage]()
        bounds = self._context.durable.store.bounds(topic.number).shards if orphans else ()
        for shard in orphans:
            progress = shard.progress
            owner = progress.owner or ""
            if owner == leaving:
                update.changed[shard] = shard_progress.release_owner(
                    shard, progress, progress.suspect_to
                )
                continue
            # The dead owner's own limit decides which of its running messages are exhausted.
            most = before[owner].max_deliver if owner in before else DEFAULT_MAX_DELIVER
            outcome = shard_progress.release_dead_owner(shard, bounds[shard.number].end, most)
            update.changed[shard] = outcome.progress
            exhausted += outcome.exhausted
        if exhausted:
            append_dead_letters(self._context, update, exhausted)


def _remove_members(roster: Roster, names: set[str]) -> Roster:
    members = {name: member for name, member in roster.members.items() if name not in names}
    return replace(roster, generation=roster.generation + 1, members=members)


def _is_revoked(group: Group, shard: GroupShard) -> bool:
    """Return whether an owned shard must wait for its parents: a reset has moved them back."""
    is_owned = shard.progress.owner is not None
    return is_owned and group.phase_of(shard.number) is ShardPhase.WAITING


def _is_orphan(shard: GroupShard, members: Mapping[str, Member]) -> bool:
    """Return whether the owner is gone, or is a newer member of the same name."""
    if shard.progress.owner is None:
        return False
    member = members.get(shard.progress.owner)
    return member is None or member.epoch != shard.progress.member
