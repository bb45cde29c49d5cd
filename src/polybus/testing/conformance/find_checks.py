"""Checks of `find`: positions by time."""

from __future__ import annotations

from polybus.errors import DoesNotExist, UsageError
from polybus.model.topic import ALL, Topic
from polybus.store.contract import Store
from polybus.testing.conformance.kit import Clock, Engine, append, put, refused


def _filled(store: Store, clock: Clock) -> Topic:
    """Put two messages each at 100 (shard 0), 200 (1), 300 (0), 300 (0), 400 (1): ids 1…10."""
    topic = store.create("t", 2, {})
    for time_ns, shard in ((100, 0), (200, 1), (300, 0), (300, 0), (400, 1)):
        clock.ns = time_ns
        put(store, append(topic, shard, b"a", b"b"))
    return topic


def _found(store: Store, topic: Topic, time_ns: int) -> tuple[int, int, int]:
    number = topic.number
    return (
        store.find(number, 0, time_ns),
        store.find(number, 1, time_ns),
        store.find(number, ALL, time_ns),
    )


def check_find_returns_the_first_of_a_time_or_later(engine: Engine) -> None:
    clock = Clock()
    with engine.open(clock) as store:
        topic = _filled(store, clock)
        assert _found(store, topic, 100) == (0, 0, 1)
        assert _found(store, topic, 101) == (2, 0, 3)
        assert _found(store, topic, 200) == (2, 0, 3)
        assert _found(store, topic, 201) == (2, 2, 5)
        assert _found(store, topic, 300) == (2, 2, 5)
        assert _found(store, topic, 301) == (6, 2, 9)
        assert _found(store, topic, 400) == (6, 2, 9)


def check_find_before_the_first_and_after_the_last(engine: Engine) -> None:
    clock = Clock()
    with engine.open(clock) as store:
        topic = _filled(store, clock)
        for early in (-(1 << 62), -1, 0, 99):
            assert _found(store, topic, early) == (0, 0, 1)
        for late in (401, 1 << 62):
            assert _found(store, topic, late) == (6, 4, 11)


def check_find_in_an_empty_topic(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        assert _found(store, topic, 0) == (0, 0, 1)
        put(store, append(topic, 0, b"x"))
        assert _found(store, topic, 0) == (0, 0, 1)
        assert _found(store, topic, 1 << 62) == (1, 0, 2)


def check_find_ignores_trimmed_messages(engine: Engine) -> None:
    clock = Clock()
    with engine.open(clock) as store:
        topic = _filled(store, clock)
        store.trim(topic.number, {0: 3})
        assert _found(store, topic, 0) == (3, 0, 3)
        assert _found(store, topic, 300) == (3, 2, 6)
        store.trim(topic.number, {1: 3})
        assert _found(store, topic, 0) == (3, 3, 6)
        store.trim(topic.number, {0: 6, 1: 4})
        assert _found(store, topic, 0) == (6, 4, 11)


def check_positions_found_can_be_read(engine: Engine) -> None:
    clock = Clock()
    with engine.open(clock) as store:
        topic = _filled(store, clock)
        for shard in (0, 1, ALL):
            rows = store.read(topic.number, shard, store.find(topic.number, shard, 250))
            assert rows.count >= 1
            assert int.from_bytes(rows.timestamps_ns[:8], "little") >= 250


def check_find_with_a_clock_set_back(engine: Engine) -> None:
    clock = Clock(500)
    with engine.open(clock) as store:
        topic = store.create("t", 2, {})
        put(store, append(topic, 0, b"a"))
        clock.ns = 100
        put(store, append(topic, 1, b"b"))
        assert _found(store, topic, 101) == (0, 0, 1)
        assert _found(store, topic, 501) == (1, 1, 3)


def check_find_refuses_invalid_requests(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        for shard in (2, -1):
            with refused(UsageError):
                store.find(topic.number, shard, 0)
        for time_ns in (1 << 63, -(1 << 64)):
            with refused(UsageError):
                store.find(topic.number, 0, time_ns)
        with refused(DoesNotExist):
            store.find(topic.number + 1, 0, 0)


def check_find_id_returns_the_first_of_an_id_or_later(engine: Engine) -> None:
    clock = Clock()
    with engine.open(clock) as store:
        topic = _filled(store, clock)  # shard 0 has ids 1, 2, 5 to 8 and shard 1 has 3, 4, 9, 10
        offsets = [store.find_id(topic.number, 0, wanted) for wanted in range(12)]
        assert offsets == [0, 0, 1, 2, 2, 2, 3, 4, 5, 6, 6, 6]
        offsets = [store.find_id(topic.number, 1, wanted) for wanted in range(12)]
        assert offsets == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 4]


def check_find_id_ignores_trimmed_messages(engine: Engine) -> None:
    clock = Clock()
    with engine.open(clock) as store:
        topic = _filled(store, clock)
        store.trim(topic.number, {0: 3, 1: 4})
        for wanted in (-(1 << 62), 0, 1, 6):
            assert store.find_id(topic.number, 0, wanted) == 3
            assert store.find_id(topic.number, 1, wanted) == 4
        assert store.find_id(topic.number, 0, 1 << 62) == 6


def check_find_id_refuses_invalid_requests(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 2, {})
        for shard in (2, -1):
            with refused(UsageError):
                store.find_id(topic.number, shard, 1)
        with refused(UsageError):
            store.find_id(topic.number, 0, 1 << 64)
        with refused(DoesNotExist):
            store.find_id(topic.number + 1, 0, 1)
