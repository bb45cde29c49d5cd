"""Produces to durable topics, several at once on one connection: slots.py."""

from __future__ import annotations

import pytest

from polybus.errors import StoreFull
from polybus.model.limits import Limits
from tests.rig.freud_client import (
    NOTHING_HAPPENED,
    OK,
    SERVER_ERROR,
    Answer,
    answers_in,
    count,
    create,
    get,
    number,
    produce,
    subscribe,
)
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe

MAX_UNCOMMITTED = 1000


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus(Limits(max_uncommitted_bytes=MAX_UNCOMMITTED), durable=True)
    bus.make("t")
    bus.make("u")
    return bus


@pytest.fixture
def client(bus: MemoryBus) -> MemoryPipe:
    return bus.connect_freud()


def answers(pipe: MemoryPipe) -> list[Answer]:
    found, size = answers_in(pipe.taken)
    assert size == len(pipe.taken)
    pipe.taken.clear()
    return found


def test_next_produce_does_not_wait_for_the_commit(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b") + produce(b"t", b"c"))
    client.deliver(produce(b"u", b"d"))
    assert len(bus.store.waiting) == 4
    bus.settle()
    assert [number(one) for one in answers(client)] == [1, 1, 2, 2]


def test_produce_is_answered_once_earlier_produces_are(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b"))
    bus.commit(1)
    bus.turn()
    assert [number(one) for one in answers(client)] == [1]
    bus.settle()
    assert [number(one) for one in answers(client)] == [1]


def test_answers_wait_for_an_earlier_unfinished_commit(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b"))
    bus.store.waiting.rotate(1)
    bus.commit(1)
    bus.turn()
    assert answers(client) == []
    bus.settle()
    assert [one.code for one in answers(client)] == [OK, OK]


def test_failed_commit_is_answered_in_order(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b") + produce(b"t", b"c"))
    bus.commit(1)
    bus.store.fail_with = StoreFull("no space left")
    bus.commit(1)
    bus.store.fail_with = None
    bus.settle()
    assert [one.code for one in answers(client)] == [OK, SERVER_ERROR, OK]


def test_rejected_produce_is_answered_in_order(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a"))
    client.deliver(produce(b"nothing", b"b"))
    client.deliver(produce(b"t", b"c"))
    assert answers(client) == []
    bus.settle()
    first, refused, last = answers(client)
    assert (number(first), number(last)) == (1, 2)
    assert refused.code != OK


def test_get_after_a_produce_returns_its_message(bus: MemoryBus, client: MemoryPipe):
    client.deliver(subscribe(b"t"))
    bus.settle()
    subscriber = answers(client)[0].payload
    client.deliver(produce(b"t", b"a") + get(subscriber, 0))
    bus.settle()
    kept, got = answers(client)
    assert number(kept) == 1
    assert got.payload == b"a"


def test_single_request_does_not_overtake_an_uncommitted_produce(
    bus: MemoryBus, client: MemoryPipe
):
    """Alone, it would take the fast path."""
    client.deliver(create(b"e"))
    client.deliver(subscribe(b"e"))
    answers(client)
    client.deliver(produce(b"t", b"a"))
    client.deliver(produce(b"e", b"b"))
    assert answers(client) == []
    bus.settle()
    assert [number(one) for one in answers(client)] == [1, 0]


def test_uncommitted_bytes_are_bounded(bus: MemoryBus, client: MemoryPipe):
    for _ in range(8):
        client.deliver(produce(b"t", bytes(400)))
    assert len(bus.store.waiting) == 2
    bus.settle()
    assert [number(one) for one in answers(client)] == list(range(1, 9))


def test_uncommitted_empty_bodies_are_bounded(bus: MemoryBus, client: MemoryPipe):
    for _ in range(200):
        client.deliver(produce(b"t", b"") + produce(b"u", b""))
    assert len(bus.store.waiting) <= MAX_UNCOMMITTED // 16
    bus.settle()
    assert len(answers(client)) == 400


def test_body_over_the_bound_is_committed_alone(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a"))
    client.deliver(produce(b"t", bytes(5000)))
    client.deliver(produce(b"t", b"c"))
    assert len(bus.store.waiting) == 1
    bus.settle()
    assert [number(one) for one in answers(client)] == [1, 2, 3]


def test_stalled_client_gets_its_answers_once_it_reads(bus: MemoryBus):
    client = bus.connect_freud(appetite=4)
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b"))
    bus.commit(1)
    bus.turn()
    written = len(client.taken) + client.backlog_bytes()
    bus.settle()
    assert len(client.taken) + client.backlog_bytes() == written
    client.eat()
    client.deliver(count(b"e"))
    bus.settle()
    client.eat()
    assert [number(one) for one in answers(client)[:2]] == [1, 1]


def test_half_closed_connection_gets_all_answers(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b"))
    client.shut_down()
    bus.commit(1)
    bus.turn()
    assert not client.closed
    bus.settle()
    assert [number(one) for one in answers(client)] == [1, 1]
    assert client.closed


def test_produces_received_before_a_hang_up_are_committed(bus: MemoryBus, client: MemoryPipe):
    client.deliver((produce(b"t", bytes(400)) + produce(b"u", b"b")) * 4)
    client.hang_up()
    bus.settle()
    reader = bus.connect_freud()
    reader.deliver(produce(b"t", b"x") + produce(b"u", b"y"))
    bus.settle()
    assert [number(one) for one in answers(reader)] == [5, 5]


def test_failed_commit_of_a_gone_client_is_counted(bus: MemoryBus, client: MemoryPipe):
    client.deliver(produce(b"t", b"a") + produce(b"u", b"b"))
    client.hang_up()
    bus.store.fail_with = StoreFull("no space left")
    bus.settle()
    assert bus.stats("dropped") == {"store_full": 2}


def test_ephemeral_produce_is_answered_at_once_after_all_commits(
    bus: MemoryBus, client: MemoryPipe
):
    client.deliver(create(b"e"))
    client.deliver(produce(b"t", b"a"))
    bus.settle()
    answers(client)
    client.deliver(produce(b"e", b"b"))
    assert [one.code for one in answers(client)] == [NOTHING_HAPPENED]
