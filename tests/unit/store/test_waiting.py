"""Waiting for messages, on any engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from polybus.errors import DoesNotExist, StoreClosed, UsageError
from polybus.store.contract import Listener, ShardEnd, Store
from polybus.store.memory.memory_store import MemoryStore
from polybus.store.waiting import wait
from polybus.testing.conformance.kit import append, put

LONG_S = 60.0


@pytest.fixture
def store() -> Iterator[Store]:
    with MemoryStore() as opened:
        yield opened


def test_what_is_there_is_told_at_once(store: Store) -> None:
    topic = store.create("t", 2, {})
    put(store, append(topic, 1, b"a", b"b"))
    number = topic.number
    assert wait(store, {(number, 1): 1, (number, 0): 0}, LONG_S) == [ShardEnd(number, 1, 2)]


def test_nothing_within_the_time(store: Store) -> None:
    topic = store.create("t", 1, {})
    put(store, append(topic, 0, b"a"))
    assert wait(store, {(topic.number, 0): 1}, 0.01) == []
    assert wait(store, {}, 0) == []


class Watched(MemoryStore):
    """Says when somebody watches, so that a test can act between that and the look."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then

    def watch(self, listener: Listener) -> Callable[[], None]:
        stop = super().watch(listener)
        self._then()
        return stop


def test_what_comes_while_waiting_is_told() -> None:
    watching = threading.Event()
    with Watched(watching.set) as store, ThreadPoolExecutor(1) as pool:
        topic, other = store.create("t", 1, {}), store.create("u", 1, {})
        found = pool.submit(wait, store, {(topic.number, 0): 1}, LONG_S)
        watching.wait(LONG_S)
        put(store, append(other, 0, b"x"))
        put(store, append(topic, 0, b"not enough"))
        put(store, append(topic, 0, b"enough"))
        assert found.result(LONG_S) == [ShardEnd(topic.number, 0, 2)]


def test_nothing_slips_between_the_look_and_the_wait() -> None:
    def commit() -> None:
        put(store, append(topic, 0, b"a"))

    with Watched(commit) as store:
        topic = store.create("t", 1, {})
        assert wait(store, {(topic.number, 0): 0}, LONG_S) == [ShardEnd(topic.number, 0, 1)]


def test_it_does_not_listen_on(store: Store) -> None:
    topic = store.create("t", 1, {})
    wait(store, {(topic.number, 0): 0}, 0)
    with pytest.raises(DoesNotExist):
        wait(store, {(topic.number + 1, 0): 0}, LONG_S)
    with pytest.raises(UsageError):
        wait(store, {(topic.number, 1): 0}, LONG_S)
    assert isinstance(store, MemoryStore)
    assert not store._space.listeners


def test_a_closed_store_is_not_waited_for(store: Store) -> None:
    store.close()
    with pytest.raises(StoreClosed):
        wait(store, {}, LONG_S)
