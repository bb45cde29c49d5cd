"""The row of a Freud connection in `polybus connections`."""

from __future__ import annotations

from typing import Any

import pytest

from polybus.model.identity import Identity
from polybus.model.limits import Limits
from tests.rig import rqueue_client
from tests.rig.freud_client import (
    FOR_EVER,
    answers_in,
    create,
    get,
    produce,
    subscribe,
    unsubscribe,
)
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe

ALICE = Identity(1, groups=frozenset())
MARK = 1000
HEADER = 8


class Told:
    """A connection and its row in `polybus connections`."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.pipe: MemoryPipe = bus.connect_freud(identity=ALICE)

    def send(self, *requests: bytes) -> None:
        self.pipe.deliver(b"".join(requests))
        self.bus.turn()

    def subscribe(self, name: bytes) -> bytes:
        self.send(subscribe(name))
        found, _ = answers_in(self.pipe.taken)
        return found[-1].payload

    def __getitem__(self, field: str) -> Any:
        found = {one["peer"]: one for one in self.bus.connections()}
        return found[self.pipe.peer][field]


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(Limits(outbox_high_water_bytes=MARK, outbox_max_bytes=100 * MARK))


@pytest.fixture
def one(bus: MemoryBus) -> Told:
    told = Told(bus)
    told.send(create(b"t"), create(b"u"))
    return told


@pytest.mark.parametrize("together", [True, False])
def test_stats_count_produced_and_read_messages(one: Told, together: bool):
    """On both paths: one request at a time, and several in a buffer."""
    key = one.subscribe(b"t")
    requests = [produce(b"t", b"one"), produce(b"t", b"three"), get(key), get(key), get(key)]
    for some in [b"".join(requests)] if together else requests:
        one.send(some)
    assert (one["received_messages"], one["received_bytes"]) == (2, 8)
    assert (one["sent_messages"], one["sent_bytes"]) == (2, 8)


def test_rejected_produce_is_not_counted_as_received(one: Told):
    one.send(produce(b"nowhere", b"x"), produce(b"u", b"unheard"))
    assert (one["received_messages"], one["received_bytes"]) == (1, 7)


def test_stats_count_current_subscriptions(one: Told):
    first, _second = one.subscribe(b"t"), one.subscribe(b"u")
    assert one["subscriptions"] == 2
    one.send(unsubscribe(first))
    assert one["subscriptions"] == 1


def test_idle_connection_is_open(one: Told):
    assert (one["state"], one["outbox_bytes"]) == ("open", 0)


def test_connection_with_a_waiting_get_is_waiting(one: Told):
    one.send(get(one.subscribe(b"t"), FOR_EVER))
    assert one["state"] == "waiting"


def test_connection_with_unread_answers_is_stalled(bus: MemoryBus, one: Told):
    key = one.subscribe(b"t")
    one.send(produce(b"t", bytes(500)))
    stuck = Told(bus)
    stuck.pipe.appetite = 100
    stuck.send(get(key))
    assert (stuck["state"], stuck["outbox_bytes"]) == ("stalled", HEADER + 500 - 100)
    assert stuck["sent_messages"] == 0
    stuck.pipe.eat()
    assert (stuck["state"], stuck["outbox_bytes"]) == ("open", 0)
    assert (stuck["sent_messages"], stuck["sent_bytes"]) == (1, 500)


@pytest.mark.needs(dialect="rqueue")
def test_connection_whose_produce_waits_for_a_push_reader_is_blocked(bus: MemoryBus, one: Told):
    reader = bus.connect(appetite=0)
    reader.deliver(rqueue_client.subscribe(b"t"))
    bus.connect().deliver(rqueue_client.publish(b"t", bytes(MARK)) * 2)
    bus.turn()
    one.send(produce(b"t", b"x"))
    assert (one["state"], one["received_messages"]) == ("blocked", 0)
    reader.eat()
    bus.turn()
    assert (one["state"], one["received_messages"]) == ("open", 1)
