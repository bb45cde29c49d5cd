"""Two buses on one stream: a change is refused if the other bus was faster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from polybus.errors import AlreadyExists, Conflict, DoesNotExist, Fenced, StageGone, Trimmed
from polybus.model.commit import Commit, RecordChange
from polybus.model.stamp import ProducerEpoch, ProducerOptions, Stamp
from polybus.model.topic import ALL
from tests.spikes.jetstream import subjects
from tests.spikes.jetstream.engine import JetStreamSpike
from tests.spikes.jetstream.rig import TIMEOUT_S, append, assert_dense, bodies, put

ROUNDS = 15


def test_a_record_that_another_bus_changed_refuses_all_of_the_commit(one, other):
    topic = one.create("t", 2, {})
    version = one.commit(Commit(changes=(RecordChange(b"k", b"1", 0),))).result().versions[0]
    other.commit(Commit(changes=(RecordChange(b"k", b"2", version),))).result()
    both = (append(topic, 0, b"x"), append(topic, 1, b"y"))
    with pytest.raises(Conflict):
        one.commit(Commit(both, changes=(RecordChange(b"k", b"3", version),))).result()
    assert one.bounds(topic.number).next_id == 1
    assert bodies(one.read(topic.number, ALL, 1)) == []
    assert [record.value for record in other.scan(b"k")] == [b"2"]


def test_a_stale_epoch_is_fenced_though_another_bus_raised_it(one, other):
    topic = one.create("t", 1, {})
    assert one.open_producer("p", ProducerOptions()) == ProducerEpoch(1, 0)
    one.commit(Commit((append(topic, 0, b"1"),), stamp=Stamp("p", 1, 1))).result()
    assert other.open_producer("p", ProducerOptions()) == ProducerEpoch(2, 1)
    # `one` still caches epoch 1; the server's compare-and-set refuses the commit.
    with pytest.raises(Fenced):
        one.commit(Commit((append(topic, 0, b"late"),), stamp=Stamp("p", 1, 2))).result()
    assert one.batches.outrun == 1
    one.commit(Commit((append(topic, 0, b"2"),), stamp=Stamp("p", 2, 2))).result()
    assert bodies(other.read(topic.number, 0, 0)) == [b"1", b"2"]
    with pytest.raises(Fenced):
        other.close_producer("p", 1)


def test_a_repeated_stamp_gives_the_first_result_on_every_bus(one, other):
    topic = one.create("t", 1, {})
    one.open_producer("p", ProducerOptions())
    wanted = Commit((append(topic, 0, b"1"),), stamp=Stamp("p", 1, 1), note=b"n")
    first = one.commit(wanted).result()
    again = other.commit(wanted).result()
    assert (again.spans, again.timestamp_ns) == (first.spans, first.timestamp_ns)
    assert (again.note, again.duplicate) == (b"n", True)
    assert other.bounds(topic.number).next_id == 2


def test_ids_and_offsets_are_dense_with_two_buses_on_one_topic(one, other):
    topic = one.create("t", 2, {})

    def produce(engine: JetStreamSpike, name: bytes) -> None:
        for number in range(ROUNDS):
            put(engine, append(topic, 0, *[name] * (1 + number % 3)), append(topic, 1, name))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(produce, (one, other), (b"one", b"other")))
    assert_dense(one, topic)
    assert one.bounds(topic.number).shards[1].end == 2 * ROUNDS


def test_of_two_buses_that_publish_a_stage_one_does(one, other):
    topic = one.create("t", 1, {})

    def publish(engine: JetStreamSpike, stage: str) -> str:
        failed = engine.commit(Commit(stages=(stage,))).exception(TIMEOUT_S)
        return type(failed).__name__

    with ThreadPoolExecutor(2) as threads:
        for number in range(6):
            stage = one.open_stage()
            one.stage(stage, [append(topic, 0, b"once")]).result()
            ends = threads.map(publish, (one, other), (stage, stage))
            assert sorted(ends) == ["NoneType", "StageGone"]
            assert one.bounds(topic.number).next_id == 2 + number


def test_a_lease_runs_by_the_observers_clock_from_the_last_change_it_saw(one, server):
    now_s = 0.0
    topic = one.create("t", 1, {})
    with JetStreamSpike(server.url, clock_s=lambda: now_s) as observer:
        renewed, left = one.open_stage(10), one.open_stage(10)
        one.stage(left, [append(topic, 0, b"left")]).result()
        assert observer.collect() == []  # first seen now
        now_s = 9.0
        one.renew(renewed, 10)
        assert observer.collect() == []
        now_s = 11.0
        assert observer.collect() == [left]
    with pytest.raises(StageGone):
        one.commit(Commit(stages=(left,))).result()
    with pytest.raises(StageGone):
        one.renew(left)
    assert one.link.subjects(subjects.staged(left, "*", "*")) == []
    one.stage(renewed, [append(topic, 0, b"kept")]).result()
    one.commit(Commit(stages=(renewed,))).result()
    assert bodies(one.read(topic.number, 0, 0)) == [b"kept"]


def test_a_dropped_topic_refuses_appends_and_its_offsets_continue(one, other):
    old = one.create("t", 2, {})
    put(one, append(old, 1, b"a", b"b", b"c", b"d"))
    with pytest.raises(AlreadyExists):
        other.create("t", 2, {})
    other.drop("t")
    with pytest.raises(DoesNotExist):
        put(one, append(old, 1, b"lost"))
    new = one.create("t", 2, {})
    assert put(one, append(new, 1, b"new")).spans == ((new.number, 1, 4, 5, 1),)
    assert bodies(other.read(new.number, ALL, 0)) == [b"new"]


def test_trimming_moves_the_start_and_keeps_the_rest(one, other):
    topic = one.create("t", 2, {})
    for number in range(6):
        put(one, append(topic, number % 2, b"%d" % number, b"%d'" % number))
    other.trim(topic.number, {0: 3})
    with pytest.raises(Trimmed) as refused:
        one.read(topic.number, 0, 2)
    assert refused.value.start == 3
    assert bodies(one.read(topic.number, 0, 3)) == [b"2'", b"4", b"4'"]
    assert bodies(one.read(topic.number, ALL, 0))[:4] == [b"1", b"1'", b"2'", b"3"]
    assert one.bounds(topic.number).first_id == 3
    assert put(one, append(topic, 0, b"6")).spans[0].first_offset == 6


def test_a_reader_of_the_first_message_of_a_batch_sees_the_last(one, other):
    topic = one.create("t", 1, {})
    between = tuple(RecordChange(b"%03d" % number, b"", None) for number in range(300))
    for number in range(ROUNDS):
        done = one.commit(Commit((append(topic, 0, b"%d" % number),), changes=between))
        while not done.done():
            first = other.link.last(subjects.log(topic.number, 0))
            last = other.get(b"299")
            assert first is None or (last is not None and last.version > first.sequence)
    assert other.bounds(topic.number).next_id == 1 + ROUNDS
