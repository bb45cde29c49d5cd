"""The stored positions of all readers of a topic that hold back retention.

These are the consumer groups and the subscribers of dialects that store a position. The
positions are those on disk, so they are never ahead of the positions after a crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polybus.bus.dialect_registry import installed_dialects
from polybus.durable.retention import ReaderPosition
from polybus.groups import group_records

if TYPE_CHECKING:
    from polybus.model.commit import StoredRecord
    from polybus.model.offset_ranges import Ranges
    from polybus.model.topic import Bounds, Topic
    from polybus.store.contract import Store


def read_positions(store: Store, topic: Topic, bounds: Bounds) -> list[ReaderPosition]:
    """Return the position of each group, and of the subscriber that has read the least.

    Raises `Damaged` if a record cannot be read: then it is not known which messages are unread.
    """
    positions = read_group_positions(store, topic, bounds)
    subscribers = installed_dialects().read_subscribers(store, topic, bounds)
    if subscribers:
        # The others have read more, so they do not hold back any further message.
        slowest = min(subscribers, key=lambda subscriber: subscriber["last"])
        first_unread = {
            number: (store.find_id(topic.number, number, slowest["last"] + 1), ())
            for number in range(len(bounds.shards))
        }
        positions.append(ReaderPosition(f"subscriber {slowest['id']}", first_unread))
    return positions


def read_group_positions(store: Store, topic: Topic, bounds: Bounds) -> list[ReaderPosition]:
    """Return the position of each group. Raises `Damaged`."""
    positions = []
    for roster in _scan(store, group_records.roster_prefix(topic.number)):
        name = group_records.read_roster_key(roster.key)[1]
        # A group without a record of a shard has read nothing of it.
        shards: dict[int, tuple[int, Ranges]] = {
            number: (shard.start, ()) for number, shard in enumerate(bounds.shards)
        }
        for record in _scan(store, group_records.shard_prefix(topic.number, name)):
            progress = group_records.decode_progress(record.value)
            shards[group_records.read_shard_key(record.key)] = progress.low, progress.ranges
        positions.append(ReaderPosition(f"group {name}", shards))
    return positions


def _scan(store: Store, prefix: bytes) -> Iterator[StoredRecord]:
    after = b""
    while page := store.scan(prefix, after):
        yield from page
        after = page[-1].key
