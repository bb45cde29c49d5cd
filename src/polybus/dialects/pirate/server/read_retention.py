"""Collection: messages that everyone has read go, within a second.

Of a topic that keeps `read`, a message goes once every subscriber's LAST, as it is on
disk, has reached it, and every group is past it. A topic that nobody reads keeps all: a
message that nobody could read is not one that everyone has. What a group holds back is
read from its records, so a group is never further here than a crash would leave it.

Shards are trimmed by offsets, and LAST is an id. In a topic of one shard the two go in
step, so one look at the message behind the cut is enough to know it; in one of many
the cut of each shard is found by halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_context import Means, fault_of
from polybus.durable.topic_registry import KEEP, KEEP_READ, WITH_SUBSCRIBERS
from polybus.errors import DoesNotExist, PolybusError
from polybus.groups import group_records as groups

if TYPE_CHECKING:
    from polybus.dialects.pirate.server.subscribe_handler import Subscribing
    from polybus.dialects.pirate.server.subscription_table import Table
    from polybus.model.topic import Bounds, ShardBounds, Topic
    from polybus.store.contract import Store

EVERY_S: Final = 0.4
SHARES: Final = 8  # workers that trim side by side, so that they share what a sync costs


class Due(NamedTuple):
    """A topic to be looked at; `read` is the id that all subscribers have reached."""

    topic: Topic
    read: int | None


class Collecting:
    def __init__(self, means: Means, table: Table, subscribing: Subscribing) -> None:
        self._means = means
        self._table = table
        self._subscribing = subscribing
        self._next_s = 0.0
        self._under_way = 0
        self.collected = 0

    def tick(self, now_s: float) -> None:
        """Begins a round, if it is time for one and the last is over."""
        if self._under_way or now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        self._under_way = 1
        self._means.workers(lambda: _grouped(self._means.durable.store), self._looked)

    def _looked(self, future: Future[set[int]]) -> None:
        self._under_way = 0
        if fault_of(future) is not None:
            return
        grouped = future.result()
        moved, self._table.moved = self._table.moved, set()
        due = [found for number in moved | grouped if (found := self._due(number))]
        for start in range(min(SHARES, len(due))):
            self._begin(due[start::SHARES])

    def _due(self, number: int) -> Due | None:
        topic = self._means.durable.numbered(number)
        if topic is None or topic.settings.get(KEEP) != KEEP_READ:
            return None
        if not self._table.has(number):
            self._subscribing.remove_unused(topic)
        return Due(topic, self._table.read_by_all(number))

    def _begin(self, share: Sequence[Due]) -> None:
        self._under_way += 1
        store = self._means.durable.store
        self._means.workers(
            lambda: sum(_collect(store, one) for one in share),
            lambda future: self._ended(share, future),
        )

    def _ended(self, share: Sequence[Due], future: Future[int]) -> None:
        self._under_way -= 1
        error = fault_of(future)
        if error is None:
            self.collected += future.result()
        else:  # the next round looks at them again
            self._table.moved.update(one.topic.number for one in share)
            if not future.cancelled():
                self._means.log.warning("collection failed", reason=str(error))

    def begin_anew(self) -> None:
        """After a start: topics whose last subscriber left just before the end."""
        for topic in self._means.durable.topics():
            if topic.settings.get(WITH_SUBSCRIBERS):
                self._table.moved.add(topic.number)


# --- on a worker


def _grouped(store: Store) -> set[int]:
    """The numbers of all topics that groups read."""
    return {
        groups.read_roster_key(one.key)[0] for one in subscriber_records.scan(store, groups.ROSTERS)
    }


def _collect(store: Store, due: Due) -> int:
    """How many messages have gone."""
    try:
        bounds = store.bounds(due.topic.number)
        before = _cuts(store, due, bounds)
        if before:
            store.trim(due.topic.number, before)
    except DoesNotExist:  # since it was looked at
        return 0
    return sum(offset - bounds.shards[shard].start for shard, offset in before.items())


def _cuts(store: Store, due: Due, bounds: Bounds) -> dict[int, int]:
    """The first offset that stays, of each shard from which something goes."""
    held = list(_held_by_groups(store, due.topic, bounds))
    if due.read is None and not held:
        return {}
    if due.read is not None and due.read + 1 <= bounds.first_id:
        return {}
    cuts = {}
    for number, shard in enumerate(bounds.shards):
        if shard.start == shard.end:
            continue
        cut = min([_reached(store, due, bounds, number, shard), *(one[number] for one in held)])
        if cut > shard.start:
            cuts[number] = cut
    return cuts


def _held_by_groups(store: Store, topic: Topic, bounds: Bounds) -> list[dict[int, int]]:
    """Of each group: the first offset of each shard that it is not past."""
    found = []
    for roster in subscriber_records.scan(store, groups.roster_prefix(topic.number)):
        name = groups.read_roster_key(roster.key)[1]
        lows = {number: one.start for number, one in enumerate(bounds.shards)}
        for record in subscriber_records.scan(store, groups.shard_prefix(topic.number, name)):
            lows[int(record.key[-4:], 16)] = groups.decode_progress(record.value).low
        found.append(lows)
    return found


def _reached(store: Store, due: Due, bounds: Bounds, shard: int, at: ShardBounds) -> int:
    """The first offset of a shard whose message not every subscriber has read."""
    if due.read is None or due.read >= bounds.next_id - 1:
        return at.end
    if len(bounds.shards) == 1:
        guess = at.end - (bounds.next_id - 1 - due.read)
        if at.start <= guess < at.end and _id(store, due, shard, guess) == due.read + 1:
            return guess
    low, high = at.start, at.end  # what is before `low` is read, what is from `high` on is not
    while low < high:
        middle = (low + high) // 2
        if _id(store, due, shard, middle) <= due.read:
            low = middle + 1
        else:
            high = middle
    return low


def _id(store: Store, due: Due, shard: int, offset: int) -> int:
    rows = store.read(due.topic.number, shard, offset, offset + 1, max_rows=1, max_bytes=1)
    if not rows.count:
        raise PolybusError(f"topic {due.topic.name}: no message at offset {offset}")
    return int.from_bytes(rows.ids[:8], "little", signed=True)
