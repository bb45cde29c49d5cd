"""A group in memory, and changes to it that become one commit.

`GroupShard.progress` is the durable record. It is replaced after the commit is durable, so
readers need no lock. The other fields of a shard are observations since its owner got it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock, RLock
from typing import TYPE_CHECKING, Self

from polybus.errors import (
    Conflict,
    ConnectionLost,
    Damaged,
    Expired,
    Fenced,
    MalformedRequest,
    Trimmed,
    Unavailable,
)
from polybus.groups import group_records
from polybus.groups.ack_latency import CommitTimes
from polybus.groups.group_records import NEW, Member, Roster, ShardProgress
from polybus.groups.shard_phases import ShardPhase, find_phases
from polybus.model.commit import Append, Commit, CommitResult, RecordChange
from polybus.model.topic import ShardBounds, Topic

if TYPE_CHECKING:
    from polybus.durable.topic_registry import DurableTopics
    from polybus.groups.dead_letter_queue import DeadLetterTargets
    from polybus.groups.shard_ends import ShardEnds


@dataclass(frozen=True, slots=True)
class GroupContext:
    """The dependencies of the coordinator. `wake` takes the number of a topic with changes."""

    durable: DurableTopics
    ends: ShardEnds
    clock: Callable[[], float]
    wall_ns: Callable[[], int]
    wake: Callable[[int], None]
    dead_letters: DeadLetterTargets

    def commit_time_ns(self, topic: Topic, shard: int, offset: int) -> int | None:
        """Return the commit time of a message, or None if it was trimmed or is damaged."""
        try:
            rows = self.durable.store.read(topic.number, shard, offset, offset + 1, max_rows=1)
        except (Trimmed, Damaged):
            return None
        return int.from_bytes(rows.timestamps_ns[:8], "little") if rows.count else None


class GroupShard:
    def __init__(self, number: int, progress: ShardProgress = NEW, version: int = 0) -> None:
        self.number = number
        self.lock = Lock()
        self.progress = progress
        self.version = version  # of its record; 0: not written yet
        self.handed_to: int | None = None  # end of the offsets that the owner got; None: unknown
        self.running: tuple[int, ...] = ()  # offsets, by the owner's last heartbeat
        self.read_turn = 0  # `Group.turn` of the last read
        self.counted = progress.counted  # emitted and redelivered, as the owner reported
        self.commit_times = CommitTimes()

    def reset_owner(self) -> None:
        """Forget the observations of the last owner. The next one reads from the low mark."""
        self.handed_to, self.running, self.counted = self.progress.low, (), (0, 0)
        self.commit_times.discard_below()


class Group:
    def __init__(self, topic: Topic, name: str) -> None:
        self.topic = topic
        self.name = name
        self.lock = RLock()
        self.roster = Roster()
        self.version = 0
        self.shards: list[GroupShard] = [GroupShard(number) for number in topic.shards]
        # Of a resharded topic; `set_phases` replaces all three.
        self.phases: list[ShardPhase] = []  # by shard; empty: all are active
        self.seals: dict[int, int] = {}  # ends of sealed shards that are not drained
        self.live = self.shards  # without drained shards that have no owner
        self.target: dict[int, str] = {}  # the member that each shard is assigned to
        self.last_seen_s: dict[str, float] = {}  # by member
        self.turn = 0  # counts reads of shards
        self.needs_rebalance = False  # unowned shards wait for a member
        self.is_removed = False

    def member(self, consumer: str, epoch: int) -> Member:
        """Return the member.

        Raises `Fenced` if its name was taken over, `Expired` if it is no longer a member.
        """
        self.check_exists()
        member = self.roster.members.get(consumer)
        if member is None or member.epoch < epoch:
            raise Expired(f"{consumer!r} is no longer a member of group {self.name!r}; join again")
        if member.epoch > epoch:
            raise Fenced(f"a newer consumer {consumer!r} has joined group {self.name!r}")
        return member

    def check_exists(self) -> None:
        if self.is_removed:
            raise Expired(f"group {self.name!r} of topic {self.topic.name} was removed")

    def shard(self, number: int) -> GroupShard:
        if not 0 <= number < len(self.shards):
            raise MalformedRequest(f"topic {self.topic.name} has no shard {number}")
        return self.shards[number]

    def owned_shards(self, consumer: str, epoch: int) -> list[GroupShard]:
        return [
            shard
            for shard in self.live
            if shard.progress.owner == consumer and shard.progress.member == epoch
        ]

    def can_keep(self, shard: GroupShard, consumer: str) -> bool:
        """Return whether the shard is not drained, and no other member is assigned to it."""
        is_drained = self.phase_of(shard.number) is ShardPhase.DRAINED
        return not is_drained and self.target.get(shard.number, consumer) == consumer

    def phase_of(self, shard: int) -> ShardPhase:
        return self.phases[shard] if shard < len(self.phases) else ShardPhase.ACTIVE

    def set_phases(self, bounds: Sequence[ShardBounds]) -> None:
        """Find the phases of the shards of a resharded topic. The caller holds the lock."""
        lows = [shard.progress.low for shard in self.shards]
        self.phases = find_phases(self.topic, lows, bounds)
        sealed = range(self.topic.open_shards.start)
        self.seals = {
            number: bounds[number].end
            for number in sealed
            if self.phases[number] is not ShardPhase.DRAINED
        }
        self.live = [
            shard
            for shard in self.shards
            if shard.progress.owner is not None
            or self.phases[shard.number] is not ShardPhase.DRAINED
        ]

    def has_reached_seal(self, shards: Iterable[int]) -> bool:
        """Return whether one of these shards is drained since `set_phases`."""
        return any(
            self.is_at_seal(number, self.shards[number].progress.low)
            and self.phases[number] is ShardPhase.ACTIVE
            for number in shards
        )

    def is_at_seal(self, shard: int, low: int) -> bool:
        """Return whether this low-water mark is at the end of a sealed shard."""
        end = self.seals.get(shard)
        return end is not None and low >= end

    def add_generation(self, topic: Topic, shards: list[GroupShard]) -> None:
        """Add the shards of a reshard. The caller holds the lock and then rebalances."""
        # Waiting until then, so that no member can own one of them before its parents are drained.
        known = len(self.shards)
        self.phases = [self.phase_of(number) for number in range(known)]
        self.phases += [ShardPhase.WAITING] * len(shards)
        self.topic, self.shards = topic, [*self.shards, *shards]
        self.live = [*self.live, *shards]
        self.needs_rebalance = True


class GroupUpdate:
    """Changes to shards of a group that become one commit. It holds the locks of the shards."""

    def __init__(self, context: GroupContext, group: Group, shards: Iterable[GroupShard]) -> None:
        self._context = context
        self.group = group
        # Every update takes the locks in this order, so that no two wait for each other.
        self.shards = sorted(set(shards), key=attrgetter("number"))
        self.changed: dict[GroupShard, ShardProgress] = {}
        self.roster: Roster | None = None  # a changed one; the caller holds the group's lock
        self.appends: list[Append] = []

    def __enter__(self) -> Self:
        for shard in self.shards:
            shard.lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self.shards:
            shard.lock.release()

    def progress(self, shard: GroupShard) -> ShardProgress:
        """Return the progress with the changes of this update."""
        return self.changed.get(shard, shard.progress)

    def commit(self, stages: tuple[str, ...] = ()) -> CommitResult:
        """Commit and return when durable. Raises without any change in memory."""
        group, number = self.group, self.group.topic.number
        group.check_exists()
        # Each change expects the version it was made from: after another writer it is refused.
        changes = []
        if self.roster is not None:
            value = group_records.encode_roster(self.roster)
            key = group_records.roster_key(number, group.name)
            changes.append(RecordChange(key, value, group.version))
        for shard, progress in self.changed.items():
            value = group_records.encode_progress(progress)
            key = group_records.shard_key(number, group.name, shard.number)
            changes.append(RecordChange(key, value, shard.version))
        commit = Commit(tuple(self.appends), stages, tuple(changes))
        try:
            done = self._context.durable.publish(commit)
        except (Conflict, ConnectionLost) as error:
            self._reload()
            raise Unavailable(f"group {group.name!r}: {error}; retry") from None
        versions = iter(done.versions)  # in the order of the changes
        if self.roster is not None:
            group.roster, group.version = self.roster, next(versions)
        for shard, progress in self.changed.items():
            shard.progress, shard.version = progress, next(versions)
        return done

    def _reload(self) -> None:
        """Read the records again: they were changed elsewhere, or the outcome is unknown."""
        store, group = self._context.durable.store, self.group
        for shard in self.changed:
            key = group_records.shard_key(group.topic.number, group.name, shard.number)
            record = store.get(key)
            if record is not None:
                shard.progress = group_records.decode_progress(record.value)
                shard.version = record.version
        record = store.get(group_records.roster_key(group.topic.number, group.name))
        if record is not None:
            group.roster, group.version = group_records.decode_roster(record.value), record.version
