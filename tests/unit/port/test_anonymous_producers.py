"""Producers without a name: forgotten a week after their last use, and never before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.bus.shares import unshared_table
from polybus.errors import UnknownProducer
from polybus.model.commit import Commit, RecordChange
from polybus.model.identity import Identity
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.native.port import producer_registry
from polybus.native.port.producer_registry import (
    DAY_S,
    LAST_USE,
    NS,
    SCAN_INTERVAL_S,
    SCAN_LIMIT,
    ProducerRegistry,
)
from polybus.store.contract import Store
from polybus.store.memory.memory_store import MemoryStore

ALICE = Identity(uid=1)
FIRST, SECOND = (f"anonymous-{digit * 32}" for digit in "12")
NAMED = ("importer", "anonymous-mine", f"anonymous-{'x' * 32}")


class Bus:
    """One life of a bus on a store that outlives it; time passes by hand."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_s = 0.0
        self.wall_s = 1_000_000_000.0
        self.start()

    def start(self) -> None:
        """Start a registry after all submitted commits are done."""
        self.store.commit(Commit()).result()
        self.owners = ProducerRegistry(
            self.store,
            lambda: self.now_s,
            lambda: int(self.wall_s) * NS,
            unshared_table("max_producers", 10_000),
        )

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.wall_s += seconds

    def open(self, name: str) -> int:
        self.owners.close_expired()
        self.owners.claim(ALICE, name)
        return self.store.open_producer(name, ProducerOptions()).epoch

    def is_there(self, name: str) -> bool:
        """Return whether the producer exists. Registry and store must agree."""
        try:
            self.owners.check(ALICE, name)
            return True
        except UnknownProducer:
            stamp = Stamp(name, 1, 1)
            assert isinstance(self.store.commit(Commit(stamp=stamp)).exception(), UnknownProducer)
            assert self.store.get(LAST_USE + name.encode()) is None
            return False

    def look(self) -> None:
        self.pass_time(SCAN_INTERVAL_S)
        self.owners.close_expired()


@pytest.fixture
def bus() -> Iterator[Bus]:
    with MemoryStore() as store:
        yield Bus(store)


def test_unused_producer_expires_after_a_week(bus: Bus) -> None:
    bus.open(FIRST)
    bus.pass_time(7 * DAY_S)
    bus.look()
    assert bus.store.get(LAST_USE + FIRST.encode()) is not None
    bus.pass_time(DAY_S)
    bus.look()
    assert not bus.is_there(FIRST)


def test_named_producer_never_expires(bus: Bus) -> None:
    for name in NAMED:
        bus.open(name)
    bus.pass_time(1000 * DAY_S)
    bus.look()
    assert all(bus.is_there(name) for name in NAMED)
    assert bus.store.scan(LAST_USE) == []


def test_used_producer_does_not_expire(bus: Bus) -> None:
    bus.open(FIRST)
    bus.open(SECOND)
    for _ in range(20):
        bus.pass_time(DAY_S)
        bus.owners.check(ALICE, FIRST)
        bus.look()
    assert bus.is_there(FIRST)
    assert not bus.is_there(SECOND)


def test_last_use_survives_a_restart(bus: Bus) -> None:
    """No other producer was opened in between."""
    bus.open(FIRST)
    for _ in range(20):
        bus.pass_time(DAY_S)
        bus.owners.check(ALICE, FIRST)
    bus.start()
    bus.pass_time(6 * DAY_S)
    bus.look()
    assert bus.is_there(FIRST)


def test_use_is_recorded_at_most_once_per_day(bus: Bus) -> None:
    bus.open(FIRST)
    before = bus.store.get(LAST_USE + FIRST.encode())
    for _ in range(100):
        bus.pass_time(DAY_S / 200)
        bus.owners.check(ALICE, FIRST)
    bus.store.commit(Commit()).result()  # after any commit of a use, which is not waited for
    assert bus.store.get(LAST_USE + FIRST.encode()) == before


def test_wall_clock_jump_expires_no_active_producer(bus: Bus) -> None:
    bus.open(FIRST)
    bus.wall_s += 100 * DAY_S
    bus.look()
    assert bus.is_there(FIRST)
    bus.wall_s -= 200 * DAY_S
    bus.look()
    assert bus.is_there(FIRST)


def test_close_deletes_the_record_of_last_use(bus: Bus) -> None:
    epoch = bus.open(FIRST)
    bus.store.close_producer(FIRST, epoch)
    bus.owners.release(FIRST)
    assert not bus.is_there(FIRST)


def test_interrupted_expiry_is_completed_by_the_next_scan(bus: Bus) -> None:
    """The bus is killed after the producer was closed and before its records are removed."""
    epoch = bus.open(FIRST)
    bus.store.close_producer(FIRST, epoch)
    bus.pass_time(9 * DAY_S)
    bus.start()
    bus.look()
    assert not bus.is_there(FIRST)


def test_scan_is_bounded_and_rate_limited(
    bus: Bus,
) -> None:
    names = [f"anonymous-{n:032x}" for n in range(2 * SCAN_LIMIT + 10)]
    for start in range(0, len(names), 500):
        changes = tuple(
            RecordChange(LAST_USE + name.encode(), b"0") for name in names[start : start + 500]
        )
        bus.store.commit(Commit(changes=changes)).result()
    found = bus.owners._anonymous
    assert len(found.list_expired()) == SCAN_LIMIT
    assert found.list_expired() == []
    counts = []
    for _ in range(4):
        bus.pass_time(SCAN_INTERVAL_S)
        counts.append(len(found.list_expired()))
    assert counts == [SCAN_LIMIT, 10, SCAN_LIMIT, SCAN_LIMIT]


def test_cache_of_uses_is_bounded(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_registry, "MAX_REMEMBERED", 10)
    for n in range(100):
        bus.open(f"anonymous-{n:032x}")
    assert len(bus.owners._anonymous._recorded_s) <= 10
