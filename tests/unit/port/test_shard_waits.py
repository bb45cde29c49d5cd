"""Waits for new messages, on the memory engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest

from polybus.bus.shares import unshared_table
from polybus.errors import Denied, DoesNotExist, LimitReached, StoreClosed
from polybus.groups.shard_ends import ShardEnds
from polybus.model.commit import Append, Commit
from polybus.model.identity import ANONYMOUS
from polybus.native.port import shard_waits as module
from polybus.native.port.port_shares import MAX_TOTAL_POSITIONS
from polybus.native.port.shard_waits import ShardWaits
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.testing.conformance.sample_blocks import block
from tests.rig.call_count import count_calls
from tests.rig.observer import until

LONG_S = 30.0


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory:") as opened:
        yield opened


@pytest.fixture
def ends(store) -> ShardEnds:
    return ShardEnds(store)


@pytest.fixture
def waits(store, ends) -> Iterator[ShardWaits]:
    made = ShardWaits(
        store,
        unshared_table("max_waits", 2),
        unshared_table("wait_positions", MAX_TOTAL_POSITIONS),
        time.monotonic,
        ends,
    )
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def append(store: Store, topic: int, shard: int = 0) -> None:
    store.commit(Commit(appends=(Append(topic, shard, block(b"x")),))).result(10)


def begin(
    pool, waits: ShardWaits, wanted, timeout_s: float = LONG_S, is_gone=lambda: False
) -> Future:
    count = waits.count
    future = pool.submit(waits.wait, wanted, timeout_s, is_gone)
    until(lambda: waits.count > count or future.done(), "it waits")
    return future


def test_existing_messages_end_the_wait_at_once(store, waits):
    topic = store.create("t", 2, {}).number
    append(store, topic, 1)
    assert waits.wait({(topic, 0): 0, (topic, 1): 0}, LONG_S) == {(topic, 1): 1}
    assert waits.count == 0


def test_append_wakes_only_waits_for_its_shard(store, waits, pool):
    topic = store.create("t", 2, {}).number
    hit = begin(pool, waits, {(topic, 0): 0})
    missed = begin(pool, waits, {(topic, 1): 0})
    append(store, topic, 0)
    assert hit.result(10) == {(topic, 0): 1}
    assert not missed.done()
    append(store, topic, 1)
    assert missed.result(10) == {(topic, 1): 1}


def test_news_between_two_wakes_are_all_returned(store, waits, pool):
    topic = store.create("t", 3, {}).number
    is_blocked, checks = Event(), []

    def check_access() -> None:
        checks.append(1)
        if len(checks) == 2:
            is_blocked.wait(10)

    found = pool.submit(
        waits.wait, {(topic, shard): 0 for shard in range(3)}, LONG_S, check_access=check_access
    )
    until(lambda: len(checks) == 1 and waits.count == 1, "it sleeps")
    waits.wake(topic, 2)
    until(lambda: len(checks) == 2, "it has woken")
    append(store, topic, 0)
    append(store, topic, 1)
    is_blocked.set()
    assert found.result(10) == {(topic, 0): 1, (topic, 1): 1}


def test_cost_of_a_wake_does_not_grow_with_the_shards_of_the_wait(store, waits, pool):
    def calls_of_wakes(shards: int, wakes: int) -> int:
        topic = store.create(f"t{shards}.{wakes}", shards, {}).number
        checks: list[int] = []
        wanted = {(topic, shard): 0 for shard in range(shards)}
        wait = partial(waits.wait, wanted, LONG_S, check_access=lambda: checks.append(1))
        calls = pool.submit(count_calls, wait)
        while len(checks) <= wakes:
            known = len(checks)
            waits.wake(topic, 1)
            until(lambda: len(checks) > known, "it has woken")  # noqa: B023 -- called at once
        append(store, topic, 0)
        return calls.result(10)

    few = calls_of_wakes(10, 11) - calls_of_wakes(10, 1)
    many = calls_of_wakes(500, 11) - calls_of_wakes(500, 1)
    assert many - few < 1000


def test_wait_ends_at_its_timeout(store, waits):
    topic = store.create("t", 1, {}).number
    assert waits.wait({(topic, 0): 0}, 0) == {}
    assert waits.wait({(topic, 0): 0}, 0.01) == {}
    assert waits.count == 0


def test_number_of_waits_is_limited(store, waits, pool):
    topic = store.create("t", 1, {}).number
    both = [begin(pool, waits, {(topic, 0): 0}) for _ in range(2)]
    for refused in (
        lambda: waits.check_room(ANONYMOUS),
        lambda: waits.wait({(topic, 0): 0}, LONG_S),
    ):
        with pytest.raises(LimitReached) as caught:
            refused()
        assert caught.value.limit == "max_waits"
    append(store, topic)
    assert [one.result(10) for one in both] == [{(topic, 0): 1}] * 2
    assert waits.wait({(topic, 0): 0}, LONG_S) == {(topic, 0): 1}


def test_positions_of_all_waits_are_limited(store, waits):
    topic = store.create("t", 3, {}).number
    waits._position_shares.total = 2
    with pytest.raises(LimitReached):
        waits.wait(dict.fromkeys([(topic, shard) for shard in range(3)], 0), LONG_S)
    for _ in range(2):  # a wait that has ended frees its positions
        assert waits.wait({(topic, 0): 0, (topic, 1): 0}, 0) == {}


def test_wait_of_a_disconnected_client_ends(store, waits, pool, monkeypatch):
    monkeypatch.setattr(module, "CALLER_CHECK_INTERVAL_S", 0.01)
    topic = store.create("t", 1, {}).number
    gone: list[bool] = []
    waiting = begin(pool, waits, {(topic, 0): 0}, is_gone=lambda: bool(gone))
    assert not waiting.done()
    gone.append(True)
    assert waiting.result(10) == {}
    assert waits.count == 0


def test_dropped_topic_ends_its_waits(store, ends, waits, pool, monkeypatch):
    sleeping = Event()

    class Sleep(Event):
        def wait(self, timeout: float | None = None) -> bool:
            sleeping.set()
            return super().wait(timeout)

    topic = store.create("t", 1, {})
    monkeypatch.setattr(module, "Event", Sleep)
    waiting = begin(pool, waits, {(topic.number, 0): 0})
    assert sleeping.wait(10)  # before, the wait would see the drop by itself
    store.drop("t")
    ends.remove_topic(topic.number)
    waits.on_topic_dropped(topic)
    with pytest.raises(DoesNotExist):
        waiting.result(10)
    assert waits.count == 0


def test_a_wake_up_reads_the_ends_of_no_shard_again(store, waits, pool, monkeypatch):
    """A topic may have a thousand shards, and a wait is woken by each commit to one of them."""
    topic = store.create("t", 100, {})
    wanted = {(topic.number, shard): 0 for shard in range(1, 100)}
    assert waits.wait(wanted, 0) == {}  # the ends are known from here on
    monkeypatch.setattr(store, "bounds", lambda _: pytest.fail("the store was asked"))
    waiting = begin(pool, waits, wanted)
    append(store, topic.number, shard=7)
    assert waiting.result(10) == {(topic.number, 7): 1}


def test_close_wakes_sleeping_waits(store, waits, pool, monkeypatch):
    class Slept(Event):
        """The bus stops between the look and the sleep."""

        def wait(self, timeout: float | None = None) -> bool:
            waits.close()
            return super().wait(timeout)

    topic = store.create("t", 1, {}).number
    monkeypatch.setattr(module, "Event", Slept)
    assert pool.submit(waits.wait, {(topic, 0): 0}, LONG_S).result(10) == {}


def test_closed_waits_refuse_new_ones(store, waits, pool):
    topic = store.create("t", 1, {}).number
    waiting = begin(pool, waits, {(topic, 0): 0})
    waits.close()
    assert waiting.result(10) == {}
    with pytest.raises(StoreClosed):
        waits.wait({(topic, 0): 0}, LONG_S)


def test_wait_whose_access_is_revoked_ends(store, waits, pool):
    topic = store.create("t", 1, {}).number
    is_denied = Event()

    def check_access() -> None:
        if is_denied.is_set():
            raise Denied("no")

    waiting = [
        pool.submit(waits.wait, {(topic, 0): 0}, LONG_S, lambda: False, ANONYMOUS, check)
        for check in (check_access, lambda: None)
    ]
    until(lambda: waits.count == 2, "they wait")
    waits.wake_all()
    is_denied.set()
    waits.wake_all()
    with pytest.raises(Denied):
        waiting[0].result(20)
    append(store, topic)
    assert waiting[1].result(20) == {(topic, 0): 1}


def test_access_is_checked_before_the_first_sleep(store, waits):
    """The rules may have changed just before the wait was entered, and woken no one."""

    def deny() -> None:
        raise Denied("no")

    topic = store.create("t", 1, {}).number
    with pytest.raises(Denied):
        waits.wait({(topic, 0): 0}, LONG_S, lambda: False, ANONYMOUS, deny)
    assert waits.count == 0
