"""The face of the groups: each verb for a topic that the caller was found to be allowed.

Every call may come from any thread, and blocks until what it answers is on disk. A
fetch, an ack and a heartbeat are signs of life; whoever gives none for as long as it
said itself is dropped by `tick`, which somebody calls a few times a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final

from polybus.errors import Expired, PolybusError, StoreClosed
from polybus.groups import group_info, group_reset
from polybus.groups.acks import AckCommitter
from polybus.groups.group_registry import EARLIEST, GroupRegistry
from polybus.groups.member_fetch import HeldPosition, MemberFetch
from polybus.groups.membership import Membership

if TYPE_CHECKING:
    from polybus.groups.group_records import Member
    from polybus.groups.group_state import Group, GroupContext
    from polybus.groups.shard_progress import ShardReport
    from polybus.model.commit import Append, CommitResult
    from polybus.model.topic import Topic

_log = logging.getLogger("polybus.groups")


class Coordinator:
    def __init__(
        self,
        means: GroupContext,
        max_groups: int = 1024,
        max_user_groups: int = 1024,
        max_members: int = 1024,
    ) -> None:
        self._means = means
        self._table = GroupRegistry(means, max_groups, max_user_groups)
        self._membership = Membership(means, self._table, max_members)
        self._acks = AckCommitter(means)

    # --- members

    def join(
        self,
        topic: Topic,
        group: str,
        consumer: str,
        asked: Member,
        start: str = EARLIEST,
        creator: str = "",
    ) -> Member:
        """A new group is charged to `creator`."""
        return self._membership.join(topic, group, consumer, asked, start, creator)

    def heartbeat(
        self,
        topic: Topic,
        group: str,
        consumer: str,
        epoch: int,
        running: Mapping[int, tuple[int, ...]],
    ) -> tuple[list[int], list[int]]:
        """The shards that it is to release, and all that are its own."""
        found, _ = self._member(topic, group, consumer, epoch)
        owned = found.owned_shards(consumer, epoch)
        for shard in owned:
            shard.running = running.get(shard.number, ())
        release = [one.number for one in owned if not found.can_keep(one, consumer)]
        return release, [one.number for one in owned]

    def leave(
        self, topic: Topic, group: str, consumer: str, epoch: int, entries: Sequence[ShardReport]
    ) -> list[dict[str, Any]]:
        found, member = self._member(topic, group, consumer, epoch)
        with found.lock:
            told = (
                self._acks.commit_entries(found, consumer, member.max_deliver, entries)
                if entries
                else []
            )
            self._membership.leave(found, consumer, epoch)
        return told

    # --- messages

    def open_fetch(
        self,
        topic: Topic,
        group: str,
        member: tuple[str, int],
        held: Mapping[int, HeldPosition],
        bounds: tuple[int, int],
        exact: bool = True,
    ) -> MemberFetch:
        """`member` is its name and epoch, `bounds` are rows and bytes."""
        found, _ = self._member(topic, group, *member)
        return MemberFetch(self._means, found, member, held, bounds, exact)

    def ack(
        self, topic: Topic, group: str, consumer: str, epoch: int, entries: Sequence[ShardReport]
    ) -> list[dict[str, Any]]:
        found, member = self._member(topic, group, consumer, epoch)
        if not any(entry.release for entry in entries):
            return self._acks.commit_entries(found, consumer, member.max_deliver, entries)
        with found.lock:
            told = self._acks.commit_entries(found, consumer, member.max_deliver, entries)
            if any(found.shards[one.shard].progress.owner is None for one in entries):
                found.needs_rebalance = True
                self._rebalance(found)
        self._means.wake(topic.number)
        return told

    def commit(
        self,
        topic: Topic,
        group: str,
        member: tuple[str, int],
        place: tuple[int, int, int, int],
        appends: Sequence[Append],
        stages: tuple[str, ...] = (),
    ) -> CommitResult | None:
        """`place` is the shard, its epoch, the offset, and the attempt; None: acked already."""
        found, _ = self._member(topic, group, *member)
        number, shard_epoch, offset, attempt = place
        owner = member[0], shard_epoch
        shard = found.shard(number)
        return self._acks.commit_transaction(
            found, shard, owner, (offset, attempt), appends, stages
        )

    # --- groups

    def names(self, topic: Topic) -> list[str]:
        return self._table.names(topic)

    def info(self, topic: Topic, group: str) -> dict[str, Any]:
        return group_info.describe_group(self._means, self._table.get(topic, group))

    def names_by_topic(self) -> dict[int, list[str]]:
        """The names of all groups, by their topics' numbers."""
        return self._table.names_by_topic()

    def summarize(self, topic: Topic, group: str) -> dict[str, Any] | None:
        """None if it has gone by now."""
        found = self._table.find(topic, group)
        return group_info.summarize_group(self._means, found) if found and found.version else None

    def reset(self, topic: Topic, group: str, to: Any, force: bool = False) -> dict[int, int]:
        return group_reset.reset(self._means, self._table.get(topic, group), to, force)

    def remove(self, topic: Topic, group: str, force: bool = False) -> None:
        found = self._table.get(topic, group)
        with found.lock:
            group_reset.check_has_no_members(found, force)
            self._table.remove(found)

    # --- time, and what goes away

    def drop(self, topic: Topic) -> None:
        """The topic has gone. Quick, and may be called on any thread."""
        self._means.ends.remove_topic(topic.number)
        self._table.mark_topic_dropped(topic)

    def tick(self) -> None:
        """Drops the dead, gives what waits to be given, removes what has gone."""
        self._table.remove_dropped()
        for group in self._table.loaded():
            try:
                dead = self._membership.expire(group)
            except StoreClosed:
                raise
            except PolybusError as error:  # the next tick tries again
                if not group.is_removed:
                    _log.warning("group %r of %s: %s", group.name, group.topic.name, error)
            else:
                for name in dead:
                    _log.warning(
                        "consumer %r of group %r, topic %s, gave no sign of life: dropped",
                        name,
                        group.name,
                        group.topic.name,
                    )

    def extend_deadlines(self, seconds: float) -> None:
        """The bus itself stood still for so long: nobody is blamed for that time."""
        for group in self._table.loaded():
            with group.lock:
                for name in list(group.last_seen_s):
                    group.last_seen_s[name] += seconds

    def stop(self) -> None:
        """The bus stops, and nobody can call any more: counts are exact from here on."""
        for group in self._table.loaded():
            try:
                self._acks.flush_counts(group)
            except PolybusError as error:
                _log.warning("group %r of %s: %s", group.name, group.topic.name, error)

    # --- inside

    def _member(self, topic: Topic, group: str, consumer: str, epoch: int) -> tuple[Group, Member]:
        found = self._table.find(topic, group)
        if found is None:
            raise Expired(f"topic {topic.name} has no group {group!r}: join again")
        member = found.member(consumer, epoch)
        found.last_seen_s[consumer] = self._means.clock()
        return found, member

    def _rebalance(self, group: Group) -> None:
        try:
            self._membership.rebalance(group)
        except PolybusError as error:  # the next tick does it
            _log.warning("group %r of %s: %s", group.name, group.topic.name, error)


_log = logging.getLogger("polybus.groups")

TICK_S: Final = 0.25  # a dead consumer is noticed that much later at most
LATE_S: Final = 1.0


class CoordinatorTimer:
    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="polybus-groups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a tick under way, which may need the one who calls."""
        self._stopped.set()

    def _run(self) -> None:
        last = self._clock()
        while not self._stopped.wait(TICK_S):
            now = self._clock()
            try:
                if now - last > TICK_S + LATE_S:
                    self._coordinator.extend_deadlines(now - last)
                self._coordinator.tick()
            except StoreClosed:
                return
            except Exception:
                _log.exception("the groups could not be looked after; tried again")
            last = now
