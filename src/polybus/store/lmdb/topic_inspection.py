"""Inspection of topics when a store is opened: which of them are damaged.

It reads the records of every topic, and the first and the last entry of every shard. Damage
within the log is found by the reads that meet it. A topic is damaged if

- its record or the record of its name is missing or cannot be decoded, or they disagree
- the states of the topic and of its shards are missing or are not possible
- a shard's first or last entry is missing, cannot be decoded, or does not match the states

A single value that was changed to another possible one is not noticed: only topics and
entries of the log have checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from polybus.errors import Damaged, StoreFault
from polybus.model import run_table
from polybus.model.topic import Topic
from polybus.store.contract import DamagedTopic
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.data_file import NEXT_STEPS
from polybus.store.lmdb.entry_cursor import EntryCursor
from polybus.store.lmdb.environment import Transaction
from polybus.store.lmdb.stored_values import NameRecord, StoreCounters
from polybus.store.lmdb.writer_state import scan_prefix

# A name whose record is damaged may have no number; each gets one that no topic has.
FIRST_UNKNOWN: Final = -1


def readable_topics(transaction: Transaction) -> Iterator[Topic]:
    """Yield the topics whose records can be decoded."""
    for key, raw in scan_prefix(transaction, store_keys.TOPICS):
        try:
            yield _read_topic(bytes(key), raw)
        except Damaged:
            continue


def inspect_topics(transaction: Transaction) -> list[DamagedTopic]:
    """Return all damaged topics. Raises `Damaged` if the store as a whole cannot be used."""
    catalog = Catalog(transaction)
    catalog.check_counters()
    found = list(catalog.damaged_topics())
    return sorted(found, key=lambda damaged: damaged.topic.name)


@dataclass
class Catalog:
    """The records of all topics and names."""

    transaction: Transaction
    topics: dict[int, Topic] = field(default_factory=dict)
    unreadable_topics: dict[int, str] = field(default_factory=dict)
    names: dict[str, NameRecord] = field(default_factory=dict)
    unreadable_names: dict[str, str] = field(default_factory=dict)
    highest_revision: int = 0

    def __post_init__(self) -> None:
        for key, raw in scan_prefix(self.transaction, store_keys.TOPICS):
            number = int.from_bytes(key[1:], "big")
            try:
                self.topics[number] = _read_topic(bytes(key), raw)
                self.highest_revision = max(self.highest_revision, stored_values.read_topic(raw)[1])
            except Damaged as error:
                self.unreadable_topics[number] = str(error)
        for key, raw in scan_prefix(self.transaction, store_keys.NAMES):
            name = bytes(key[1:]).decode("utf-8", "replace")
            try:
                self.names[name] = stored_values.read_name(raw)
            except Damaged as error:
                self.unreadable_names[name] = str(error)

    def check_counters(self) -> None:
        """Raise `Damaged` if the next number of a topic or a record may be in use already."""
        raw = self.transaction.get(store_keys.COUNTERS)
        try:
            counters = StoreCounters.decode(raw) if raw is not None else StoreCounters()
        except struct.error as error:
            raise Damaged(f"the counters of the store are damaged: {error}") from None
        # Numbers with an impossible key belong to damaged records, not to the counter.
        numbers = [number for number in self.topics if number <= store_keys.MAX_TOPIC]
        numbers += [record.number for record in self.names.values()]
        if numbers and (
            counters.topic <= max(numbers) or counters.version <= self.highest_revision
        ):
            raise Damaged(
                f"the counters of the store are damaged: the next topic must be above "
                f"{max(numbers)} and the next version above {self.highest_revision}, "
                f"got {counters.topic} and {counters.version}"
            )

    def damaged_topics(self) -> Iterator[DamagedTopic]:
        for topic in self.topics.values():
            try:
                self._check_name(topic)
                _check_states(self.transaction, topic)
            except StoreFault as error:
                yield _damaged(topic, str(error))
            except struct.error as error:
                yield _damaged(topic, f"a state has the wrong length: {error}")
        live = {record.number: name for name, record in self.names.items() if record.is_live}
        for number, reason in self.unreadable_topics.items():
            name = live.pop(number, f"damaged-{number}")
            yield _damaged(Topic(name, number), reason)
        for number, name in live.items():
            if number not in self.topics:
                yield _damaged(Topic(name, number), "its record is missing")
        known = {topic.name for topic in self.topics.values()}
        unknown = sorted(self.unreadable_names.keys() - known)
        for place, name in enumerate(unknown):
            number = FIRST_UNKNOWN - place
            yield _damaged(Topic(name, number), self.unreadable_names[name])

    def _check_name(self, topic: Topic) -> None:
        """Raise `Damaged` unless the record of its name leads to the topic."""
        if topic.name in self.unreadable_names:
            raise Damaged(self.unreadable_names[topic.name])
        record = self.names.get(topic.name)
        if record is None:
            raise Damaged("the record of its name is missing")
        if (record.number, record.is_live) != (topic.number, True):
            raise Damaged("the record of its name leads to another topic")


def _read_topic(key: bytes, raw: memoryview) -> Topic:
    topic = stored_values.read_topic(raw)[0]
    if key != store_keys.topic(topic.number):
        raise Damaged("the record of a topic is at the wrong position")
    return topic


def _check_states(transaction: Transaction, topic: Topic) -> None:
    """Raise `Damaged`, or an error of `struct`, unless states and log of a topic agree."""
    number = topic.number
    raw = transaction.get(store_keys.state(number))
    if raw is None:
        raise Damaged("its state is missing")
    next_id, time_ns = stored_values.TOPIC_STATE.unpack(raw)
    if next_id < 1 or time_ns < 0:
        raise Damaged(f"its state is impossible: next id {next_id}, time {time_ns}")
    for _, value in scan_prefix(transaction, store_keys.upkeep_of_topic(number)):
        stored_values.SHARD_UPKEEP.unpack(value)
    for shard in topic.shards:
        _check_shard(transaction, topic, shard, next_id)


def _check_shard(transaction: Transaction, topic: Topic, shard: int, next_id: int) -> None:
    raw = transaction.get(store_keys.shard_state(topic.number, shard))
    if raw is None:
        raise Damaged(f"the state of shard {shard} is missing")
    start, end, added = stored_values.SHARD_STATE.unpack(raw)
    if not 0 <= start <= end or added < 0:
        raise Damaged(f"the state of shard {shard} is impossible: {start} to {end}")
    if start == end:
        return
    with closing(EntryCursor(transaction, topic.number, shard, topic.name)) as cursor:
        entry = cursor.seek(start)
        if entry is None or entry.first > start:
            raise Damaged(f"shard {shard} has no entry for its first offset {start}")
        entry = cursor.seek(end - 1)
        if entry is None or entry.first > end - 1 or entry.end != end:
            raise Damaged(f"shard {shard} has no entry that ends at its end {end}")
        if run_table.id_at(entry.runs, entry.count - 1) >= next_id:
            raise Damaged(f"shard {shard} has ids up to the next id {next_id}")


def _damaged(topic: Topic, reason: str) -> DamagedTopic:
    where = "" if "topic '" in reason else f"topic {topic.name!r} is damaged: "
    return DamagedTopic(topic, f"{where}{reason}; {NEXT_STEPS}")
