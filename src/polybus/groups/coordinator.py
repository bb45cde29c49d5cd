"""The coordinator of consumer groups: one method per action on an authorized topic.

Any thread may call it. A call returns when its changes are durable. A fetch, an ack and a
heartbeat count as signs of life. `tick`, which a timer calls a few times per second, drops
members that gave none for as long as they declared at join.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event, Thread
from typing import Any, Final

from polybus.bus.shares import ShareTable
from polybus.errors import Conflict, Expired, PolybusError, StoreClosed
from polybus.groups import acks, group_info, group_reset
from polybus.groups.group_records import Member
from polybus.groups.group_registry import (
    MAX_RECORDS_PER_COMMIT,
    GroupRegistry,
    split_shards,
)
from polybus.groups.group_state import Group, GroupContext, GroupUpdate
from polybus.groups.member_fetch import HeldPosition, MemberFetch
from polybus.groups.membership import Membership
from polybus.groups.shard_phases import ShardPhase
from polybus.groups.shard_progress import ShardReport
from polybus.model.commit import Append, CommitResult
from polybus.model.draining import describe_draining
from polybus.model.identity import ANONYMOUS, Identity
from polybus.model.start_point import EARLIEST
from polybus.model.topic import Topic

_log = logging.getLogger("polybus.groups")

IDLE_TICK_S: Final = 1.0  # while no group is loaded; loading one ends the pause
TICK_S: Final = 0.25  # the maximum delay until a dead consumer is noticed
LATE_S: Final = 1.0  # a later tick means that the whole process was stopped


class Coordinator:
    def __init__(
        self,
        context: GroupContext,
        group_shares: ShareTable,
        max_members: int = 1024,
    ) -> None:
        self._context = context
        self._registry = GroupRegistry(context, group_shares)
        self._membership = Membership(context, self._registry, max_members)

    # --- members

    def join(
        self,
        topic: Topic,
        group: str,
        consumer: str,
        requested: Member,
        start: str = EARLIEST,
        creator: Identity = ANONYMOUS,
    ) -> Member:
        """Add a member and return it with its epoch. A new group counts against `creator`."""
        join = partial(self._membership.join, topic, group, consumer, requested, start, creator)
        if self._registry.find(topic, group) is not None:
            return join()
        # A new group reads the start of the log before it is stored: no trim may come between.
        with self._context.durable.trim_lock:
            return join()

    def heartbeat(
        self,
        topic: Topic,
        group: str,
        consumer: str,
        epoch: int,
        running: Mapping[int, tuple[int, ...]],
    ) -> tuple[list[int], list[int]]:
        """Record the running offsets. Returns the shards to release, and all owned shards."""
        state, _ = self._check_member(topic, group, consumer, epoch)
        owned = state.owned_shards(consumer, epoch)
        for shard in owned:
            shard.running = running.get(shard.number, ())
        release = [shard.number for shard in owned if not state.can_keep(shard, consumer)]
        return release, [shard.number for shard in owned]

    def leave(
        self, topic: Topic, group: str, consumer: str, epoch: int, reports: Sequence[ShardReport]
    ) -> list[dict[str, Any]]:
        """Commit the last acks of a member and remove it."""
        state, member = self._check_member(topic, group, consumer, epoch)
        with state.lock:
            responses = acks.commit_reports(
                self._context, state, consumer, member.max_deliver, reports
            )
            self._membership.leave(state, consumer, epoch)
        return responses

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
        """Open a fetch for `member` (name, epoch) with `bounds` (rows, bytes)."""
        state, _ = self._check_member(topic, group, *member)
        return MemberFetch(self._context, state, member, held, bounds, exact)

    def ack(
        self, topic: Topic, group: str, consumer: str, epoch: int, reports: Sequence[ShardReport]
    ) -> list[dict[str, Any]]:
        """Commit the reports of a member. Returns one response per report."""
        state, member = self._check_member(topic, group, consumer, epoch)
        arguments = self._context, state, consumer, member.max_deliver, reports
        if not any(report.release for report in reports):
            # Without the group's lock, so that members do not wait for each other's commits.
            responses = acks.commit_reports(*arguments)
            if state.has_reached_seal(report.shard for report in reports):
                self._rebalance(state)
            return responses
        with state.lock:
            responses = acks.commit_reports(*arguments)
            # A released shard without a live target must be assigned again.
            released = [state.shards[report.shard] for report in reports if report.release]
            if any(
                shard.progress.owner is None
                and state.phase_of(shard.number) is not ShardPhase.DRAINED
                for shard in released
            ) or state.has_reached_seal(report.shard for report in reports):
                self._rebalance(state)
        self._context.wake(topic.number)
        return responses

    def commit(
        self,
        topic: Topic,
        group: str,
        member: tuple[str, int],
        position: tuple[int, int, int, int],
        appends: Sequence[Append],
        stages: tuple[str, ...] = (),
    ) -> CommitResult | None:
        """Commit a transaction. Returns None if its message is acked already.

        `position` is the shard, its epoch, the offset, and the attempt.
        """
        state, _ = self._check_member(topic, group, *member)
        number, shard_epoch, offset, attempt = position
        owner, shard = (member[0], shard_epoch), state.shard(number)
        result = acks.commit_transaction(
            self._context, state, shard, owner, (offset, attempt), appends, stages
        )
        if state.has_reached_seal([number]):
            self._rebalance(state)
        return result

    # --- groups

    def names(self, topic: Topic) -> list[str]:
        return self._registry.names(topic)

    def info(self, topic: Topic, group: str) -> dict[str, Any]:
        return group_info.describe_group(self._context, self._registry.get(topic, group))

    def names_by_topic(self) -> dict[int, list[str]]:
        """Return the names of all groups by topic number."""
        return self._registry.names_by_topic()

    def summarize(self, topic: Topic, group: str) -> dict[str, Any] | None:
        """Return the totals of a group, or None if it was removed."""
        state = self._registry.find(topic, group)
        if state is None or not state.version:
            return None
        return group_info.summarize_group(self._context, state)

    def reset(self, topic: Topic, group: str, to: Any, force: bool = False) -> dict[int, int]:
        state = self._registry.get(topic, group)
        # It may move back: no trim may come between the new position and its commit.
        with self._context.durable.trim_lock, state.lock:
            positions = group_reset.reset(self._context, state, to, force)
            if state.phases:  # other shards may be active now
                self._rebalance(state)
        return positions

    def pause(self, topic: Topic, group: str, is_paused: bool) -> None:
        self._membership.pause(self._registry.get(topic, group), is_paused)

    def wake(self, topic: Topic) -> None:
        """Let waiting fetches of a topic look again, because its settings have changed."""
        self._context.wake(topic.number)

    def remove(self, topic: Topic, group: str, force: bool = False) -> None:
        state = self._registry.get(topic, group)
        with state.lock:
            group_reset.check_has_no_members(state, force)
            self._registry.remove(state)

    # --- reshards

    def check_drained(self, topic: Topic) -> None:
        """Raise `Conflict` if a group has not acked all messages of the sealed shards."""
        draining = self.draining(topic)
        if draining:
            raise Conflict(
                f"topic {topic.name} is still draining: {describe_draining(draining)};"
                " wait, or remove or reset these groups"
            )

    def draining(self, topic: Topic) -> dict[str, list[int]]:
        """Return the sealed shards that groups have not acked completely, by group."""
        draining: dict[str, list[int]] = {}
        if len(topic.generations) == 1:
            return draining
        bounds = self._context.durable.store.bounds(topic.number).shards
        for group in self._registry.groups_of(topic):
            left = [
                number
                for number in range(topic.open_shards.start)
                if number < len(group.shards)
                and max(group.shards[number].progress.low, bounds[number].start)
                < bounds[number].end
            ]
            if left:
                draining[group.name] = left
        return draining

    def add_generation(self, topic: Topic) -> None:
        """Add the new shards of a topic to its groups, which read them after their parents."""
        self._context.ends.refresh_ends(topic.number)
        for group in self._registry.add_generation(topic):
            if group.version:
                self._rebalance(group)

    # --- time, and dropped topics

    def drop(self, topic: Topic) -> None:
        """Forget a dropped topic. It is quick and may be called on any thread."""
        self._context.ends.remove_topic(topic.number)
        self._registry.mark_topic_dropped(topic)
        self._context.dead_letters.clear(topic)

    @property
    def has_groups(self) -> bool:
        return self._registry.has_loaded

    def on_group_loaded(self, listener: Callable[[], object]) -> None:
        """Call the listener after a group was loaded, on any thread."""
        self._registry.on_loaded = listener

    def tick(self) -> None:
        """Expire members, rebalance groups that need it, remove groups of dropped topics."""
        try:
            self._registry.remove_dropped()
        except StoreClosed:
            raise
        except PolybusError as error:  # a full disk; the next tick tries again
            _log.warning("records of dropped topics were not removed: %s", error)
        self._context.dead_letters.recheck(self._context.durable)
        for group in self._registry.loaded():
            try:
                topic = self._context.durable.find_by_number(group.topic.number)
                if topic is not None and len(topic.generations) > len(group.topic.generations):
                    self.add_generation(topic)  # the call that has resharded it failed half way
                dead = self._membership.expire(group)
            except StoreClosed:
                raise
            except PolybusError as error:  # the next tick tries again
                if not group.is_removed:
                    _log.warning("group %r of %s: %s", group.name, group.topic.name, error)
            else:
                for name in dead:
                    _log.warning(
                        "consumer %r of group %r, topic %s, sent no heartbeat; dropped",
                        name,
                        group.name,
                        group.topic.name,
                    )

    def extend_deadlines(self, seconds: float) -> None:
        """Extend the deadline of every member by the time that the bus itself was stopped."""
        for group in self._registry.loaded():
            with group.lock:
                for name in list(group.last_seen_s):
                    group.last_seen_s[name] += seconds

    def stop(self) -> None:
        """Write the counts of all groups. No other call may follow."""
        for group in self._registry.loaded():
            try:
                # Counts otherwise wait for the next ack.
                unwritten = [
                    shard for shard in group.shards if shard.counted != shard.progress.counted
                ]
                for chunk in split_shards(unwritten, MAX_RECORDS_PER_COMMIT):
                    with GroupUpdate(self._context, group, chunk) as update:
                        for shard in chunk:
                            update.changed[shard] = shard.progress._replace(counted=shard.counted)
                        update.commit()
            except PolybusError as error:
                _log.warning("group %r of %s: %s", group.name, group.topic.name, error)

    def _rebalance(self, group: Group) -> None:
        """Rebalance after a change of shards. If that fails, the next tick does it."""
        group.needs_rebalance = True
        try:
            self._membership.rebalance(group)
        except PolybusError as error:
            if not group.is_removed:
                _log.warning("group %r of %s: %s", group.name, group.topic.name, error)

    def _check_member(
        self, topic: Topic, group: str, consumer: str, epoch: int
    ) -> tuple[Group, Member]:
        """Return the group and the member, and record a sign of life.

        Raises `Expired` or `Fenced` if the consumer is not a member under this epoch.
        """
        state = self._registry.find(topic, group)
        if state is None:
            raise Expired(f"topic {topic.name} has no group {group!r}; join again")
        member = state.member(consumer, epoch)
        state.last_seen_s[consumer] = self._context.clock()
        return state, member


class CoordinatorTimer:
    """The thread that calls `tick`.

    A late tick means that the whole process was stopped and has received nothing meanwhile,
    so every member gets that time on top.
    """

    def __init__(self, coordinator: Coordinator, clock: Callable[[], float]) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._is_stopped = False
        self._wake = Event()  # set when a group is loaded and by `stop`
        coordinator.on_group_loaded(self._wake.set)
        self._thread = Thread(target=self._run, name="polybus-groups", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop without waiting for a running tick, which may need the calling thread."""
        self._is_stopped = True
        self._wake.set()

    def _run(self) -> None:
        last_s, pause_s = self._clock(), TICK_S
        while True:
            self._wake.wait(pause_s)
            self._wake.clear()
            if self._is_stopped:
                return
            now_s = self._clock()
            try:
                if now_s - last_s > pause_s + LATE_S:
                    self._coordinator.extend_deadlines(now_s - last_s)
                self._coordinator.tick()
            except StoreClosed:
                return
            except Exception:
                _log.exception("tick of the consumer groups failed; retrying")
            last_s, pause_s = now_s, TICK_S if self._coordinator.has_groups else IDLE_TICK_S
