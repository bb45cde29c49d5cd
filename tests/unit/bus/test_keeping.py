"""What is published to durable topics on its way to the disk: counted, bounded, answered once."""

from __future__ import annotations

import pytest

from polybus.errors import StoreFull
from polybus.model.limits import Limits
from tests.rig import freud_client
from tests.rig.freud_client import (
    DOESNT_EXIST,
    NO,
    NOTHING_HAPPENED,
    OK,
    SERVER_ERROR,
    Answer,
    answers_in,
    create,
    delete,
    list_topics,
    number,
    produce,
)
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.rqueue_client import publish, subscribe

MAX_UNCOMMITTED = 10_000
MUCH = publish(b"t", bytes(1000)) * 10  # with what each weighs beside its body, over the bound
LIMITS = Limits(max_uncommitted_bytes=MAX_UNCOMMITTED, outbox_high_water_bytes=1000)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(LIMITS, durable=True)


def answers(pipe: MemoryPipe) -> list[Answer]:
    found, size = answers_in(pipe.taken)
    assert size == len(pipe.taken)
    pipe.taken.clear()
    return found


def stored(bus: MemoryBus, topic: int) -> list[bytes]:
    rows = bus.store.read(topic, 0, 0)
    ends = memoryview(rows.body_offsets).cast("B").cast("i")
    return [bytes(rows.bodies[ends[at] : ends[at + 1]]) for at in range(rows.count)]


# --- rqueue --------------------------------------------------------------------


def test_a_commit_that_fails_is_counted_and_logged(bus: MemoryBus):
    bus.make("t")
    bus.store.fail_with = StoreFull("no space left")
    bus.connect().deliver(publish(b"t", b"x") * 3)
    bus.settle()
    assert bus.stats("dropped") == {"store_full": 3}
    (event, fields) = bus.log.warnings()[0]
    assert (event, fields["topic"], fields["reason"], fields["messages"]) == (
        "not kept",
        "t",
        "store_full",
        3,
    )
    bus.store.fail_with = None
    bus.connect().deliver(publish(b"t", b"y"))
    bus.settle()
    assert bus.stats("dropped") == {"store_full": 3}


def test_a_topic_over_its_bytes_takes_no_more(bus: MemoryBus):
    topic = bus.make("t", max_bytes=2000)
    writer = bus.connect()
    for _ in range(5):
        writer.deliver(publish(b"t", bytes(600)))
        bus.settle()
    assert len(stored(bus, topic.number)) < 5
    assert bus.stats("dropped") == {"limit_reached": 5 - len(stored(bus, topic.number))}


def test_too_much_on_its_way_and_it_is_not_read_from(bus: MemoryBus):
    topic = bus.make("t")
    writer = bus.connect()
    sent = 0
    while writer.reading:
        writer.deliver(publish(b"t", bytes(1000)))
        sent += 1
        assert sent <= MAX_UNCOMMITTED // 1000 + 1
    writer.deliver(publish(b"t", b"left where it is"))
    assert writer.unread
    bus.commit(1)
    bus.turn()
    assert not writer.reading  # more than half is still on its way
    bus.settle()
    assert writer.reading
    assert not writer.unread
    bus.settle()
    assert stored(bus, topic.number)[-1] == b"left where it is"


def test_empty_messages_weigh_something_too(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    writer.deliver(publish(b"t") * 2000)
    assert not writer.reading


def test_what_one_has_on_its_way_holds_up_nobody_else(bus: MemoryBus):
    bus.make("t")
    greedy, other = bus.connect(), bus.connect()
    greedy.deliver(MUCH)
    other.deliver(publish(b"t", b"x"))
    assert not greedy.reading
    assert other.reading


@pytest.mark.parametrize("first", ["disk", "reader"])
def test_waiting_for_the_disk_and_for_a_full_reader_at_once(bus: MemoryBus, first: str):
    """It is read from again when it waits for neither."""
    topic = bus.make("t")
    slow = bus.connect(appetite=0)
    slow.deliver(subscribe(b"ephemeral"))
    bus.connect().deliver(publish(b"ephemeral", bytes(600)) * 2)
    writer = bus.connect()
    writer.deliver(MUCH + publish(b"ephemeral", b"x") + publish(b"t", b"y"))
    assert not writer.reading

    def free_disk() -> None:
        bus.commit()
        bus.turn()

    def free_reader() -> None:
        slow.eat()
        bus.turn()

    steps = [free_disk, free_reader]
    for step in steps if first == "disk" else reversed(steps):
        assert not writer.reading
        step()
    assert writer.reading
    bus.settle()
    assert slow.taken.endswith(b"x")
    assert stored(bus, topic.number)[-1] == b"y"


@pytest.mark.parametrize("how", ["hang_up", "shut_down"])
def test_what_was_sent_before_a_hangup_is_kept(bus: MemoryBus, how: str):
    topic = bus.make("t")
    writer = bus.connect()
    writer.deliver(MUCH)
    getattr(writer, how)()
    bus.settle()
    assert len(stored(bus, topic.number)) == 10


# --- Freud ---------------------------------------------------------------------


def test_a_produce_is_answered_with_its_id_after_the_commit(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a") + produce(b"t", b"b"))
    bus.turn()
    assert answers(client) == []
    bus.settle()
    assert [number(one) for one in answers(client)] == [1, 2]
    assert stored(bus, topic.number) == [b"a", b"b"]


def test_answers_keep_the_order_of_requests(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    client.deliver(create(b"e"))
    client.deliver(produce(b"t", b"a"))
    client.deliver(produce(b"e", b"b"))  # could be answered at once
    client.deliver(list_topics())
    bus.turn()
    assert len(answers(client)) == 1
    bus.settle()
    kept, unheard, listed = answers(client)
    assert number(kept) == 1
    assert unheard.code == NOTHING_HAPPENED
    assert listed.code == OK
    assert listed.payload.endswith(b"t")


def test_it_is_stored_though_nobody_reads_it(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    bus.settle()
    assert [one.code for one in answers(client)] == [OK]
    assert stored(bus, topic.number) == [b"a"]


def test_a_commit_that_fails_is_an_error_and_the_next_goes_on(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    bus.store.fail_with = StoreFull("no space left")
    client.deliver(produce(b"t", b"a") * 2)
    bus.settle()
    assert [(one.code, one.payload) for one in answers(client)] == 2 * [
        (SERVER_ERROR, b"store_full")
    ]
    bus.store.fail_with = None
    client.deliver(produce(b"t", b"b"))
    bus.settle()
    assert [number(one) for one in answers(client)] == [1]


def test_a_half_close_while_committing_is_answered_and_nothing_is_done_twice(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    client.shut_down()
    assert not client.closed
    bus.settle()
    assert [number(one) for one in answers(client)] == [1]
    assert client.closed
    assert stored(bus, topic.number) == [b"a"]


def test_an_end_while_committing_does_nothing_twice(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    client.deliver(create(b"e") + produce(b"t", b"b"))
    client.hang_up()
    bus.settle()
    assert stored(bus, topic.number) == [b"a", b"b"]
    assert bus.topics.exists(b"e")
    assert answers(client) == []


def test_one_that_fails_when_nobody_is_there_to_be_told_is_counted(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    bus.store.fail_with = StoreFull("no space left")
    client.deliver(produce(b"t", b"a") * 2)
    client.hang_up()
    bus.settle()
    assert bus.stats("dropped") == {"store_full": 2}


def test_a_topic_that_goes_while_committing(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    bus.drop(topic)
    bus.settle()
    assert [one.code for one in answers(client)] == [DOESNT_EXIST]


def test_create_does_nothing_and_delete_is_not_allowed(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(create(b"t") + delete(b"t"))
    assert [one.code for one in answers(client)] == [NOTHING_HAPPENED, NO]
    client.deliver(freud_client.produce(b"t", b"a"))
    bus.settle()
    assert stored(bus, topic.number) == [b"a"]
