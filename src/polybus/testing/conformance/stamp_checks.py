"""Checks of stamps, by the table of `polybus.model.stamp`."""

from __future__ import annotations

from polybus.errors import Conflict, Fenced, OutOfSequence, Stale, UnknownProducer, UsageError
from polybus.model.commit import Commit, RecordChange
from polybus.model.stamp import (
    MAX_DIGEST_BYTES,
    MAX_KEPT_RESULTS,
    MAX_PRODUCER_BYTES,
    ProducerOptions,
    Stamp,
)
from polybus.testing.conformance.kit import (
    TIMEOUT_S,
    Clock,
    Engine,
    append,
    bodies,
    producer,
    put,
    refused,
    stage,
)


def check_each_open_raises_the_epoch(engine: Engine) -> None:
    with engine.fresh() as store:
        assert store.open_producer("p", ProducerOptions()) == (1, 0)
        put(store, stamp=Stamp("p", 1, 1))
        assert store.open_producer("p", ProducerOptions()) == (2, 1)
        assert store.open_producer("q", ProducerOptions()) == (1, 0)


def check_a_producer_can_be_looked_up(engine: Engine) -> None:
    with engine.fresh() as store:
        assert store.look_up_producer("p") is None
        assert store.open_producer("p", ProducerOptions(dense=False, kept_results=1)) == (1, 0)
        assert store.look_up_producer("p") == (1, 0)
        put(store, stamp=Stamp("p", 1, 7))
        assert store.look_up_producer("p") == (1, 7)
        assert store.look_up_producer("p") == (1, 7)
        store.close_producer("p", 1)
        assert store.look_up_producer("p") is None
        with refused(UsageError):
            store.look_up_producer("")


def check_repeated_stamp_returns_the_first_result(engine: Engine) -> None:
    clock = Clock(500)
    with engine.open(clock) as store:
        topic = store.create("t", 2, {})
        stamp = producer(store)(1, b"d")
        changes = [RecordChange(b"k", b"v")]
        first = put(store, append(topic, 1, b"a"), changes=changes, stamp=stamp, note=b"n")
        assert (first.duplicate, first.note, len(first.versions)) == (False, b"n", 1)
        clock.ns = 900
        again = put(store, append(topic, 1, b"a"), changes=changes, stamp=stamp, note=b"other")
        assert (again.spans, again.timestamp_ns) == (first.spans, 500)
        assert (again.versions, again.note, again.duplicate) == ((), b"n", True)
        assert bodies(store, topic, 1) == [b"a"]
        record = store.get(b"k")
        assert record is not None
        assert record.version == first.versions[0]


def check_repeat_is_recognised_by_its_digest_alone(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store)
        first = put(store, append(topic, 0, b"a"), stamp=stamp(1, b"x"))
        other = put(store, append(topic, 0, b"other", b"content"), stamp=stamp(1, b"x"))
        assert (other.spans, other.duplicate) == (first.spans, True)
        for digest in (b"y", b"", b"x\0"):
            with refused(Stale, store):
                put(store, append(topic, 0, b"a"), stamp=stamp(1, digest))
        assert bodies(store, topic) == [b"a"]


def check_repeat_is_recognised_after_other_changes(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        staged = stage(store, append(topic, 0, b"a"))
        stamp = producer(store)(1)
        changes = [RecordChange(b"k", b"v", 0)]
        commit = Commit((append(topic, 0, b"b"),), (staged,), tuple(changes), stamp)
        first = store.commit(commit).result(TIMEOUT_S)
        store.drop("t")
        again = store.commit(commit).result(TIMEOUT_S)
        assert (again.spans, again.duplicate) == (first.spans, True)


def check_concurrent_repeats_are_executed_once(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        commit = Commit((append(topic, 0, b"a"),), stamp=producer(store)(1))
        futures = [store.commit(commit) for _ in range(20)]
        results = [future.result(TIMEOUT_S) for future in futures]
        assert [result.duplicate for result in results] == [False] + [True] * 19
        assert len({result.spans for result in results}) == 1
        assert bodies(store, topic) == [b"a"]


def check_dense_counters_leave_no_gap(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store, dense=True)
        for counter in (2, 3, 1000):
            with refused(OutOfSequence, store):
                put(store, append(topic, 0, b"x"), stamp=stamp(counter))
        for counter in (1, 2):
            put(store, append(topic, 0, b"%d" % counter), stamp=stamp(counter))
        with refused(OutOfSequence, store):
            put(store, append(topic, 0, b"x"), stamp=stamp(4))
        assert bodies(store, topic) == [b"1", b"2"]


def check_other_counters_may_leave_gaps(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store, dense=False)
        for counter in (5, 6, (1 << 64) - 1):
            put(store, append(topic, 0, b"%d" % counter), stamp=stamp(counter))
        for counter in (1, 4, 7):
            with refused(Stale, store):
                put(store, append(topic, 0, b"x"), stamp=stamp(counter))
        assert put(store, stamp=stamp(5)).duplicate
        assert store.open_producer("p", ProducerOptions()).last_counter == (1 << 64) - 1


def check_only_the_last_results_are_kept(engine: Engine) -> None:
    with engine.fresh() as store:
        stamp = producer(store, dense=False, kept_results=3)
        for counter in (2, 4, 6, 8):
            put(store, stamp=stamp(counter))
        with refused(Stale):
            put(store, stamp=stamp(2))
        assert all(put(store, stamp=stamp(counter)).duplicate for counter in (4, 6, 8))
        put(store, stamp=stamp(9))
        with refused(Stale):
            put(store, stamp=stamp(4))


def check_open_replaces_producer_options(engine: Engine) -> None:
    with engine.fresh() as store:
        stamp = producer(store, dense=False, kept_results=3)
        for counter in (1, 2, 3):
            put(store, stamp=stamp(counter))
        stamp = producer(store, dense=True, kept_results=1)
        with refused(Stale):
            put(store, stamp=stamp(2))
        with refused(OutOfSequence):
            put(store, stamp=stamp(5))
        assert put(store, stamp=stamp(3)).duplicate
        assert not put(store, stamp=stamp(4)).duplicate
        with refused(Stale):
            put(store, stamp=stamp(3))


def check_other_epochs_are_fenced(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        old = producer(store)
        put(store, append(topic, 0, b"a"), stamp=old(1))
        new = producer(store)
        for stamp in (old(1), old(2), Stamp("p", 3, 2)):
            with refused(Fenced, store):
                put(store, append(topic, 0, b"x"), stamp=stamp)
        assert put(store, append(topic, 0, b"a"), stamp=new(1)).duplicate
        assert not put(store, append(topic, 0, b"b"), stamp=new(2)).duplicate
        assert bodies(store, topic) == [b"a", b"b"]


def check_producers_must_be_opened(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        producer(store)
        with refused(UnknownProducer, store):
            put(store, append(topic, 0, b"x"), stamp=Stamp("q", 1, 1))
        with refused(UnknownProducer):
            store.close_producer("q", 1)


def check_closed_producers_are_forgotten(engine: Engine) -> None:
    with engine.fresh() as store:
        stamp = producer(store)
        put(store, stamp=stamp(1))
        producer(store)
        for epoch in (1, 3):
            with refused(Fenced):
                store.close_producer("p", epoch)
        store.close_producer("p", 2)
        with refused(UnknownProducer):
            put(store, stamp=Stamp("p", 2, 2))
        assert store.open_producer("p", ProducerOptions()) == (1, 0)
        assert not put(store, stamp=Stamp("p", 1, 1)).duplicate


def check_refused_commit_consumes_no_stamp(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store)(1)
        with refused(Conflict, store):
            put(store, append(topic, 0, b"a"), changes=[RecordChange(b"k", b"", 9)], stamp=stamp)
        with refused(UsageError, store):
            put(store, append(topic, 7, b"a"), stamp=stamp)
        done = put(store, append(topic, 0, b"b"), stamp=stamp)
        assert not done.duplicate
        assert bodies(store, topic) == [b"b"]


def check_empty_commit_consumes_its_stamp(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store)(1)
        assert not put(store, stamp=stamp).duplicate
        again = put(store, append(topic, 0, b"x"), stamp=stamp)
        assert (again.spans, again.duplicate) == ((), True)
        assert bodies(store, topic) == []


def check_producers_are_independent(engine: Engine) -> None:
    with engine.fresh() as store:
        for name in ("p", "pp", "P", "ä"):
            assert store.open_producer(name, ProducerOptions()) == (1, 0)
            assert not put(store, stamp=Stamp(name, 1, 1)).duplicate


def check_stamps_outlive_topics(engine: Engine) -> None:
    with engine.fresh() as store:
        topic = store.create("t", 1, {})
        stamp = producer(store)
        first = put(store, append(topic, 0, b"a"), stamp=stamp(1))
        store.drop("t")
        topic = store.create("t", 1, {})
        assert put(store, append(topic, 0, b"a"), stamp=stamp(1)).spans == first.spans
        assert put(store, append(topic, 0, b"b"), stamp=stamp(2)).spans[0].first_id == 2


def check_stamps_have_limits(engine: Engine) -> None:
    with engine.fresh() as store:
        longest = "n" * MAX_PRODUCER_BYTES
        assert store.open_producer(longest, ProducerOptions(True, MAX_KEPT_RESULTS)).epoch == 1
        put(store, stamp=Stamp(longest, 1, 1, b"d" * MAX_DIGEST_BYTES))
        for name in ("", longest + "n", "\udc80"):
            with refused(UsageError):
                store.open_producer(name, ProducerOptions())
        for kept in (0, -1, MAX_KEPT_RESULTS + 1):
            with refused(UsageError):
                store.open_producer("p", ProducerOptions(True, kept))
        for epoch, counter, digest in ((0, 2, b""), (1, 0, b""), (1, -1, b""), (1, 1 << 64, b"")):
            with refused(UsageError):
                put(store, stamp=Stamp(longest, epoch, counter, digest))
        with refused(UsageError):
            put(store, stamp=Stamp(longest, 1, 2, b"d" * (MAX_DIGEST_BYTES + 1)))
