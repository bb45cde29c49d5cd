"""Epochs, fencing, counters with stored answers."""

from __future__ import annotations

import pytest

from polybus.dialects.pirate.codec import GET, HELLO, PUT, SUB, UNSUB, ClientRequest
from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_records import MAX_HELLO_NUMBERS, HelloHistory
from polybus.errors import Damaged, DoesNotExist, Fenced, LimitReached, Stale
from polybus.model.commit import Commit, RecordChange
from polybus.model.identity import Identity
from tests.unit.pirate.server.memory_subscribers import MemorySubscribers


def hello(world: MemorySubscribers, number: int, client: bytes = b"c") -> tuple[int, int]:
    answer: tuple[int, int] = world.ask(ClientRequest(HELLO, client, 0, number))
    return answer


def test_epochs_start_at_1_and_rise_by_1(world):
    assert [hello(world, number) for number in (7, 8, 9)] == [(1, 0), (2, 0), (3, 0)]
    assert hello(world, 7, b"another") == (1, 0)


def test_repeated_hello_number_gets_the_same_epoch_and_fences_no_client(world):
    assert (hello(world, 7), hello(world, 8), hello(world, 7)) == ((1, 0), (2, 0), (1, 0))
    assert world.ask(ClientRequest(SUB, b"c", 2, 1, "t")) == 0
    assert hello(world, 8) == (2, 1)


def test_hello_numbers_and_counter_survive_a_restart(world):
    hello(world, 7)
    world.ask(ClientRequest(SUB, b"c", 1, 5, "t"))
    again = world.again()
    assert hello(again, 7) == (1, 5)
    assert hello(again, 9) == (2, 5)


def test_hello_history_has_the_last_1024_numbers():
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


def test_copy_of_an_interrupted_hello_gets_its_epoch(world):
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
def test_other_epochs_are_fenced_in_every_operation(world, op, epoch):
    hello(world, 1)
    hello(world, 2)
    answer = world.ask(ClientRequest(op, b"c", epoch, 1, "t", (b"x",)))
    assert isinstance(answer, Fenced)
    assert hello(world, 2) == (2, 0), "nothing was used up"


@pytest.mark.parametrize("op", [SUB, UNSUB, PUT, GET])
def test_requests_without_hello_are_fenced(world, op):
    answer = world.ask(ClientRequest(op, b"c", 1, 1, "t", (b"x",)))
    assert isinstance(answer, Fenced)
    assert "HELLO" in str(answer)


def test_fenced_text_names_the_cause(world):
    hello(world, 1)
    hello(world, 2)
    older = world.ask(ClientRequest(PUT, b"c", 1, 1, "t", (b"x",)))
    newer = world.ask(ClientRequest(PUT, b"c", 9, 1, "t", (b"x",)))
    assert "has started" in str(older)
    assert "restored from a backup" in str(newer)


def test_counter_gaps_are_allowed_and_used_counters_are_stale(world):
    client = world.client()
    client.sub("t")
    assert world.ask(ClientRequest(PUT, b"c", 1, 50, "t", (b"a",))) == 1
    assert world.ask(ClientRequest(PUT, b"c", 1, 50, "t", (b"a",))) == 1
    for request in (
        ClientRequest(PUT, b"c", 1, 50, "t", (b"b",)),
        ClientRequest(PUT, b"c", 1, 50, "u", (b"a",)),
        ClientRequest(SUB, b"c", 1, 50, "t"),
        ClientRequest(UNSUB, b"c", 1, 50, "t"),
        ClientRequest(PUT, b"c", 1, 49, "t", (b"a",)),
        ClientRequest(SUB, b"c", 1, 1, "t"),
    ):
        assert isinstance(world.ask(request), Stale)
    assert world.bodies("t") == [1]


def test_body_in_other_frames_is_the_same_request(world):
    client = world.client()
    client.sub("t")
    assert world.ask(ClientRequest(PUT, b"c", 1, 2, "t", (b"ab", b"", b"c"))) == 1
    assert world.ask(ClientRequest(PUT, b"c", 1, 2, "t", (b"abc",))) == 1


def test_stored_refusals_use_up_the_counter(world):
    client = world.client()
    assert isinstance(client.put("t"), DoesNotExist)
    assert hello(world, hash(b"c") & 0xFFFF) == (1, 1)
    other = world.client(b"other")
    other.sub("t")
    again = world.ask(ClientRequest(PUT, b"c", 1, 1, "t", (b"x",)))
    assert isinstance(again, DoesNotExist), "a repeat gets the first answer"
    assert client.put("t") == 1


def test_repeated_put_is_answered_after_its_topic_was_dropped(world):
    client = world.client()
    client.sub("t")
    assert client.put("t", b"a") == 1
    put = ClientRequest(PUT, b"c", 1, client.counter, "t", (b"a",))
    world.store.drop("t")
    world.binding.remove(world.durable.get("t"))
    world.settle()
    assert world.ask(put) == 1
    assert world.again().ask(put) == 1


def test_concurrent_copies_are_executed_once(world):
    client = world.client()
    client.sub("t")
    request = ClientRequest(PUT, b"c", 1, 2, "t", (b"a",))
    replies = [world.send(request) for _ in range(5)]
    world.bus.on_turn_end()
    world.settle()
    assert replies == [[1]] * 5
    assert world.bodies("t") == [1]


def test_requests_of_one_client_take_effect_in_order(world):
    world.client()
    replies = [
        world.send(ClientRequest(SUB, b"c", 1, 1, "t")),
        world.send(ClientRequest(PUT, b"c", 1, 2, "t", (b"a",))),
        world.send(ClientRequest(GET, b"c", 1, 0, "t")),
        world.send(ClientRequest(UNSUB, b"c", 1, 3, "t")),
        world.send(ClientRequest(PUT, b"c", 1, 4, "t", (b"b",))),
        world.send(ClientRequest(GET, b"c", 1, 0, "t")),
    ]
    world.bus.on_turn_end()
    world.settle()
    answers = [one for (one,) in replies]
    assert answers[:2] == [0, 1]
    assert answers[3] == 1
    assert isinstance(answers[4], DoesNotExist)
    assert isinstance(answers[5], DoesNotExist)


def test_waiting_requests_of_a_client_are_bounded():
    world = MemorySubscribers(max_client_requests=3)
    replies = [world.send(ClientRequest(HELLO, b"c", 0, number)) for number in range(6)]
    world.settle()
    refused = [one for (one,) in replies if isinstance(one, LimitReached)]
    assert len(refused) == 3
    assert {one.limit for one in refused} == {"max_client_requests"}


def test_number_of_clients_is_bounded_and_known_ones_continue():
    world = MemorySubscribers(max_clients=2)
    assert hello(world, 1, b"a") == hello(world, 1, b"b") == (1, 0)
    assert isinstance(world.ask(ClientRequest(HELLO, b"c", 0, 1)), LimitReached)
    assert hello(world, 2, b"a") == (2, 0)
    again = world.again(max_clients=2)
    assert isinstance(again.ask(ClientRequest(HELLO, b"c", 0, 1)), LimitReached)


def test_clients_count_against_their_user_also_after_a_restart():
    world = MemorySubscribers(max_clients=4)
    caller = Identity(uid=1001)
    world.ask(ClientRequest(HELLO, b"a", 0, 1), caller)
    world.ask(ClientRequest(HELLO, b"a", 0, 2), caller)  # another epoch of the same client
    assert hello(world, 1, b"b") == (1, 0)
    again = world.again(max_clients=4)
    shares = again.bus.clients._shares
    assert (shares.used, shares.held("uid:1001"), shares.held("anonymous")) == (2, 1, 1)


def test_clients_that_arrive_together_do_not_exceed_the_limit():
    world = MemorySubscribers(max_clients=2)
    results = [world.send(ClientRequest(HELLO, name, 0, 1)) for name in (b"a", b"b", b"c", b"d")]
    world.settle()
    assert sum(isinstance(result, LimitReached) for (result,) in results) == 2
    assert world.bus.clients.count == 2


def test_removed_client_keeps_its_epochs_and_counter():
    world = MemorySubscribers(max_clients=1)
    client = world.client(b"a")
    client.sub("t")
    assert client.put("t", b"x") == 1
    removed: list[object] = []
    world.bus.clients.remove(b"a", removed.append)
    world.settle()
    assert removed == ["anonymous"]
    assert world.bus.clients.count == 0
    late = ClientRequest(PUT, b"a", client.epoch, client.counter + 1, "t", (b"y",))
    assert isinstance(world.ask(late), Fenced)
    for bus in (world, world.again(max_clients=1)):
        epoch, counter = hello(bus, 7, b"a")
        assert epoch > client.epoch
        assert counter == client.counter
    world.bus.clients.remove(b"unknown", removed.append)
    world.settle()
    assert isinstance(removed[-1], DoesNotExist)


def test_client_ids_are_any_bytes_and_never_mixed_up(world):
    ids = [b"a", b"a\0", b"\0", b"a/b", bytes(range(64)), b"\xff" * 64]
    for number, one in enumerate(ids):
        client = world.client(one)
        assert client.epoch == 1
        assert client.sub("t") == 0
        assert len(world.subscriptions()) == number + 1
    again = world.again()
    assert {one.key.client for one in again.subscriptions()} == set(ids)


@pytest.mark.parametrize("size", [1, 4096, 4097, 300_000])
def test_other_body_with_the_same_counter_is_stale(world, size):
    client = world.client()
    client.sub("t")
    assert client.put("t", b"a" * size) == 1
    again = ClientRequest(PUT, b"c", client.epoch, client.counter, "t", (b"a" * size,))
    assert world.ask(again) == 1
    assert isinstance(world.ask(again._replace(body=(b"a" * (size - 1), b"b"))), Stale)
