"""All groups: found by topic and name, loaded when first asked for, made, removed.

Groups that have members are loaded when the bus starts, since somebody must notice
should they never come back. Records of topics that are not there any more are swept
away, by whoever calls `sweep`: dropping a topic must not wait for that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from threading import Lock, RLock
from typing import TYPE_CHECKING, Final

from polybus.errors import Damaged, DoesNotExist, LimitReached
from polybus.groups import group_records
from polybus.groups.group_records import Roster, ShardProgress
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.model.commit import Commit, RecordChange

if TYPE_CHECKING:
    from polybus.model.commit import StoredRecord
    from polybus.model.topic import Topic

_log = logging.getLogger("polybus.groups")

EARLIEST, LATEST = "earliest", "latest"
STARTS: Final = (EARLIEST, LATEST)
MAX_RECORDS_PER_COMMIT: Final = 600  # records changed by one commit: the store takes 900

Key = tuple[int, str]  # a topic's number, and the group's name


class GroupRegistry:
    def __init__(self, means: GroupContext, max_groups: int, max_user_groups: int) -> None:
        self._means = means
        self._max_groups = max_groups
        self._max_user_groups = max_user_groups
        self._store = means.durable.store
        self._lock = RLock()
        self._known: dict[Key, str] = {}  # all there are, and whom they are charged to
        self._loaded: dict[Key, Group] = {}
        self._recovered = False
        self._dropping = Lock()  # of the list below alone: the loop takes it
        self._dropped: list[int] = []

    def recover(self) -> None:
        """Finds all groups; those with members are in memory from then on. Once is enough."""
        with self._lock:
            if self._recovered:
                return
            for record in self._scan(group_records.ROSTERS):
                self._load_record(record)
            for record in self._scan(group_records.MARKS):
                self._find_topic(group_records.read_mark_key(record.key))
            self._recovered = True

    def loaded(self) -> list[Group]:
        self.recover()
        return [group for group in self._loaded.copy().values() if group.version]

    def names(self, topic: Topic) -> list[str]:
        self.recover()
        with self._lock:
            return sorted(name for number, name in self._known if number == topic.number)

    def names_by_topic(self) -> dict[int, list[str]]:
        self.recover()
        found: dict[int, list[str]] = {}
        with self._lock:
            for number, name in sorted(self._known):
                found.setdefault(number, []).append(name)
        return found

    def get(self, topic: Topic, name: str) -> Group:
        """`DoesNotExist` if there is no such group."""
        group = self.find(topic, name)
        if group is None or not group.version:
            raise DoesNotExist(f"topic {topic.name} has no group {name!r}")
        return group

    def find(self, topic: Topic, name: str) -> Group | None:
        key = topic.number, name
        found = self._loaded.get(key)
        if found is not None:
            return found
        self.recover()
        with self._lock:
            if key in self._known and key not in self._loaded:
                self._loaded[key] = self._load(topic, name)
            return self._loaded.get(key)

    def get_or_create(self, topic: Topic, name: str, start: str, creator: str) -> Group:
        """A new one is on disk once its first member is."""
        found = self.find(topic, name)
        if found is not None:
            return found
        with self._lock:
            key = topic.number, name
            if key not in self._loaded:
                self._check_quota(creator)
                self._loaded[key] = self._new(topic, name, start, creator)
                self._known[key] = creator
            return self._loaded[key]

    def discard(self, group: Group) -> None:
        """It was removed, or never came to be."""
        group.is_removed = True
        with self._lock:
            key = group.topic.number, group.name
            if self._loaded.get(key) is group:
                del self._loaded[key]
                self._known.pop(key, None)

    def remove(self, group: Group) -> None:
        """With its records, for good; that its epochs were used is remembered."""
        number = group.topic.number
        with group.lock, GroupUpdate(self._means, group, group.shards):
            used = max(group.roster.next_epoch, *(one.progress.epoch + 1 for one in group.shards))
            with self._lock:
                mark = max(used, self._mark(number))
                self._remove_records(number, group.name, mark)
            self.discard(group)
        self._means.wake(group.topic.number)

    # --- dropped topics

    def mark_topic_dropped(self, topic: Topic) -> None:
        """The topic has gone, and its groups with it. Quick: their records are for `sweep`."""
        with self._dropping:
            self._dropped.append(topic.number)
        for (number, _), group in self._loaded.copy().items():
            if number == topic.number:
                group.is_removed = True
        self._means.wake(topic.number)

    def remove_dropped(self) -> None:
        self.recover()
        with self._dropping:
            dropped, self._dropped = self._dropped, []
        try:
            while dropped:
                self._remove_topic(dropped[-1])
                dropped.pop()
        finally:
            with self._dropping:
                self._dropped += dropped

    def _remove_topic(self, number: int) -> None:
        """By numbers, which are never used for another topic: no mark is left."""
        with self._lock:
            keys = [key for key in self._known if key[0] == number]
        for key in keys:
            group = self._loaded.get(key)
            if group is not None:
                with GroupUpdate(
                    self._means, group, group.shards
                ):  # whoever is still at it has ended
                    self._remove_records(*key, None)
                self.discard(group)
            else:
                self._remove_records(*key, None)
                with self._lock:
                    self._known.pop(key, None)
        if self._store.get(group_records.mark_key(number)):
            self._store.commit(
                Commit(changes=(RecordChange(group_records.mark_key(number), None),))
            ).result()

    def _remove_records(self, number: int, name: str, mark: int | None) -> None:
        keys = [record.key for record in self._scan(group_records.shard_prefix(number, name))]
        # The mark first: should it end half way, no epoch is used again. The roster last:
        # what is left can be found by it.
        changes = [
            RecordChange(group_records.mark_key(number), str(mark).encode() if mark else None)
        ]
        changes += [
            RecordChange(key, None) for key in (*keys, group_records.roster_key(number, name))
        ]
        for start in range(0, len(changes), MAX_RECORDS_PER_COMMIT):
            some = tuple(changes[start : start + MAX_RECORDS_PER_COMMIT])
            self._store.commit(Commit(changes=some)).result()

    # --- under the lock

    def _check_quota(self, creator: str) -> None:
        if len(self._known) >= self._max_groups:
            text = f"there are {self._max_groups} groups already: remove some"
            raise LimitReached("max_groups", text)
        if sum(one == creator for one in self._known.values()) >= self._max_user_groups:
            text = f"{creator} has made {self._max_user_groups} groups already: remove some"
            raise LimitReached("max_user_groups", text)

    def _load_record(self, record: StoredRecord) -> None:
        number, name = group_records.read_roster_key(record.key)
        topic, self._known[number, name] = self._find_topic(number), ""
        try:
            roster = group_records.decode_roster(record.value)
            self._known[number, name] = roster.creator
            if topic is not None and roster.members:
                self._loaded[number, name] = self._load(topic, name)
        except Damaged:  # whoever asks for it is told; the others go on
            _log.exception("group %r of topic number %s", name, number)

    def _find_topic(self, number: int) -> Topic | None:
        """A topic; one that is not there any more is for `sweep`."""
        topic = self._means.durable.find_by_number(number)
        if topic is None:
            with self._dropping:
                self._dropped.append(number)
        return topic

    def _load(self, topic: Topic, name: str) -> Group:
        found = self._store.get(group_records.roster_key(topic.number, name))
        group = Group(topic, name)
        if found is not None:
            group.roster, group.version = group_records.decode_roster(found.value), found.version
        bounds, mark = self._store.bounds(topic.number).shards, self._mark(topic.number)
        group.shards = [_shard(number, bounds[number].start, mark - 1) for number in topic.shards]
        for record in self._scan(group_records.shard_prefix(topic.number, name)):
            number = int(record.key[-4:], 16)
            progress = group_records.decode_progress(record.value)
            group.shards[number] = GroupShard(number, progress, record.version)
        now = self._means.clock()
        group.last_seen_s = dict.fromkeys(group.roster.members, now)  # a new deadline for everybody
        group.needs_rebalance = True
        return group

    def _new(self, topic: Topic, name: str, start: str, creator: str) -> Group:
        group, mark = Group(topic, name), self._mark(topic.number)
        group.roster = Roster(next_epoch=mark, creator=creator)
        bounds = self._store.bounds(topic.number).shards
        ends = [one.start if start == EARLIEST else one.end for one in bounds]
        group.shards = [_shard(number, ends[number], mark - 1) for number in topic.shards]
        return group

    def _mark(self, number: int) -> int:
        found = self._store.get(group_records.mark_key(number))
        return int(found.value) if found else 1

    def _scan(self, prefix: bytes) -> Iterator[StoredRecord]:
        after = b""
        while page := self._store.scan(prefix, after):
            yield from page
            after = page[-1].key


def _shard(number: int, start: int, epoch: int) -> GroupShard:
    return GroupShard(number, ShardProgress(start=start, low=start, epoch=epoch))


def split_shards(shards: Iterable[GroupShard], most: int) -> Iterator[list[GroupShard]]:
    """Cut into lists of at most so many."""
    left = list(shards)
    for start in range(0, len(left), most):
        yield left[start : start + most]
