"""The thread by which time passes, and what it does when it finds that it stood still."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polybus.errors import StoreFull
from polybus.groups.coordinator import LATE_S, TICK_S, CoordinatorTimer
from tests.rig.observer import until


@pytest.fixture
def ticking(desk) -> Iterator[CoordinatorTimer]:
    made = CoordinatorTimer(desk.groups, lambda: desk.now)
    yield made
    made.stop()


def members(desk) -> list[str]:
    return [one["consumer"] for one in desk.info()["members"]]


def seen(desk) -> float:
    return desk.groups._registry.get(desk.topic(), "g").last_seen_s["a"]


def test_members_do_not_expire_while_the_bus_is_stopped(desk, ticking):
    desk.join("a")
    before = seen(desk)
    ticking.start()
    desk.now += 60
    until(lambda: seen(desk) > before, "the time is forgiven")
    until(
        lambda: not desk.groups._registry.get(desk.topic(), "g").needs_rebalance,
        "a tick has passed",
    )
    assert members(desk) == ["a"]


def test_dead_members_are_dropped(desk, ticking):
    desk.join("a", dead_ms=300, heartbeat_ms=100)
    ticking.start()
    assert TICK_S + LATE_S > 0.5
    desk.now += 0.5  # not so long that it counts as standing still
    until(lambda: not members(desk), "it is dropped")


def test_timer_survives_an_error(desk, ticking, monkeypatch):
    failed = []

    def full(commit):
        failed.append(commit)
        raise StoreFull("no room")

    desk.join("a", dead_ms=300, heartbeat_ms=100)
    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "commit", full)
        ticking.start()
        desk.now += 0.5
        until(lambda: failed, "it cannot be written")
    until(lambda: not members(desk), "it is dropped by a later tick")


def test_timer_ends_on_stop_and_with_the_store(desk, ticking):
    other = CoordinatorTimer(desk.groups, lambda: desk.now)
    for one in (ticking, other):
        one.start()
    other.stop()
    desk.join("a", dead_ms=300, heartbeat_ms=100)
    desk.store.close()
    desk.now += 0.5
    for one in (ticking, other):
        one._thread.join(30)
        assert not one._thread.is_alive()
