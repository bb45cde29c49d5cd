"""All groups: find by topic and name, load on first use, create, remove.

Groups with members are loaded when the bus starts, because members that never return must
expire. `remove_dropped` removes the records of dropped topics later, so that dropping a topic
does not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Lock, RLock
from typing import Final

from polybus.bus.shares import ShareTable
from polybus.errors import Damaged, DoesNotExist
from polybus.groups import group_records
from polybus.groups.group_records import Roster, ShardProgress
from polybus.groups.group_state import Group, GroupContext, GroupShard, GroupUpdate
from polybus.model.commit import Commit, RecordChange, StoredRecord
from polybus.model.identity import Identity
from polybus.model.start_point import EARLIEST, LATEST
from polybus.model.topic import Topic

_log = logging.getLogger("polybus.groups")

STARTS: Final = (EARLIEST, LATEST)
MAX_RECORDS_PER_COMMIT: Final = 600  # the store takes 900

Key = tuple[int, str]  # a topic's number, and the group's name


class GroupRegistry:
    def __init__(self, context: GroupContext, shares: ShareTable) -> None:
        """`shares` counts the groups by their creators."""
        self._context = context
        self._shares = shares
        self._store = context.durable.store
        self._lock = RLock()
        self._known: dict[Key, str] = {}  # all groups, with their creators
        self._loaded: dict[Key, Group] = {}
        self.on_loaded: Callable[[], object] = lambda: None
        self._recovered = False
        self._dropping = Lock()  # guards only `_dropped`, because the event loop takes it
        self._dropped: list[int] = []

    def recover(self) -> None:
        """Find all groups and load those with members. Later calls do nothing."""
        with self._lock:
            if self._recovered:
                return
            for record in self._scan(group_records.ROSTERS):
                try:
                    self._recover_group(record)
                except Damaged as error:  # calls for this group will raise; others continue
                    _log.error("cannot load %r: %s", record.key, error)
            # A topic whose groups are all removed may have left a mark.
            for record in self._scan(group_records.MARKS):
                try:
                    self._find_topic(group_records.read_mark_key(record.key))
                except Damaged as error:
                    _log.error("cannot read a mark: %s", error)
            self._recovered = True

    def _recover_group(self, record: StoredRecord) -> None:
        number, name = group_records.read_roster_key(record.key)
        topic, creator = self._find_topic(number), ""
        try:
            roster = group_records.decode_roster(record.value)
            creator = roster.creator
            if topic is not None and roster.members:
                self._loaded[number, name] = self._load(topic, name)
        finally:  # a damaged group counts, too
            self._known[number, name] = creator
            self._shares.restore(creator)

    @property
    def has_loaded(self) -> bool:
        return bool(self._loaded)

    def loaded(self) -> list[Group]:
        self.recover()
        return [group for group in self._loaded.copy().values() if group.version]

    def names(self, topic: Topic) -> list[str]:
        self.recover()
        with self._lock:
            return sorted(name for number, name in self._known if number == topic.number)

    def names_by_topic(self) -> dict[int, list[str]]:
        self.recover()
        names: dict[int, list[str]] = {}
        with self._lock:
            for number, name in sorted(self._known):
                names.setdefault(number, []).append(name)
        return names

    def get(self, topic: Topic, name: str) -> Group:
        """Return the group. Raises `DoesNotExist` if there is none."""
        group = self.find(topic, name)
        if group is None or not group.version:
            raise DoesNotExist(f"topic {topic.name} has no group {name!r}")
        return group

    def find(self, topic: Topic, name: str) -> Group | None:
        key = topic.number, name
        group = self._loaded.get(key)
        if group is not None:
            return group
        self.recover()
        with self._lock:
            if key in self._known and key not in self._loaded:
                self._loaded[key] = self._load(topic, name)
                self.on_loaded()
            return self._loaded.get(key)

    def get_or_create(self, topic: Topic, name: str, start: str, creator: Identity) -> Group:
        """Return the group. A new one is written together with its first member."""
        group = self.find(topic, name)
        if group is not None:
            return group
        self._shares.take(creator)  # before the lock, because it may wait for the event loop
        account = creator.account_name
        try:
            with self._lock:
                key = topic.number, name
                if key not in self._loaded:
                    group = self._loaded[key] = self._new(topic, name, start, account)
                    self._known[key] = account
                    self.on_loaded()
                    return group
        except BaseException:
            self._shares.release(account)
            raise
        self._shares.release(account)  # another caller has created it meanwhile
        return self._loaded[key]

    def groups_of(self, topic: Topic) -> list[Group]:
        """Return all groups of a topic, except damaged ones."""
        groups = []
        for name in self.names(topic):
            with suppress(Damaged):  # the log names it
                groups.append(self.find(topic, name))
        return [group for group in groups if group is not None]

    def add_generation(self, topic: Topic) -> list[Group]:
        """Add the new shards of a resharded topic to its groups. Returns the groups."""
        bounds, mark = self._store.bounds(topic.number).shards, self._mark(topic.number)
        groups = self.groups_of(topic)
        for group in groups:
            with group.lock:
                # A group that was loaded or created since the reshard has them already.
                new = topic.shards[len(group.shards) :]
                if new:
                    group.add_generation(
                        topic,
                        [_new_shard(number, bounds[number].start, mark - 1) for number in new],
                    )
        return groups

    def discard(self, group: Group) -> None:
        """Forget a group that was removed or never written."""
        group.is_removed = True
        with self._lock:
            key = group.topic.number, group.name
            if self._loaded.get(key) is group:
                del self._loaded[key]
                self._forget(key)

    def remove(self, group: Group) -> None:
        """Remove a group and its records. The mark keeps its epochs from being used again."""
        number = group.topic.number
        with group.lock, GroupUpdate(self._context, group, group.shards):
            used = max(
                group.roster.next_epoch, *(shard.progress.epoch + 1 for shard in group.shards)
            )
            with self._lock:
                mark = max(used, self._mark(number))
                self._remove_records(number, group.name, mark)
            self.discard(group)
        self._context.wake(group.topic.number)

    # --- dropped topics

    def mark_topic_dropped(self, topic: Topic) -> None:
        """Mark the groups of a dropped topic as removed. `remove_dropped` removes their records."""
        with self._dropping:
            self._dropped.append(topic.number)
        for (number, _), group in self._loaded.copy().items():
            if number == topic.number:
                group.is_removed = True
        self._context.wake(topic.number)

    def remove_dropped(self) -> None:
        self.recover()
        with self._dropping:
            dropped, self._dropped = self._dropped, []
        try:
            while dropped:
                self._remove_topic(dropped[-1])
                dropped.pop()  # after the removal, which is repeated if it fails
        finally:
            with self._dropping:
                self._dropped += dropped

    def _remove_topic(self, number: int) -> None:
        """Remove all records of a topic, and its mark: topic numbers are never used again."""
        with self._lock:
            keys = [key for key in self._known if key[0] == number]
        for key in keys:
            group = self._loaded.get(key)
            if group is not None:
                # The locks wait for calls that still use the group.
                with GroupUpdate(self._context, group, group.shards):
                    self._remove_records(*key, None)
                self.discard(group)
            else:
                self._remove_records(*key, None)
                with self._lock:
                    self._forget(key)
        if self._store.get(group_records.mark_key(number)):
            self._store.commit(
                Commit(changes=(RecordChange(group_records.mark_key(number), None),))
            ).result()

    def _remove_records(self, number: int, name: str, mark: int | None) -> None:
        keys = [record.key for record in self._scan(group_records.shard_prefix(number, name))]
        # The mark comes first: if the bus stops half way, no epoch is used again. The roster
        # comes last: the remaining records can be found by it.
        changes = [
            RecordChange(group_records.mark_key(number), str(mark).encode() if mark else None)
        ]
        changes += [
            RecordChange(key, None) for key in (*keys, group_records.roster_key(number, name))
        ]
        for start in range(0, len(changes), MAX_RECORDS_PER_COMMIT):
            chunk = tuple(changes[start : start + MAX_RECORDS_PER_COMMIT])
            self._store.commit(Commit(changes=chunk)).result()

    # --- under the lock

    def _forget(self, key: Key) -> None:
        creator = self._known.pop(key, None)
        if creator is not None:
            self._shares.release(creator)

    def _find_topic(self, number: int) -> Topic | None:
        """Return the topic, or mark its number as dropped and return None."""
        topic = self._context.durable.find_by_number(number)
        if topic is None:
            with self._dropping:
                self._dropped.append(number)
        return topic

    def _load(self, topic: Topic, name: str) -> Group:
        topic = self._current(topic)
        record = self._store.get(group_records.roster_key(topic.number, name))
        group = Group(topic, name)
        if record is not None:
            group.roster, group.version = group_records.decode_roster(record.value), record.version
        bounds, mark = self._store.bounds(topic.number).shards, self._mark(topic.number)
        group.shards = group.live = [
            _new_shard(number, bounds[number].start, mark - 1) for number in topic.shards
        ]
        for record in self._scan(group_records.shard_prefix(topic.number, name)):
            number = group_records.read_shard_key(record.key)
            if number >= len(group.shards):
                raise Damaged(f"group {name!r} has a record of shard {number}, the topic has none")
            progress = group_records.decode_progress(record.value)
            group.shards[number] = GroupShard(number, progress, record.version)
        if len(topic.generations) > 1:
            group.set_phases(bounds)
        now = self._context.clock()
        # A new deadline for every member: the bus could not hear them while it was down.
        group.last_seen_s = dict.fromkeys(group.roster.members, now)
        group.needs_rebalance = True
        return group

    def _new(self, topic: Topic, name: str, start: str, creator: str) -> Group:
        topic = self._current(topic)
        group, mark = Group(topic, name), self._mark(topic.number)
        group.roster = Roster(next_epoch=mark, creator=creator)
        bounds = self._store.bounds(topic.number).shards
        positions = [each.start if start == EARLIEST else each.end for each in bounds]
        group.shards = group.live = [
            _new_shard(number, positions[number], mark - 1) for number in topic.shards
        ]
        return group

    def _current(self, topic: Topic) -> Topic:
        """Return the topic with all generations; the caller may hold an older one."""
        return self._context.durable.find_by_number(topic.number) or topic

    def _mark(self, number: int) -> int:
        record = self._store.get(group_records.mark_key(number))
        return group_records.decode_mark(record.value) if record else 1

    def _scan(self, prefix: bytes) -> Iterator[StoredRecord]:
        after = b""
        while page := self._store.scan(prefix, after):
            yield from page
            after = page[-1].key


def _new_shard(number: int, start: int, epoch: int) -> GroupShard:
    return GroupShard(number, ShardProgress(start=start, low=start, epoch=epoch))


def split_shards(shards: Iterable[GroupShard], most: int) -> Iterator[list[GroupShard]]:
    """Yield lists of at most `most` shards."""
    left = list(shards)
    for start in range(0, len(left), most):
        yield left[start : start + most]
