"""Uncommitted messages of durable topics: counted, bounded, answered once."""

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
MUCH = publish(b"t", bytes(1000)) * 10  # over the bound with the overhead of each message
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


def test_failed_commit_is_counted_and_logged(bus: MemoryBus):
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


def test_topic_over_max_bytes_refuses_messages(bus: MemoryBus):
    topic = bus.make("t", max_bytes=2000)
    writer = bus.connect()
    for _ in range(5):
        writer.deliver(publish(b"t", bytes(600)))
        bus.settle()
    assert len(stored(bus, topic.number)) < 5
    assert bus.stats("dropped") == {"limit_reached": 5 - len(stored(bus, topic.number))}


def test_publisher_over_max_uncommitted_bytes_is_paused(bus: MemoryBus):
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
    assert not writer.reading  # more than half is uncommitted
    bus.settle()
    assert writer.reading
    assert not writer.unread
    bus.settle()
    assert stored(bus, topic.number)[-1] == b"left where it is"


def test_empty_messages_count_towards_uncommitted_bytes(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    writer.deliver(publish(b"t") * 2000)
    assert not writer.reading


def test_uncommitted_bytes_pause_only_their_publisher(bus: MemoryBus):
    bus.make("t")
    greedy, other = bus.connect(), bus.connect()
    greedy.deliver(MUCH)
    other.deliver(publish(b"t", b"x"))
    assert not greedy.reading
    assert other.reading


@pytest.mark.parametrize("first", ["disk", "reader"])
def test_publisher_waits_for_disk_and_full_reader_at_once(bus: MemoryBus, first: str):
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
def test_messages_sent_before_a_hangup_are_stored(bus: MemoryBus, how: str):
    topic = bus.make("t")
    writer = bus.connect()
    writer.deliver(MUCH)
    getattr(writer, how)()
    bus.settle()
    assert len(stored(bus, topic.number)) == 10


# --- Freud ---------------------------------------------------------------------


def test_produce_is_answered_with_its_id_after_the_commit(bus: MemoryBus):
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


def test_message_without_subscribers_is_stored(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    bus.settle()
    assert [one.code for one in answers(client)] == [OK]
    assert stored(bus, topic.number) == [b"a"]


def test_failed_commit_is_an_error_and_the_next_succeeds(bus: MemoryBus):
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


def test_half_close_during_a_commit_is_answered_once(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    client.shut_down()
    assert not client.closed
    bus.settle()
    assert [number(one) for one in answers(client)] == [1]
    assert client.closed
    assert stored(bus, topic.number) == [b"a"]


def test_disconnect_during_a_commit_stores_once(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    client.deliver(create(b"e") + produce(b"t", b"b"))
    client.hang_up()
    bus.settle()
    assert stored(bus, topic.number) == [b"a", b"b"]
    assert bus.topics.exists(b"e")
    assert answers(client) == []


def test_freud_client_over_max_uncommitted_bytes_is_paused(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    count = 3 * MAX_UNCOMMITTED // 1000
    for _ in range(count):
        client.deliver(produce(b"t", bytes(1000)))
    assert len(bus.store.waiting) * 1000 <= MAX_UNCOMMITTED
    bus.settle()
    assert len(stored(bus, topic.number)) == count


def test_failed_commit_of_a_gone_connection_is_counted(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    bus.store.fail_with = StoreFull("no space left")
    client.deliver(produce(b"t", b"a") * 2)
    client.hang_up()
    bus.settle()
    assert bus.stats("dropped") == {"store_full": 2}


def test_topic_dropped_during_a_commit(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(produce(b"t", b"a"))
    bus.drop(topic)
    bus.settle()
    assert [one.code for one in answers(client)] == [DOESNT_EXIST]


def test_freud_create_and_delete_do_not_apply_to_a_durable_topic(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    client.deliver(create(b"t") + delete(b"t"))
    assert [one.code for one in answers(client)] == [NOTHING_HAPPENED, NO]
    client.deliver(freud_client.produce(b"t", b"a"))
    bus.settle()
    assert stored(bus, topic.number) == [b"a"]
