"""The timer of the coordinator, and the deadlines after a pause of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.errors import StoreFull
from polybus.groups import coordinator
from polybus.groups.coordinator import LATE_S, TICK_S, CoordinatorTimer
from tests.rig.observer import until


@pytest.fixture
def ticking(harness) -> Iterator[CoordinatorTimer]:
    made = CoordinatorTimer(harness.groups, lambda: harness.now)
    yield made
    made.stop()


def members(harness) -> list[str]:
    return [one["consumer"] for one in harness.info()["members"]]


def seen(harness) -> float:
    return harness.groups._registry.get(harness.topic(), "g").last_seen_s["a"]


def test_members_do_not_expire_while_the_bus_is_stopped(harness, ticking):
    harness.join("a")
    before = seen(harness)
    ticking.start()
    harness.now += 60
    until(lambda: seen(harness) > before, "the time is forgiven")
    until(
        lambda: not harness.groups._registry.get(harness.topic(), "g").needs_rebalance,
        "a tick has passed",
    )
    assert members(harness) == ["a"]


def test_loading_a_group_ends_the_pause_of_an_idle_timer(harness, ticking, monkeypatch):
    monkeypatch.setattr(coordinator, "IDLE_TICK_S", 600.0)
    ticks: list[bool] = []
    tick = harness.groups.tick
    monkeypatch.setattr(harness.groups, "tick", lambda: (ticks.append(True), tick()))
    ticking.start()
    until(lambda: ticks, "the first tick has found no group")
    harness.join("a", dead_ms=300, heartbeat_ms=100)
    harness.now += 0.5
    until(lambda: not members(harness), "it is dropped")


def test_dead_members_are_dropped(harness, ticking):
    harness.join("a", dead_ms=300, heartbeat_ms=100)
    ticking.start()
    assert TICK_S + LATE_S > 0.5
    harness.now += 0.5  # too short to count as a stopped process
    until(lambda: not members(harness), "it is dropped")


def test_timer_survives_an_error(harness, ticking, monkeypatch):
    failed = []

    def full(commit):
        failed.append(commit)
        raise StoreFull("no room")

    harness.join("a", dead_ms=300, heartbeat_ms=100)
    with monkeypatch.context() as patch:
        patch.setattr(harness.store, "commit", full)
        ticking.start()
        harness.now += 0.5
        until(lambda: failed, "it cannot be written")
    until(lambda: not members(harness), "it is dropped by a later tick")


def test_timer_ends_on_stop_and_with_the_store(harness, ticking):
    other = CoordinatorTimer(harness.groups, lambda: harness.now)
    for one in (ticking, other):
        one.start()
    other.stop()
    harness.join("a", dead_ms=300, heartbeat_ms=100)
    harness.store.close()
    harness.now += 0.5
    for one in (ticking, other):
        one._thread.join(30)
        assert not one._thread.is_alive()
