"""Topics: create, configure, trim and drop, and the records of their names.

The record of a name outlives its topics: it holds the highest offset that each shard ever
reached, and the next id. Dropping and trimming take effect at once and cost little; the
messages are removed later in small steps (`entry_removal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from polybus.errors import AlreadyExists, DoesNotExist
from polybus.model.topic import Topic
from polybus.store import request_checks
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.stored_values import NameRecord
from polybus.store.lmdb.writer_state import CachedShard, CachedTopic, WriterState


def create(writer: WriterState, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
    raw = name.encode()
    before = writer.cache.name(raw)
    if before is not None and before.is_live:
        raise AlreadyExists(f"topic {name!r} already exists")
    # A new number, so that positions in a dropped topic of this name never match this one.
    topic = Topic(name, writer.next_number("topic"), (shards,), settings)
    ends = before.ends if before else ()
    state = CachedTopic(topic, before.next_id if before else 1, 0, topic.open_shards)
    _put_name(writer, raw, NameRecord(topic.number, True, state.next_id, ends))
    _open_shards(writer, state, ends)
    return topic


def configure(
    writer: WriterState, name: str, settings: Mapping[str, object], add_shards: int
) -> Topic:
    raw = name.encode()
    state = _find_live(writer, name)
    old = state.topic
    # Only shards of the newest generation take appends, so a new generation seals the others.
    generations = request_checks.added_generation(old, add_shards)
    state.topic = Topic(name, old.number, generations, settings)
    state.open = state.topic.open_shards
    if add_shards:
        found = writer.cache.name(raw)
        _open_shards(writer, state, found.ends if found else ())
    else:
        _store(writer, state)
    return state.topic


def drop(writer: WriterState, name: str) -> None:
    state = _find_live(writer, name)
    raw, number = name.encode(), state.topic.number
    before = writer.cache.name(raw)
    ends = [writer.cache.shard(state, shard).end for shard in state.topic.shards]
    floors = before.ends if before else ()
    # A former topic of the name may have had more shards, or longer ones.
    highest = tuple(max(pair) for pair in zip_longest(ends, floors, fillvalue=0))
    _put_name(writer, raw, NameRecord(number, False, state.next_id, highest))
    writer.forget_topic(number)
    writer.batch.altered.add(number)
    # Commits of the same batch must not be reported: no listener can read a dropped topic.
    for target in [target for target in writer.batch.ends if target[0] == number]:
        del writer.batch.ends[target]
    writer.batch.delete(store_keys.topic(number))
    writer.batch.delete(store_keys.state(number))
    _schedule_removal(writer, store_keys.dropped(number))


def trim(writer: WriterState, topic: int, before: Mapping[int, int]) -> None:
    state = writer.cache.topic(topic)
    shards = {
        number: writer.cache.shard(state, number)
        for number in request_checks.trims(state.topic, before)
    }
    for number, offset in before.items():
        shard = shards[number]
        # An offset after the end trims all present messages, and none that are appended later.
        start = min(offset, shard.end)
        # A trim never moves the start back: the messages may be removed already.
        if start > shard.start:
            shard.start = start
            writer.mark_shard(topic, number, shard)
            writer.batch.altered.add(topic)
            _schedule_removal(writer, store_keys.trimmed(topic, number))


def _find_live(writer: WriterState, name: str) -> CachedTopic:
    found = writer.cache.name(name.encode())
    if found is None or not found.is_live:
        raise DoesNotExist(f"there is no topic {name!r}")
    return writer.cache.topic(found.number)


def _open_shards(writer: WriterState, state: CachedTopic, ends: tuple[int, ...]) -> None:
    """Open the shards of the newest generation, each at the end of its predecessor."""
    number = state.topic.number
    for shard in state.open:
        first = ends[shard] if shard < len(ends) else 0
        state.shards[shard] = CachedShard(first, first, 0)
        writer.mark_shard(number, shard, state.shards[shard])
    writer.cache.topics[number] = state
    writer.mark_topic(state)
    _store(writer, state)


def _store(writer: WriterState, state: CachedTopic) -> None:
    writer.batch.altered.add(state.topic.number)
    # Salvage takes the record with the highest revision, and versions only grow.
    revision = writer.next_number("version")
    writer.batch.put(
        store_keys.topic(state.topic.number), stored_values.encode_topic(state.topic, revision)
    )


def _put_name(writer: WriterState, raw: bytes, name: NameRecord) -> None:
    writer.cache.names[raw] = name
    writer.batch.put(store_keys.name(raw), stored_values.encode_name(name))


def _schedule_removal(writer: WriterState, key: bytes) -> None:
    writer.batch.put(key, b"")
    writer.batch.has_removals = True
