"""Epochs, fencing, counters with stored answers."""

from __future__ import annotations

import pytest

from polybus.dialects.pirate.codec import GET, HELLO, PUT, SUB, UNSUB, Request
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_records import MAX_HELLO_NUMBERS, HelloHistory
from polybus.errors import Damaged, DoesNotExist, Fenced, LimitReached, Stale
from polybus.model.commit import Commit, RecordChange
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


def hello(world: MemorySubscribers, number: int, client: bytes = b"c") -> tuple[int, int]:
    answer: tuple[int, int] = world.ask(Request(HELLO, client, 0, number))
    return answer


def test_epochs_start_at_1_and_rise_by_1(world):
    assert [hello(world, number) for number in (7, 8, 9)] == [(1, 0), (2, 0), (3, 0)]
    assert hello(world, 7, b"another") == (1, 0)


def test_the_same_number_gets_the_same_epoch_and_fences_nobody(world):
    assert (hello(world, 7), hello(world, 8), hello(world, 7)) == ((1, 0), (2, 0), (1, 0))
    assert world.ask(Request(SUB, b"c", 2, 1, "t")) == 0
    assert hello(world, 8) == (2, 1)


def test_numbers_are_kept_over_a_restart_and_so_is_the_counter(world):
    hello(world, 7)
    world.ask(Request(SUB, b"c", 1, 5, "t"))
    again = world.again()
    assert hello(again, 7) == (1, 5)
    assert hello(again, 9) == (2, 5)


def test_the_last_1024_numbers_are_told_apart():
    known = HelloHistory()
    for number in range(MAX_HELLO_NUMBERS + 3):
        known = known.with_number(number)
    assert known.newest == MAX_HELLO_NUMBERS + 3
    assert known.epoch_of(2) is None
    assert known.epoch_of(3) == 4
    assert known.epoch_of(MAX_HELLO_NUMBERS + 2) == MAX_HELLO_NUMBERS + 3
    assert HelloHistory.decode(known.encode()) == known
    for raw in (b"", bytes(7), bytes(9)):
        with pytest.raises(Damaged):
            HelloHistory.decode(raw)


def test_a_hello_that_ended_half_way_gives_its_epoch_to_its_copy(world):
    hello(world, 7)
    found = world.store.get(subscriber_records.counter_key(b"c"))
    given = HelloHistory.decode(found.value).with_number(8)
    change = RecordChange(subscriber_records.counter_key(b"c"), given.encode(), found.version)
    world.store.commit(Commit(changes=(change,))).result(20)
    again = world.again()
    assert hello(again, 8) == (2, 0)
    assert hello(again, 9) == (3, 0)


@pytest.mark.parametrize("op", [SUB, UNSUB, PUT, GET])
@pytest.mark.parametrize("epoch", [0, 1, 3, 2**64 - 1])
def test_any_other_epoch_is_fenced_in_every_operation(world, op, epoch):
    hello(world, 1)
    hello(world, 2)
    answer = world.ask(Request(op, b"c", epoch, 1, "t", (b"x",)))
    assert isinstance(answer, Fenced)
    assert hello(world, 2) == (2, 0), "nothing was used up"


@pytest.mark.parametrize("op", [SUB, UNSUB, PUT, GET])
def test_without_a_hello_everything_is_fenced(world, op):
    answer = world.ask(Request(op, b"c", 1, 1, "t", (b"x",)))
    assert isinstance(answer, Fenced)
    assert "HELLO" in str(answer)


def test_the_text_of_a_fence_says_what_to_do(world):
    hello(world, 1)
    hello(world, 2)
    older = world.ask(Request(PUT, b"c", 1, 1, "t", (b"x",)))
    newer = world.ask(Request(PUT, b"c", 9, 1, "t", (b"x",)))
    assert "has started" in str(older)
    assert "restored from a backup" in str(newer)


def test_gaps_are_fine_lower_counters_and_other_requests_are_stale(world):
    client = world.client()
    client.sub("t")
    assert world.ask(Request(PUT, b"c", 1, 50, "t", (b"a",))) == 1
    assert world.ask(Request(PUT, b"c", 1, 50, "t", (b"a",))) == 1
    for request in (
        Request(PUT, b"c", 1, 50, "t", (b"b",)),
        Request(PUT, b"c", 1, 50, "u", (b"a",)),
        Request(SUB, b"c", 1, 50, "t"),
        Request(UNSUB, b"c", 1, 50, "t"),
        Request(PUT, b"c", 1, 49, "t", (b"a",)),
        Request(SUB, b"c", 1, 1, "t"),
    ):
        assert isinstance(world.ask(request), Stale)
    assert world.bodies("t") == [1]


def test_the_same_body_in_other_frames_is_the_same_request(world):
    client = world.client()
    client.sub("t")
    assert world.ask(Request(PUT, b"c", 1, 2, "t", (b"ab", b"", b"c"))) == 1
    assert world.ask(Request(PUT, b"c", 1, 2, "t", (b"abc",))) == 1


def test_refusals_that_are_stored_use_the_counter_up(world):
    client = world.client()
    assert isinstance(client.put("t"), DoesNotExist)
    assert hello(world, hash(b"c") & 0xFFFF) == (1, 1)
    other = world.client(b"other")
    other.sub("t")
    again = world.ask(Request(PUT, b"c", 1, 1, "t", (b"x",)))
    assert isinstance(again, DoesNotExist), "the repeat is answered as the first time"
    assert client.put("t") == 1


def test_a_repeat_is_answered_though_its_topic_has_gone(world):
    client = world.client()
    client.sub("t")
    assert client.put("t", b"a") == 1
    put = Request(PUT, b"c", 1, client.counter, "t", (b"a",))
    world.store.drop("t")
    world.binding.remove(world.durable.get("t"))
    world.settle()
    assert world.ask(put) == 1
    assert world.again().ask(put) == 1


def test_copies_that_come_at_once_are_done_once(world):
    client = world.client()
    client.sub("t")
    request = Request(PUT, b"c", 1, 2, "t", (b"a",))
    came = [world.send(request) for _ in range(5)]
    world.bus.on_turn_end()
    world.settle()
    assert came == [[1]] * 5
    assert world.bodies("t") == [1]


def test_requests_of_one_client_take_effect_in_their_order(world):
    world.client()
    came = [
        world.send(Request(SUB, b"c", 1, 1, "t")),
        world.send(Request(PUT, b"c", 1, 2, "t", (b"a",))),
        world.send(Request(GET, b"c", 1, 0, "t")),
        world.send(Request(UNSUB, b"c", 1, 3, "t")),
        world.send(Request(PUT, b"c", 1, 4, "t", (b"b",))),
        world.send(Request(GET, b"c", 1, 0, "t")),
    ]
    world.bus.on_turn_end()
    world.settle()
    answers = [one for (one,) in came]
    assert answers[:2] == [0, 1]
    assert answers[3] == 1
    assert isinstance(answers[4], DoesNotExist)
    assert isinstance(answers[5], DoesNotExist)


def test_too_many_requests_of_one_client_are_told_to_come_again():
    world = MemorySubscribers(max_client_requests=3)
    came = [world.send(Request(HELLO, b"c", 0, number)) for number in range(6)]
    world.settle()
    refused = [one for (one,) in came if isinstance(one, LimitReached)]
    assert len(refused) == 3
    assert {one.limit for one in refused} == {"max_client_requests"}


def test_too_many_clients_are_told_so_and_those_known_go_on():
    world = MemorySubscribers(max_clients=2)
    assert hello(world, 1, b"a") == hello(world, 1, b"b") == (1, 0)
    assert isinstance(world.ask(Request(HELLO, b"c", 0, 1)), LimitReached)
    assert hello(world, 2, b"a") == (2, 0)
    again = world.again(max_clients=2)
    assert isinstance(again.ask(Request(HELLO, b"c", 0, 1)), LimitReached)


def test_any_bytes_are_an_id_and_none_is_taken_for_another(world):
    ids = [b"a", b"a\0", b"\0", b"a/b", bytes(range(64)), b"\xff" * 64]
    for number, one in enumerate(ids):
        talker = world.client(one)
        assert talker.epoch == 1
        assert talker.sub("t") == 0
        assert len(world.subscriptions()) == number + 1
    again = world.again()
    assert {one.key.client for one in again.subscriptions()} == set(ids)


@pytest.mark.parametrize("size", [1, 4096, 4097, 300_000])
def test_another_body_is_another_request_however_large(world, size):
    client = world.client()
    client.sub("t")
    assert client.put("t", b"a" * size) == 1
    again = Request(PUT, b"c", client.epoch, client.counter, "t", (b"a" * size,))
    assert world.ask(again) == 1
    assert isinstance(world.ask(again._replace(body=(b"a" * (size - 1), b"b"))), Stale)
