"""A file that may not grow: refused commits change nothing, and later commits work."""

from __future__ import annotations

import pytest

from polybus.errors import LimitReached, PolybusError, StoreFull
from polybus.model.commit import Commit, RecordChange
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.lmdb.write_batch import WriteBatch
from tests.rig.observer import until
from tests.unit.store.lmdb.store_helpers import TIMEOUT_S, elsewhere

PRELUDE = """
import json, resource, sys
from pathlib import Path
from polybus.errors import StoreFull
from polybus.model.commit import Append, Commit, RecordChange
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.testing.conformance.sample_blocks import block
from polybus.testing.conformance.kit import bodies, contents

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def commit(store, topic, body, counter):
    made = Commit((Append(topic.number, 0, block(body)),), changes=(RecordChange(b"k", body[:9]),),
                  stamp=Stamp("p", 1, counter))
    return store.commit(made).result(60)

def opened(**options):
    store = LmdbStore(sys.argv[1], **options)
    topic = store.create("t", 1, {})
    store.open_producer("p", ProducerOptions())
    commit(store, topic, b"first", 1)
    store.bounds(topic.number)
    return store, topic

def tight(store):
    limit((store._files.current.path / "data.mdb").stat().st_size)
"""

FSYNC = (
    PRELUDE
    + """
store, topic = opened()
before = contents(store)
tight(store)
stage = store.open_stage()
refused = 0
try:
    commit(store, topic, b"x" * (1 << 20), 2)
except StoreFull:
    refused += 1
try:
    store.stage(stage, [Append(topic.number, 0, block(b"y" * (1 << 20)))]).result(60)
except StoreFull:
    refused += 1
same = contents(store) == before
limit(-1)
again = commit(store, topic, b"second", 2)
store.commit(Commit(stages=(stage,))).result(60)
print(json.dumps([refused, same, again.duplicate, again.spans,
                  [body.decode() for body in bodies(store, topic)]]))
store.close()
"""
)

INTERVAL = (
    PRELUDE
    + """
store, topic = opened(durability="interval", commit_interval_ms=1)
tight(store)
answered = [commit(store, topic, b"x" * (1 << 20), 2).spans[0].first_id]
store.bounds(topic.number)  # waits for the attempt to write, which fails
visible = len(bodies(store, topic))
refused = False
try:
    commit(store, topic, b"third", 3)
except StoreFull:
    refused = True
limit(-1)
while True:
    try:
        answered.append(commit(store, topic, b"third", 3).spans[0].first_id)
        break
    except StoreFull:
        store.bounds(topic.number)
lengths = [len(body) for body in bodies(store, topic)]
store.close()
with LmdbStore(sys.argv[1], read_only=True) as reader:
    print(json.dumps([visible, refused, answered, lengths,
                      [len(body) for body in bodies(reader, topic)]]))
"""
)

LOST = (
    PRELUDE
    + """
from polybus.store.lmdb import interval_writer
interval_writer.LAST_TRIES = 1
store, topic = opened(durability="interval", commit_interval_ms=1)
tight(store)
commit(store, topic, b"x" * (1 << 20), 2)
try:
    store.close()
    said = "closed"
except StoreFull:
    said = "full"
limit(-1)
with LmdbStore(sys.argv[1]) as store:
    print(json.dumps([said, [body.decode() for body in bodies(store, topic)]]))
"""
)


def test_refused_commit_changes_nothing_and_can_be_repeated(tmp_path):
    refused, same, duplicate, spans, there = elsewhere(FSYNC, tmp_path)
    assert refused == 2
    assert same
    assert not duplicate
    assert spans == [[1, 0, 1, 2, 1]]
    assert there == ["first", "second"]


def test_interval_batch_is_kept_and_written_when_there_is_room(tmp_path):
    visible, refused, answered, lengths, after = elsewhere(INTERVAL, tmp_path)
    assert visible == 1
    assert refused
    assert answered == [2, 3]
    assert lengths == after == [5, 1 << 20, 5]


@pytest.mark.filterwarnings("default")
def test_close_raises_if_resolved_commits_are_lost(tmp_path):
    assert elsewhere(LOST, tmp_path) == ["full", ["first"]]


@pytest.mark.parametrize("failure", [StoreFull("no room"), LimitReached("max_x", "too many x")])
def test_interval_refusals_do_not_share_an_error(tmp_path, monkeypatch, failure: PolybusError):
    """A shared error would collect the frames of each caller that raises it."""

    def fail(_batch: WriteBatch) -> None:
        raise failure

    store = LmdbStore(tmp_path, durability="interval", commit_interval_ms=1)
    write = store._txn_writer.write
    monkeypatch.setattr(store._txn_writer, "write", fail)
    change = Commit(changes=(RecordChange(b"k", b"v"),))
    store.commit(change).result(TIMEOUT_S)
    until(lambda: store.commit(change).exception() is not None, "the write failed")
    errors = [store.commit(change).exception(TIMEOUT_S) for _ in range(2)]
    assert [(type(error), str(error)) for error in errors] == [(type(failure), str(failure))] * 2
    assert errors[0] is not errors[1]
    monkeypatch.setattr(store._txn_writer, "write", write)
    store.close()
