"""A group as it is in memory, and changes to it that become one commit.

`Shard.progress` is what the record says, never ahead of the disk: it is replaced once
a commit is answered, so whoever only looks needs no lock. The other fields of a shard
are what the bus has seen since its owner got it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock, RLock
from types import TracebackType
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
from polybus.model.commit import Append, Commit, RecordChange

if TYPE_CHECKING:
    from polybus.durable.topic_registry import DurableTopics
    from polybus.groups.shard_ends import ShardEnds
    from polybus.model.commit import CommitResult
    from polybus.model.topic import Topic


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What the coordinator stands on. `wake` is called with a topic's number."""

    durable: DurableTopics
    ends: ShardEnds
    clock: Callable[[], float]
    wall_ns: Callable[[], int]
    wake: Callable[[int], None]
    dead_letters: Callable[[Topic], Topic]  # the topic for what is given up, made if need be

    def commit_time_ns(self, topic: Topic, shard: int, offset: int) -> int | None:
        """When a message was committed; None if that cannot be read any more."""
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
        self.version = version  # of its record; 0: it has none yet
        self.handed_to: int | None = None  # the owner has seen nothing from here on; None: unknown
        self.running: tuple[int, ...] = ()  # offsets, as the owner said last
        self.read_turn = 0  # of the group, when it was read last
        self.counted = progress.counted  # what the owner has said of its emitted and redelivered
        self.commit_times = CommitTimes()

    def add_counts(self, emitted: int, redelivered: int) -> None:
        self.counted = max(self.counted[0], emitted), max(self.counted[1], redelivered)

    def reset_owner(self, handed_to: int) -> None:
        self.handed_to, self.running, self.counted = handed_to, (), (0, 0)
        self.commit_times.discard_below()


class Group:
    def __init__(self, topic: Topic, name: str) -> None:
        self.topic = topic
        self.name = name
        self.lock = RLock()
        self.roster = Roster()
        self.version = 0
        self.shards: list[GroupShard] = [GroupShard(number) for number in topic.shards]
        self.target: dict[int, str] = {}  # whom each shard is for
        self.last_seen_s: dict[str, float] = {}  # when each member was heard of
        self.turn = 0  # counts reads of shards
        self.needs_rebalance = False  # shards wait to be given to somebody
        self.is_removed = False

    def member(self, consumer: str, epoch: int) -> Member:
        """`Fenced` if another has taken its name, `Expired` if it is no member."""
        self.check_exists()
        found = self.roster.members.get(consumer)
        if found is None or found.epoch < epoch:
            raise Expired(f"{consumer!r} is no member of group {self.name!r} any more: join again")
        if found.epoch > epoch:
            raise Fenced(f"a newer consumer {consumer!r} has joined group {self.name!r}")
        return found

    def check_exists(self) -> None:
        if self.is_removed:
            raise Expired(f"group {self.name!r} of topic {self.topic.name} was removed")

    def shard(self, number: int) -> GroupShard:
        if not 0 <= number < len(self.shards):
            raise MalformedRequest(f"topic {self.topic.name} has no shard {number}")
        return self.shards[number]

    def owned_shards(self, consumer: str, epoch: int) -> list[GroupShard]:
        return [one for one in self.shards if _is_of(one.progress, consumer, epoch)]

    def can_keep(self, shard: GroupShard, consumer: str) -> bool:
        """May the member keep it? It may as long as nothing else is known."""
        return self.target.get(shard.number, consumer) == consumer


def _is_of(progress: ShardProgress, consumer: str, epoch: int) -> bool:
    return progress.owner == consumer and progress.member == epoch


class GroupUpdate:
    """Changes to some shards of a group, under their locks, that become one commit."""

    def __init__(self, means: GroupContext, group: Group, shards: Iterable[GroupShard]) -> None:
        self._means = means
        self.group = group
        self.shards = sorted(set(shards), key=lambda one: one.number)
        self._changed: dict[int, ShardProgress] = {}
        self.roster: Roster | None = None  # a new one, if the caller holds the group's lock
        self.appends: list[Append] = []

    def __enter__(self) -> Self:
        for shard in self.shards:
            shard.lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for shard in self.shards:
            shard.lock.release()

    def progress(self, shard: GroupShard) -> ShardProgress:
        return self._changed.get(shard.number, shard.progress)

    def set_progress(self, shard: GroupShard, progress: ShardProgress) -> None:
        self._changed[shard.number] = progress

    @property
    def is_empty(self) -> bool:
        return not self._changed and self.roster is None

    def commit(self, stages: tuple[str, ...] = ()) -> CommitResult:
        """Returns once it is on disk; nothing is changed if it raises."""
        self.group.check_exists()
        commit = Commit(tuple(self.appends), stages, tuple(self._changes()))
        try:
            done = self._means.durable.commit(commit).result()
        except (Conflict, ConnectionLost) as error:
            self._reload()
            raise Unavailable(f"group {self.group.name!r}: {error}: try again") from None
        self._apply_versions(done.versions)
        return done

    def _changes(self) -> Iterable[RecordChange]:
        group, number = self.group, self.group.topic.number
        if self.roster is not None:
            value = group_records.encode_roster(self.roster)
            yield RecordChange(group_records.roster_key(number, group.name), value, group.version)
        for shard in self._touched():
            value = group_records.encode_progress(self._changed[shard.number])
            yield RecordChange(
                group_records.shard_key(number, group.name, shard.number), value, shard.version
            )

    def _touched(self) -> list[GroupShard]:
        return [one for one in self.shards if one.number in self._changed]

    def _apply_versions(self, versions: tuple[int, ...]) -> None:
        left = iter(versions)
        if self.roster is not None:
            self.group.roster, self.group.version = self.roster, next(left)
        for shard in self._touched():
            shard.progress, shard.version = self._changed[shard.number], next(left)

    def _reload(self) -> None:
        """Somebody else has changed the records, or it is not known what became of ours."""
        store, group = self._means.durable.store, self.group
        for shard in self._touched():
            key = group_records.shard_key(group.topic.number, group.name, shard.number)
            found = store.get(key)
            if found is not None:
                shard.progress = group_records.decode_progress(found.value)
                shard.version = found.version
        found = store.get(group_records.roster_key(group.topic.number, group.name))
        if found is not None:
            group.roster, group.version = group_records.decode_roster(found.value), found.version
