"""The checker of stores reports each kind of fault."""

from __future__ import annotations

import pytest

from polybus.model.commit import Append, Commit, RecordChange
from polybus.store.memory.memory_store import MemoryStore
from tests.rig.store.checker import Reported, check
from tests.rig.store.workload import PRODUCERS, RING, block_of, pieces, prepare, progress_keys, work


@pytest.fixture
def store():
    with MemoryStore() as store:
        prepare(store)
        yield store


@pytest.fixture
def worked(store):
    lines: list[str] = []
    work(store, {}, lines.append, 200)
    return lines


def acked(lines) -> dict[int, int]:
    return Reported.of(lines).acked


def append(store: MemoryStore, topic: str, *bodies: bytes, shard: int = 0) -> None:
    numbers = {topic.name: topic.number for topic in store.topics()}
    store.commit(Commit((Append(numbers[topic], shard, block_of(bodies)),))).result()


def test_honest_work_has_no_faults(store, worked):
    assert check(store, Reported.of(worked)) == []
    assert sum(acked(worked).values()) == 200
    assert Reported.of(worked).trimmed > 0


def test_work_goes_on_where_it_ended_and_repeats_are_known(store, worked):
    short = {number: max(0, counter - 2) for number, counter in acked(worked).items()}
    work(store, short, worked.append, 50)
    assert Reported.of(worked).duplicates > 0
    assert check(store, Reported.of(worked)) == []


def test_a_missing_commit_is_seen(store, worked):
    reported = Reported.of(worked)
    reported.acked[0] += 1
    assert check(store, reported)
    assert check(store, reported, strict=False) == []


def test_a_doubled_message_is_seen(store, worked):
    topic, shard, bodies = pieces(0, 1)[0]
    append(store, topic, bodies[0], shard=shard)
    assert check(store, Reported.of(worked))


def test_half_a_commit_is_seen(store, worked):
    changes = tuple(RecordChange(key, b"1000") for key in progress_keys(PRODUCERS - 1))
    store.commit(Commit(changes=changes)).result()
    assert check(store, Reported.of(worked), strict=False)


def test_records_that_disagree_are_seen(store, worked):
    store.commit(Commit(changes=(RecordChange(progress_keys(0)[0], b"0"),))).result()
    assert check(store, Reported.of(worked), strict=False)


def test_an_offset_that_was_not_answered_is_seen(store, worked):
    reported = Reported.of(worked)
    key = next(key for key, ((topic, _), _) in reported.places.items() if topic != RING)
    where, offset = reported.places[key]
    reported.places[key] = where, offset + 1000
    assert check(store, reported)


def test_a_ring_that_was_not_trimmed_is_seen(store, worked):
    reported = Reported.of(worked)
    reported.trimmed += 1000
    assert check(store, reported)


def test_a_ring_with_something_else_in_it_is_seen(store, worked):
    append(store, RING, b"1", b"2", b"3", b"4", b"5")
    assert check(store, Reported.of(worked))


def test_topics_that_are_gone_are_seen(store, worked):
    store.drop(RING)
    assert check(store, Reported.of(worked))
