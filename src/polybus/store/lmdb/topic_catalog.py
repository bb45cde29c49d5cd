"""Topics: made, changed, trimmed, dropped; and what a name remembers of those it had.

A name's record outlives its topics: the highest offset that each shard of it ever
reached, and the next id. Dropping and trimming take effect at once and cost little;
the messages themselves go later, in small steps (`removal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from polybus.errors import AlreadyExists, DoesNotExist
from polybus.model.topic import Topic
from polybus.store import request_checks
from polybus.store.lmdb import store_keys, stored_values
from polybus.store.lmdb.state_cache import Shard, TopicState
from polybus.store.lmdb.stored_values import Name
from polybus.store.lmdb.writer_state import Books


def create(books: Books, name: str, shards: int, settings: Mapping[str, object]) -> Topic:
    raw = name.encode()
    before = books.known.name(raw)
    if before is not None and before.live:
        raise AlreadyExists(f"there is a topic {name!r}")
    topic = Topic(name, books.number("topic"), (shards,), settings)
    ends = before.ends if before else ()
    state = TopicState(topic, before.next_id if before else 1, 0, topic.open_shards)
    _remember(books, raw, Name(topic.number, True, state.next_id, ends))
    _open_shards(books, state, ends)
    return topic


def configure(books: Books, name: str, settings: Mapping[str, object], add_shards: int) -> Topic:
    raw = name.encode()
    state = _live(books, name)
    old = state.topic
    generations = (*old.generations, add_shards) if add_shards else old.generations
    state.topic = Topic(name, old.number, generations, settings)
    state.open = state.topic.open_shards
    if add_shards:
        found = books.known.name(raw)
        _open_shards(books, state, found.ends if found else ())
    else:
        _store(books, state)
    return state.topic


def drop(books: Books, name: str) -> None:
    state = _live(books, name)
    raw, number = name.encode(), state.topic.number
    before = books.known.name(raw)
    ends = [books.known.shard(state, shard).end for shard in state.topic.shards]
    floors = before.ends if before else ()
    highest = tuple(max(pair) for pair in zip_longest(ends, floors, fillvalue=0))
    _remember(books, raw, Name(number, False, state.next_id, highest))
    books.forget_topic(number)
    books.batch.altered.add(number)
    for target in [target for target in books.batch.ends if target[0] == number]:
        del books.batch.ends[target]
    books.batch.delete(store_keys.topic(number))
    books.batch.delete(store_keys.state(number))
    _remove_later(books, store_keys.dropped(number))


def trim(books: Books, topic: int, before: Mapping[int, int]) -> None:
    state = books.known.topic(topic)
    shards = {
        number: books.known.shard(state, number)
        for number in request_checks.trims(state.topic, before)
    }
    for number, offset in before.items():
        shard = shards[number]
        start = min(offset, shard.end)
        if start > shard.start:
            shard.start = start
            books.touch_shard(topic, number, shard)
            books.batch.altered.add(topic)
            _remove_later(books, store_keys.trimmed(topic, number))


def _live(books: Books, name: str) -> TopicState:
    found = books.known.name(name.encode())
    if found is None or not found.live:
        raise DoesNotExist(f"there is no topic {name!r}")
    return books.known.topic(found.number)


def _open_shards(books: Books, state: TopicState, ends: tuple[int, ...]) -> None:
    """The newest generation's shards begin, each where one of its number ended before."""
    number = state.topic.number
    for shard in state.open:
        first = ends[shard] if shard < len(ends) else 0
        state.shards[shard] = Shard(first, first, 0)
        books.touch_shard(number, shard, state.shards[shard])
    books.known.topics[number] = state
    books.touch(state)
    _store(books, state)


def _store(books: Books, state: TopicState) -> None:
    books.batch.altered.add(state.topic.number)
    revision = books.number("version")
    books.batch.put(
        store_keys.topic(state.topic.number), stored_values.topic(state.topic, revision)
    )


def _remember(books: Books, raw: bytes, name: Name) -> None:
    books.known.names[raw] = name
    books.batch.put(store_keys.name(raw), stored_values.name(name))


def _remove_later(books: Books, key: bytes) -> None:
    books.batch.put(key, b"")
    books.batch.cleaning = True
