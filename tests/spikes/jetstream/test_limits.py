"""The store's contract under the server's default limits."""

from __future__ import annotations

import pytest

from polybus.errors import TooLarge
from polybus.model.commit import MAX_KEY_BYTES, Commit, RecordChange
from polybus.model.topic import ALL
from tests.spikes.jetstream import subjects
from tests.spikes.jetstream.link import Outgoing, Oversized
from tests.spikes.jetstream.rig import append, assert_dense, bodies, put

BATCH = 1000
PLACES = 900


def test_a_batch_of_more_than_1000_is_refused_and_nothing_is_changed(one):
    messages = [Outgoing(subjects.record(b"%d" % number), b"") for number in range(BATCH + 1)]
    before = one.link.last_sequence()
    with pytest.raises(Oversized):
        one.link.batch("too-long", messages)
    assert one.link.last_sequence() == before
    assert one.link.batch("just-so", messages[:BATCH]) == before + BATCH


def test_a_commit_of_as_many_places_as_the_contract_allows_fits(one):
    changes = tuple(RecordChange(b"%d" % number, b"", 0) for number in range(PLACES))
    assert len(set(one.commit(Commit(changes=changes)).result().versions)) == PLACES


def test_appends_to_one_shard_are_one_message_however_many(one):
    topic = one.create("t", 1, {})
    before = one.link.last_sequence()
    put(one, *(append(topic, 0, b"%d" % number) for number in range(4096)))
    assert one.link.last_sequence() - before == 3  # the block, the tail, the diary
    assert one.bounds(topic.number).next_id == 4097


def test_stages_publish_more_than_fits_into_a_batch(one):
    topic, blocks = one.create("t", 1, {}), 12
    stage = one.open_stage()
    for number in range(blocks):  # 9 MB, nine times the limit of a message
        one.stage(stage, [append(topic, 0, b"%x" % number * 750_000)]).result()
    before = one.link.last_sequence()
    one.commit(Commit(stages=(stage,))).result()
    # The extent, the tail, the stage's head, the diary: however much was staged.
    assert one.link.last_sequence() - before == 4
    found = bodies(one.read(topic.number, ALL, 0))
    assert found == [b"%x" % number * 750_000 for number in range(blocks)]
    assert_dense(one, topic)


def test_stages_of_many_shards_are_published_by_a_message_a_shard_and_a_stage(one):
    topic, shards, stages = one.create("t", 16, {}), 16, [one.open_stage() for _ in range(12)]
    for stage in stages:
        one.stage(stage, [append(topic, shard, b"x") for shard in range(shards)]).result()
    before = one.link.last_sequence()
    one.commit(Commit((append(topic, 0, b"first"),), tuple(stages))).result()
    assert one.link.last_sequence() - before == shards + len(stages) + 2
    assert bodies(one.read(topic.number, 0, 0)) == [b"first", *[b"x"] * len(stages)]
    assert_dense(one, topic)


def test_a_message_larger_than_the_server_takes_is_refused(one):
    topic = one.create("t", 1, {})
    with pytest.raises(TooLarge):
        put(one, append(topic, 0, b"x" * (1 << 20)))
    assert put(one, append(topic, 0, b"y")).spans[0].first_id == 1


def test_the_longest_key_fits_into_a_subject(one):
    key = (bytes(range(256)) * 2)[:MAX_KEY_BYTES]
    assert one.commit(Commit(changes=(RecordChange(key, b"far", 0),))).result().versions[0] > 0
    assert [(found.key, found.value) for found in one.scan(key[:300])] == [(key, b"far")]
