"""Shard ends from store notifications: never ahead of the store, never behind the notifications."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Event, Thread

import pytest

from polybus.errors import DoesNotExist
from polybus.groups.shard_ends import ShardEnds
from polybus.model.commit import Append, Commit
from polybus.store.contract import ShardEnd, Store
from polybus.store.engine_registry import open_store
from polybus.testing.conformance.sample_blocks import block


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory:") as opened:
        yield opened


def append(store: Store, topic: int, shard: int = 0) -> None:
    store.commit(Commit(appends=(Append(topic, shard, block(b"x")),))).result(10)


def test_ends_include_earlier_and_later_commits(store):
    topic = store.create("t", 2, {}).number
    append(store, topic)
    ends = ShardEnds(store)
    store.watch(ends.on_news)
    assert list(ends.get_ends(topic)) == [1, 0]
    append(store, topic, 1)
    assert list(ends.get_ends(topic)) == [1, 1]


def test_news_during_a_refresh_are_not_lost(store, monkeypatch):
    topic = store.create("t", 1, {}).number
    ends = ShardEnds(store)
    store.watch(ends.on_news)
    real, looks = store.bounds, []

    def bounds(number):
        current = real(number)
        if not looks:  # another thread appends right after the first read
            looks.append(number)
            append(store, topic)
        return current

    monkeypatch.setattr(store, "bounds", bounds)
    assert list(ends.get_ends(topic)) == [1]


def test_ends_are_read_while_another_thread_reads_them_first(store, monkeypatch):
    topic = store.create("t", 1, {}).number
    append(store, topic)
    ends = ShardEnds(store)
    # The state between the two steps of the other thread.
    monkeypatch.setattr(ends, "_ends", {topic: []})
    assert list(ends.get_ends(topic, [(0, 1)])) == [1]


def test_old_news_and_unknown_topics_are_ignored(store):
    topic = store.create("t", 1, {}).number
    ends = ShardEnds(store)
    append(store, topic)
    append(store, topic)
    assert list(ends.get_ends(topic)) == [2]
    ends.on_news([ShardEnd(topic, 0, 1), ShardEnd(topic, 5, 9), ShardEnd(topic + 1, 0, 9)])
    assert list(ends.get_ends(topic)) == [2]


def test_added_shards_are_known(store):
    topic = store.create("t", 1, {}).number
    ends = ShardEnds(store)
    assert list(ends.get_ends(topic)) == [0]
    store.configure("t", {}, add_shards=2)
    append(store, topic, 2)
    assert list(ends.refresh_ends(topic)) == [0, 0, 1]


def test_removed_topic_is_forgotten(store):
    topic = store.create("t", 1, {}).number
    ends = ShardEnds(store)
    ends.get_ends(topic)
    store.drop("t")
    ends.remove_topic(topic)
    with pytest.raises(DoesNotExist):
        ends.get_ends(topic)


def test_refreshes_on_other_threads_do_not_undo_news(store):
    topic = store.create("t", 1, {}).number
    ends = ShardEnds(store)
    ends.refresh_ends(topic)
    stopped, behind = Event(), 0

    def refresh() -> None:
        while not stopped.is_set():
            ends.refresh_ends(topic)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change in the middle of statements
    thread = Thread(target=refresh)
    thread.start()
    try:
        for end in range(1, 300_000):
            ends.on_news([ShardEnd(topic, 0, end)])
            behind += ends.get_ends(topic)[0] < end
    finally:
        sys.setswitchinterval(interval_s)
        stopped.set()
        thread.join()
    assert not behind
