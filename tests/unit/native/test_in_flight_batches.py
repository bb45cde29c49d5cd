"""Batches in flight keep their counters; a suspect batch is sent alone; answers have an order."""

from __future__ import annotations

import pytest

from polybus.errors import PeerError
from polybus.native.client.produce_queue import PendingMessages, ProduceBatch, check_bodies
from polybus.native.client.sender import InFlightBatches


def batch(parts: int = 1) -> ProduceBatch:
    return ProduceBatch(
        "t", [PendingMessages("t", check_bodies([b"x"], None, 0)) for _ in range(parts)]
    )


def sent(count: int, max_in_flight: int = 16) -> InFlightBatches:
    found = InFlightBatches(last_counter=7, max_in_flight=max_in_flight)
    for _ in range(count):
        found.append(batch())
        found.number(found[-1])
    return found


def test_counters_increase_and_are_kept():
    found = sent(2)
    found.number(found[0])
    assert [one.counter for one in found] == [8, 9]


def test_batches_in_flight_are_limited_by_the_options():
    assert sent(1, max_in_flight=2).can_send(None)
    assert not sent(2, max_in_flight=2).can_send(None)


def test_batch_with_a_voided_counter_gets_a_new_one():
    found = sent(2)
    found[1].counter = 0
    assert found.sent_batches() == [found[0]]
    assert found.first_unsent() is found[1]
    found.number(found[1])
    assert [one.counter for one in found] == [8, 10]
    assert found.first_unsent() is None


def test_parts_of_a_split_batch_are_sent_alone():
    found = sent(0)
    found.extend([batch(parts=3), batch()])
    found.halve_first()
    assert [len(one.parts) for one in found] == [1, 2, 1]
    first, second, behind = found
    assert found.can_send(first)
    found.number(first)
    assert not found.can_send(second)
    assert not found.can_send(behind)
    assert found.take_answered(8) is first
    assert found.can_send(second)


@pytest.mark.parametrize("counter", [7, 9])
def test_unexpected_answer_is_a_peer_error(counter: int):
    found = sent(2)
    with pytest.raises(PeerError):
        found.take_answered(counter)
    assert len(found) == 2
