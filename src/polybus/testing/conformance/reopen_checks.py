"""Checks of reopening: a closed store keeps everything."""

from __future__ import annotations

from polybus.errors import DoesNotExist, Fenced, OutOfSequence, StageGone, Stale
from polybus.model.commit import Commit, RecordChange
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.store.contract import Store
from polybus.testing.conformance.kit import (
    Clock,
    Engine,
    all_bodies,
    append,
    bodies,
    contents,
    producer,
    put,
    refused,
    stage,
)


def _again(engine: Engine, store: Store) -> Store:
    assert engine.reopen is not None
    return engine.reopen(store)


def check_contents_survive_reopening(engine: Engine) -> None:
    store = engine.fresh()
    topic, other = store.create("t", 3, {"a": [1]}), store.create("ä", 1, {})
    for number in range(10):
        put(store, append(topic, number % 3, b"%d" % number), append(other, 0, b"x", b"y"))
    put(store, changes=[RecordChange(b"k", b"v"), RecordChange(b"\xff", b"")])
    topic = store.configure("t", {"b": 2}, add_shards=2)
    put(store, append(topic, 4, b"z"))
    store.trim(topic.number, {0: 2})
    before = contents(store)
    with _again(engine, store) as store:
        assert contents(store) == before
        assert put(store, append(topic, 4, b"new")).spans == ((topic.number, 4, 1, 12, 1),)
        assert all_bodies(store, topic)[-2:] == [b"z", b"new"]


def check_commits_in_flight_survive_reopening(engine: Engine) -> None:
    store = engine.fresh()
    topic = store.create("t", 1, {})
    names = [b"%d" % number for number in range(50)]
    for name in names:
        store.commit(Commit((append(topic, 0, name),)))
    with _again(engine, store) as store:
        assert bodies(store, topic) == names


def check_stamps_survive_reopening(engine: Engine) -> None:
    store = engine.fresh()
    topic = store.create("t", 1, {})
    stamp = producer(store, kept_results=2)
    results = [
        put(store, append(topic, 0, b"x"), stamp=stamp(counter, b"d"), note=b"%d" % counter)
        for counter in (1, 2, 3)
    ]
    with _again(engine, store) as store:
        for counter in (2, 3):
            again = put(store, append(topic, 0, b"x"), stamp=stamp(counter, b"d"))
            first = results[counter - 1]
            assert again.duplicate
            assert (again.spans, again.timestamp_ns) == (first.spans, first.timestamp_ns)
            assert again.note == b"%d" % counter
        with refused(Stale, store):
            put(store, append(topic, 0, b"x"), stamp=stamp(1, b"d"))
        with refused(Stale, store):
            put(store, append(topic, 0, b"x"), stamp=stamp(3, b"e"))
        with refused(OutOfSequence, store):
            put(store, append(topic, 0, b"x"), stamp=stamp(5))
        put(store, append(topic, 0, b"y"), stamp=stamp(4))
        assert store.open_producer("p", ProducerOptions()) == (2, 4)


def check_fences_survive_reopening(engine: Engine) -> None:
    store = engine.fresh()
    producer(store)
    producer(store)
    store.open_producer("closed", ProducerOptions())
    store.close_producer("closed", 1)
    with _again(engine, store) as store:
        with refused(Fenced):
            put(store, stamp=Stamp("p", 1, 1))
        assert store.open_producer("p", ProducerOptions()) == (3, 0)
        assert store.open_producer("closed", ProducerOptions()) == (1, 0)


def check_stages_survive_reopening(engine: Engine) -> None:
    store = engine.fresh()
    topic = store.create("t", 2, {})
    kept = stage(store, append(topic, 1, b"a"), append(topic, 0, b"b"))
    done, thrown = stage(store, append(topic, 0, b"c")), stage(store, append(topic, 0, b"d"))
    put(store, stages=[done])
    store.discard(thrown)
    with _again(engine, store) as store:
        assert all_bodies(store, topic) == [b"c"]
        for gone in (done, thrown):
            with refused(StageGone, store):
                put(store, stages=[gone])
        assert store.staged_topics([kept, done, thrown]) == {topic.number}
        store.renew(kept)
        put(store, stages=[kept])
        assert all_bodies(store, topic) == [b"c", b"b", b"a"]
    with _again(engine, store) as store:
        assert all_bodies(store, topic) == [b"c", b"b", b"a"]


def check_dropped_names_continue_after_reopening(engine: Engine) -> None:
    store = engine.fresh()
    topic = store.create("t", 2, {})
    put(store, append(topic, 1, b"a", b"b"))
    store.drop("t")
    with _again(engine, store) as store:
        assert store.topics() == []
        with refused(DoesNotExist):
            store.bounds(topic.number)
        again = store.create("t", 2, {})
        assert again.number != topic.number
        assert put(store, append(again, 1, b"c")).spans == ((again.number, 1, 2, 3, 1),)


def check_versions_are_not_reused_after_reopening(engine: Engine) -> None:
    store = engine.fresh()
    old = put(store, changes=[RecordChange(b"k", b"v")]).versions[0]
    put(store, changes=[RecordChange(b"k", None)])
    with _again(engine, store) as store:
        assert put(store, changes=[RecordChange(b"k", b"w")]).versions[0] != old


def check_time_does_not_decrease_after_reopening(engine: Engine) -> None:
    clock = Clock(10**18 * 4)
    store = engine.open(clock)
    topic = store.create("t", 1, {})
    put(store, append(topic, 0, b"a"))
    clock.ns = 5
    with _again(engine, store) as store:
        assert put(store, append(topic, 0, b"b")).timestamp_ns == 10**18 * 4
        assert store.find(topic.number, 0, 10**18 * 4) == 0
