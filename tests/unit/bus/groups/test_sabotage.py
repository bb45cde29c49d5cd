"""With fencing off, a zombie's acks are taken: what tests of faults must notice."""

from __future__ import annotations

import pytest

from polybus.bus.groups import sabotage


@pytest.fixture(autouse=True)
def _off(monkeypatch):
    monkeypatch.setattr(sabotage, "FENCING_OFF", True)


def test_acks_and_transactions_of_old_epochs_are_taken(desk):
    desk.produce(10)
    zombie = desk.join("a")
    zombie.fetch()
    desk.now += 6
    desk.groups.tick()
    alive = desk.join("b")
    alive.fetch()
    assert zombie.ack(0, (0, 2))["low"] == 2
    place = 0, zombie.held[0].epoch, 2, 0
    assert desk.groups.commit(desk.topic(), "g", ("a", zombie.epoch), place, []) is not None
    assert desk.shard(0)["low"] == 3
    assert desk.shard(0)["owner"] == "b"
