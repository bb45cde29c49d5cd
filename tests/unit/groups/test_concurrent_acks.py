"""Acks of different members are concurrent; changes of one shard are serialized."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from polybus.errors import StoreFull
from tests.rig.observer import until
from tests.rig.store.stepped_store import SteppedStore
from tests.unit.groups.group_harness import GroupHarness


class Disk:
    """A store whose commits wait for `step` while it is `held`."""

    def __init__(self) -> None:
        self.store = SteppedStore(wall_ns=lambda: 1, clock_s=lambda: 1.0)
        self.held = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        self.store.step()

    @property
    def waiting(self) -> int:
        return len(self.store.waiting)

    def close(self) -> None:
        self.held = False
        self._ended.set()
        self._thread.join()
        self.store.close()

    def _run(self) -> None:
        while not self._ended.wait(0.001) or self.store.waiting:
            while self.store.waiting and not self.held:
                self.store.step()


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def harness(disk) -> GroupHarness:
    made = GroupHarness(disk.store)
    for shard in range(4):
        made.produce(10, shard=shard)
    return made


def test_acks_of_two_members_are_concurrent(harness, disk, pool):
    one, two = harness.join("a"), harness.join("b")
    one.release_all()
    one.fetch()
    two.fetch()
    disk.held = True
    acks = [pool.submit(one.ack, 0, (0, 5)), pool.submit(two.ack, 3, (0, 5))]
    until(lambda: disk.waiting == 2, "both are in flight")
    beat = pool.submit(one.beat)
    assert beat.result(10) == ([], [0, 1])  # a heartbeat does not wait for the disk either
    assert pool.submit(one.look).result(10) is not None
    disk.held = False
    assert [ack.result(10)["low"] for ack in acks] == [5, 5]


def test_changes_of_one_shard_are_serialized(harness, disk, pool):
    one = harness.join("a")
    one.fetch()
    disk.held = True
    acks = [pool.submit(one.ack, 0, (n, n + 1)) for n in range(4)]
    until(lambda: disk.waiting == 1, "one is in flight")
    disk.held = False
    for ack in acks:
        assert ack.result(10)["error"] is None
    assert harness.shard(0)["low"] == 4


def test_progress_is_visible_only_after_it_is_durable(harness, disk, pool):
    one = harness.join("a")
    one.fetch()
    disk.held = True
    ack = pool.submit(one.ack, 0, (0, 5))
    until(lambda: disk.waiting == 1, "it is in flight")
    assert harness.shard(0)["low"] == 0
    disk.store.fail_with = StoreFull("no room")
    disk.step()
    with pytest.raises(StoreFull):
        ack.result(10)
    disk.store.fail_with = None
    disk.held = False
    assert harness.shard(0)["low"] == 0
    assert one.ack(0, (0, 5))["low"] == 5


def test_ack_in_progress_finishes_before_its_member_is_replaced(harness, disk, pool):
    old = harness.join("a")
    old.fetch()
    disk.held = True
    ack = pool.submit(old.ack, 0, (0, 5))
    until(lambda: disk.waiting == 1, "it is in flight")
    join = pool.submit(harness.join, "a")
    disk.held = False
    assert ack.result(10)["low"] == 5
    new = join.result(10)
    assert new.fetch().assigned[0]["low"] == 5


def test_ack_after_a_replacement_is_refused(harness, disk, pool):
    old = harness.join("a")
    old.fetch()
    disk.held = True
    join = pool.submit(harness.join, "a")
    until(lambda: disk.waiting == 1, "it is in flight")
    ack = pool.submit(old.ack, 0, (0, 5))  # it does not know yet that it was replaced
    disk.held = False
    join.result(10)
    assert ack.exception(10) is not None or ack.result()["error"]["code"] == "fenced"
    assert harness.shard(0)["low"] == 0
