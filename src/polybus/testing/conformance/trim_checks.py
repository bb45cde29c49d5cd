"""Checks of `trim`: from the front, never back, never beyond the end."""

from __future__ import annotations

from polybus.errors import DoesNotExist, Trimmed, UsageError
from polybus.model.topic import ALL, Topic
from polybus.store.contract import Store
from polybus.testing.conformance.kit import (
    Engine,
    all_bodies,
    all_messages,
    append,
    bodies,
    put,
    refused,
)
from polybus.testing.conformance.sample_blocks import messages


def _filled(store: Store) -> Topic:
    """Put a b c, d e f into shard 0 (ids 1…3, 5…7) and x into shard 1 (id 4)."""
    topic = store.create("t", 2, {})
    put(store, append(topic, 0, b"a", b"b", b"c"), append(topic, 1, b"x"))
    put(store, append(topic, 0, b"d", b"e", b"f"))
    return topic


def check_trim_of_any_number_of_messages(engine: Engine) -> None:
    for before in range(7):
        with engine.fresh() as store:
            topic = _filled(store)
            store.trim(topic.number, {0: before})
            assert bodies(store, topic, 0) == [b"a", b"b", b"c", b"d", b"e", b"f"][before:]
            assert store.bounds(topic.number).shards[0][:2] == (before, 6)
            assert bodies(store, topic, 1) == [b"x"]


def check_trim_in_small_steps(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        for before in range(1, 7):
            store.trim(topic.number, {0: before})
            assert len(bodies(store, topic, 0)) == 6 - before


def check_trim_of_several_shards(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        store.trim(topic.number, {0: 4, 1: 1})
        assert all_bodies(store, topic) == [b"e", b"f"]
        store.trim(topic.number, {})
        assert all_bodies(store, topic) == [b"e", b"f"]


def check_read_of_trimmed_messages_is_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        store.trim(topic.number, {0: 4})
        for start, end in ((0, None), (3, None), (0, 2), (3, 4)):
            assert _trimmed_until(store, topic, start, end) == 4
        assert [one.body for one in messages(store.read(topic.number, 0, 4))] == [b"e", b"f"]
        assert store.read(topic.number, 0, 2, 2).count == 0


def _trimmed_until(store: Store, topic: Topic, start: int, end: int | None) -> int | None:
    try:
        store.read(topic.number, 0, start, end)
    except Trimmed as trimmed:
        return trimmed.start
    return None


def check_all_skips_trimmed_messages(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        store.trim(topic.number, {0: 4})
        found = [(message.id, message.body) for message in all_messages(store, topic)]
        assert found == [(4, b"x"), (6, b"e"), (7, b"f")]
        assert store.read(topic.number, ALL, 1, 4).count == 0
        assert messages(store.read(topic.number, ALL, 5, max_rows=1))[0].id == 6


def check_first_id_follows_the_trim(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        firsts = []
        for before in ({0: 2}, {0: 5}, {1: 1}, {0: 6}):
            store.trim(topic.number, before)
            bounds = store.bounds(topic.number)
            firsts.append(bounds.first_id)
            there = [message.id for message in all_messages(store, topic)]
            assert bounds.first_id <= min(there, default=bounds.next_id)
        assert firsts == sorted(firsts)
        assert firsts[-1] == 8


def check_trim_after_the_end_stops_at_the_end(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        store.trim(topic.number, {0: 1 << 62, 1: 2})
        bounds = store.bounds(topic.number)
        assert bounds.shards == ((6, 6, 0), (1, 1, 0))
        assert (bounds.first_id, bounds.next_id) == (8, 8)
        done = put(store, append(topic, 0, b"g"))
        assert done.spans == ((topic.number, 0, 6, 8, 1),)
        assert all_bodies(store, topic) == [b"g"]


def check_start_never_decreases(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        store.trim(topic.number, {0: 4})
        before = store.bounds(topic.number)
        for offset in (4, 3, 0):
            store.trim(topic.number, {0: offset})
            assert store.bounds(topic.number) == before
        assert bodies(store, topic, 0) == [b"e", b"f"]


def check_trim_of_unknown_shards_is_refused(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        for bad in ({0: 2, 2: 1}, {0: 2, -1: 1}, {0: 2, 1: -1}, {0: 2, 1: 1 << 63}):
            with refused(UsageError, store):
                store.trim(topic.number, bad)
        with refused(DoesNotExist, store):
            store.trim(topic.number + 1, {0: 1})


def check_trim_lowers_the_size(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        before = store.bounds(topic.number).shards[0].size_bytes
        store.trim(topic.number, {0: 3})
        assert 3 <= store.bounds(topic.number).shards[0].size_bytes <= before
        store.trim(topic.number, {0: 6})
        assert store.bounds(topic.number).shards[0].size_bytes == 0


def check_trim_keeps_the_newest_time(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _filled(store)
        before = store.bounds(topic.number).timestamp_ns
        store.trim(topic.number, {0: 6, 1: 1})
        assert store.bounds(topic.number).timestamp_ns == before > 0


BODY = bytes(100_000)  # a block of its own in every engine


def _with_large_blocks(store: Store) -> Topic:
    """Put six blocks of one message, in turn to two shards: ids 1, 3, 5 and 2, 4, 6."""
    topic = store.create("t", 2, {})
    for number in range(6):
        put(store, append(topic, number % 2, BODY))
    return topic


def _size(store: Store, topic: Topic) -> int:
    return sum(shard.size_bytes for shard in store.bounds(topic.number).shards)


def check_excess_is_the_oldest_blocks(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _with_large_blocks(store)
        block = _size(store, topic) // 6
        for kept, cuts in (
            (6, {}),
            (5, {0: 1}),
            (4, {0: 1, 1: 1}),
            (3, {0: 2, 1: 1}),
            (1, {0: 3, 1: 2}),
            (0, {0: 3, 1: 3}),
        ):
            assert store.find_excess(topic.number, kept * block, 100) == (cuts, False)
        # A block stays if the rest would be smaller than the size to keep.
        assert store.find_excess(topic.number, 4 * block + 1, 100) == ({0: 1}, False)


def check_excess_is_found_in_steps(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _with_large_blocks(store)
        block = _size(store, topic) // 6
        for _ in range(100):
            excess = store.find_excess(topic.number, 2 * block, 1)
            store.trim(topic.number, excess.before)
            if not excess.has_more:
                break
        assert [message.id for message in all_messages(store, topic)] == [5, 6]


def check_trimmed_blocks_are_no_excess(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _with_large_blocks(store)
        block = _size(store, topic) // 6
        store.trim(topic.number, {0: 2, 1: 1})
        # Three blocks are left, also if the engine removes the others later.
        assert store.find_excess(topic.number, 3 * block, 100) == ({}, False)
        assert store.find_excess(topic.number, 2 * block, 100) == ({1: 2}, False)


def check_excess_of_a_topic_without_messages(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = _with_large_blocks(store)
        store.trim(topic.number, {0: 3, 1: 3})
        assert store.find_excess(topic.number, 0, 100) == ({}, False)
        for keep_bytes, max_blocks in ((-1, 1), (1 << 63, 1), (0, 0)):
            with refused(UsageError):
                store.find_excess(topic.number, keep_bytes, max_blocks)
        with refused(DoesNotExist):
            store.find_excess(topic.number + 1, 0, 1)
