"""Back-pressure and the cut of slow readers, without sockets and without a clock."""

from __future__ import annotations

from array import array

import pytest

from polybus.model.limits import Limits
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.rqueue_client import frame, notification, publish, subscribe

MARK = 1000
RATE = 100  # bytes a second
TIMEOUT_S = 5.0
LIMITS = Limits(
    outbox_high_water_bytes=MARK,
    outbox_max_bytes=100 * MARK,
    slow_consumer_min_bytes_per_s=RATE,
    slow_consumer_timeout_s=TIMEOUT_S,
)
BIG = bytes(600)  # two of these are over the mark
BAD = frame(99)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(LIMITS)


def reader_of(bus: MemoryBus, topic: bytes, appetite: int | None = None) -> MemoryPipe:
    pipe = bus.connect(appetite)
    pipe.deliver(subscribe(topic))
    return pipe


def full_reader(bus: MemoryBus, topic: bytes) -> MemoryPipe:
    """A reader that has stopped reading and is over its mark."""
    reader = reader_of(bus, topic, appetite=0)
    bus.connect().deliver(publish(topic, BIG) * 2)
    assert states(bus)[reader.peer] == "full"
    return reader


def states(bus: MemoryBus) -> dict[str, str]:
    return {one["peer"]: one["state"] for one in bus.connections()}


def reasons(bus: MemoryBus) -> list[str]:
    return [fields["reason"] for _, fields in bus.log.warnings()]


# --- waiting -----------------------------------------------------------------


def test_publisher_to_a_full_reader_is_paused(bus: MemoryBus):
    full_reader(bus, b"t")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"x"))
    assert not writer.reading
    assert writer.unread == len(publish(b"t", b"x"))
    assert states(bus)[writer.peer] == "waiting"
    assert bus.stats("connections", "waiting") == 1


def test_paused_publisher_does_not_wait_for_a_second_reader(bus: MemoryBus):
    first, second = full_reader(bus, b"t"), full_reader(bus, b"u")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"x"))
    (connection,) = (one for one in bus.broker._connections.values() if one.pipe is writer)
    assert not bus.broker.delivery.relay(connection, b"u", array("i", [0, 1]), b"y")
    assert bus.stats("connections", "waiting") == 1
    first.eat()
    bus.turn()
    assert writer.reading
    assert bus.stats("connections", "waiting") == 0
    second.eat()
    bus.turn()
    assert bus.stats("connections", "waiting") == 0


def test_publisher_to_other_readers_is_not_paused(bus: MemoryBus):
    full_reader(bus, b"t")
    other = reader_of(bus, b"u")
    writer = bus.connect()
    writer.deliver(publish(b"u", b"x"))
    assert other.taken == notification(b"u", b"x")
    assert writer.reading


def test_messages_before_the_blocked_one_are_delivered(bus: MemoryBus):
    full_reader(bus, b"t")
    other = reader_of(bus, b"u")
    writer = bus.connect()
    writer.deliver(publish(b"u", b"1") + publish(b"t", b"2") + publish(b"u", b"3"))
    bus.turn()
    assert other.taken == notification(b"u", b"1")


def test_blocked_message_reaches_no_reader(bus: MemoryBus):
    full_reader(bus, b"t")
    healthy = reader_of(bus, b"t")
    bus.connect().deliver(publish(b"t", b"x"))
    bus.turn()
    assert healthy.taken == b""


def test_all_messages_arrive_after_the_reader_reads_again(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"x") + subscribe(b"late") + publish(b"t", b"y"))
    reader.eat()
    bus.turn()
    tail = notification(b"t", b"x") + notification(b"t", b"y")
    assert reader.taken == notification(b"t", BIG) * 2 + tail
    assert writer.reading
    assert bus.stats("connections", "waiting") == 0
    assert bus.stats("subscriptions") == 2  # the frame in between had its effect, too


def test_publishers_resume_in_the_order_they_were_blocked(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    writers = [bus.connect() for _ in range(5)]
    for number, writer in enumerate(writers):
        writer.deliver(publish(b"t", b"%d" % number))
    reader.eat()
    bus.turn()
    expected = b"".join(notification(b"t", b"%d" % number) for number in range(5))
    assert reader.taken.endswith(expected)


def test_publisher_that_refills_the_reader_keeps_others_blocked(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    greedy, modest = bus.connect(), bus.connect()
    greedy.deliver(publish(b"t", BIG) * 4)
    modest.deliver(publish(b"t", b"m"))
    bus.turn()
    reader.eat(len(notification(b"t", BIG)) * 2)
    bus.turn()
    assert states(bus)[reader.peer] == "full"
    assert states(bus)[modest.peer] == "waiting"
    reader.eat()
    bus.turn()
    assert reader.taken.endswith(notification(b"t", b"m"))
    assert reader.taken == notification(b"t", BIG) * 6 + notification(b"t", b"m")


def test_publisher_is_blocked_by_two_full_readers_in_turn(bus: MemoryBus):
    first, second = full_reader(bus, b"t"), reader_of(bus, b"u", appetite=0)
    bus.connect().deliver(publish(b"u", BIG) * 2)
    writer = bus.connect()
    writer.deliver(publish(b"t", b"1") + publish(b"u", b"2"))
    first.eat()
    bus.turn()
    assert states(bus)[writer.peer] == "waiting"
    second.eat()
    bus.turn()
    assert first.taken.endswith(notification(b"t", b"1"))
    assert second.taken.endswith(notification(b"u", b"2"))


def test_publishers_resume_when_the_full_reader_leaves(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    healthy = reader_of(bus, b"t")
    writers = [bus.connect() for _ in range(2)]
    for number, writer in enumerate(writers):
        writer.deliver(publish(b"t", b"%d" % number))
    reader.hang_up()
    bus.turn()
    assert healthy.taken == notification(b"t", b"0") + notification(b"t", b"1")
    assert all(writer.reading for writer in writers)
    assert bus.stats("connections", "waiting") == 0


def test_blocked_publisher_that_leaves_is_forgotten(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"x"))
    writer.hang_up()
    assert bus.stats("connections", "waiting") == 0
    reader.eat()
    bus.turn()
    assert reader.taken == notification(b"t", BIG) * 2
    assert not writer.reading


def test_waiters_that_end_each_other_do_not_nest(bus: MemoryBus):
    """Each is full, waits for the one before, and breaks the protocol when it resumes."""
    chain = [full_reader(bus, b"t0")]
    for number in range(1, 250):
        pipe = full_reader(bus, b"t%d" % number)
        pipe.deliver(publish(b"t%d" % (number - 1), b"x") + BAD)
        chain.append(pipe)
    bystander = reader_of(bus, b"t0")
    chain[0].hang_up()
    bus.turn()
    assert bystander.taken == notification(b"t0", b"x")
    assert reasons(bus) == ["unknown_type"] * 249
    assert all(pipe.closed for pipe in chain[1:])


def test_publisher_resumes_if_its_reader_leaves_during_routing():
    """One push overflows a reader; that ends another one, which the publisher waits for."""
    bus = MemoryBus(Limits(outbox_high_water_bytes=MARK, outbox_max_bytes=2 * MARK))
    blocker = full_reader(bus, b"blocked")
    victim = reader_of(bus, b"big", appetite=0)
    bus.connect().deliver(publish(b"big", BIG) * 2)
    victim.eat(len(notification(b"big", BIG)))
    bus.turn()
    blocker.deliver(publish(b"big", b"x") + BAD)
    writer = bus.connect()
    writer.deliver(publish(b"big", bytes(1500)) + publish(b"blocked", b"y"))
    victim.hang_up()
    blocker.hang_up()
    bus.turn()
    assert writer.reading
    assert writer.unread == 0


# --- slow consumers ----------------------------------------------------------


@pytest.mark.parametrize(("missing", "cut"), [(0, False), (1, True)])
def test_reader_is_cut_below_the_minimum_rate_only(bus: MemoryBus, missing: int, cut: bool):
    reader = full_reader(bus, b"t")
    bus.pass_time(0.25)  # the first tick sees it full, and its time begins
    reader.eat(int(RATE * TIMEOUT_S) - missing)
    bus.pass_time(TIMEOUT_S)
    assert reader.aborted is cut


def test_reader_that_takes_nothing_is_cut_after_the_timeout(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    bus.pass_time(0.25 + TIMEOUT_S - 0.25)
    assert not reader.aborted
    bus.pass_time(0.25)
    assert reader.aborted


def test_each_window_of_a_slow_reader_is_measured_separately(bus: MemoryBus):
    reader = reader_of(bus, b"t", appetite=0)
    bus.connect().deliver(publish(b"t", bytes(2000)) * 2)
    bus.pass_time(0.25)
    reader.eat(int(RATE * TIMEOUT_S) + 400)  # more than enough, once
    bus.pass_time(TIMEOUT_S)
    assert not reader.aborted
    bus.pass_time(TIMEOUT_S)  # an earlier read does not count in a new window
    assert reader.aborted


def test_reader_below_its_high_water_mark_is_never_cut(bus: MemoryBus):
    reader = reader_of(bus, b"t", appetite=0)
    bus.connect().deliver(publish(b"t", bytes(500)))
    bus.pass_time(100 * TIMEOUT_S)
    assert not reader.aborted
    assert states(bus)[reader.peer] == "open"


def test_reader_that_had_room_starts_a_new_window(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    bus.pass_time(TIMEOUT_S)
    reader.eat(2 * len(notification(b"t", BIG)))
    bus.connect().deliver(publish(b"t", BIG) * 2)
    bus.pass_time(TIMEOUT_S)
    assert not reader.aborted
    bus.pass_time(0.25)
    assert reader.aborted


def test_pause_of_the_bus_does_not_count_for_a_reader(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    bus.pass_time(TIMEOUT_S - 0.25)
    bus.pause(10 * TIMEOUT_S)
    assert not reader.aborted
    bus.pass_time(TIMEOUT_S - 0.25)
    assert not reader.aborted
    bus.pass_time(0.25)
    assert reader.aborted


def test_bytes_in_the_send_queue_do_not_count_as_taken(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    bus.pass_time(0.25)
    reader.eat(int(RATE * TIMEOUT_S))
    reader.in_host = 1
    bus.pass_time(TIMEOUT_S)
    assert reader.aborted


def test_bytes_that_leave_the_send_queue_count_as_taken(bus: MemoryBus):
    """A slow reader empties a long queue of the host: the socket stands still meanwhile."""
    reader = full_reader(bus, b"t")
    reader.in_host = 10 * MARK
    bus.pass_time(0.25)
    reader.in_host -= int(RATE * TIMEOUT_S)
    bus.pass_time(TIMEOUT_S)
    assert not reader.aborted


def test_cut_is_logged_and_counts_lost_messages(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"x"))
    size = len(notification(b"t", BIG))
    reader.eat(size - 1)  # the first message is almost through: it is lost as well
    bus.pass_time(3 * TIMEOUT_S)
    assert bus.stats("dropped", "slow_consumer") == 2
    assert bus.stats("connections", "closed") == {"slow_consumer": 1}
    fields = {
        "level": "warning",
        "dialect": "rqueue",
        "peer": reader.peer,
        "reason": "slow_consumer",
        "messages_lost": 2,
    }
    assert bus.log.warnings() == [("connection cut", fields)]


def test_completely_sent_message_is_not_counted_as_lost(bus: MemoryBus):
    reader = full_reader(bus, b"t")
    reader.eat(len(notification(b"t", BIG)))
    bus.pass_time(3 * TIMEOUT_S)
    assert reader.aborted
    assert bus.stats("dropped", "slow_consumer") == 1


def test_cut_reader_unblocks_publishers_and_others_lose_nothing(bus: MemoryBus):
    stuck, healthy = full_reader(bus, b"t"), reader_of(bus, b"t")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"1"))
    bus.pass_time(2 * TIMEOUT_S)
    writer.deliver(publish(b"t", b"2"))
    assert stuck.aborted
    assert healthy.taken == notification(b"t", b"1") + notification(b"t", b"2")


def test_client_that_publishes_to_itself_without_reading_is_cut(bus: MemoryBus):
    pipe = reader_of(bus, b"t", appetite=0)
    pipe.deliver(publish(b"t", BIG) * 3)
    assert states(bus)[pipe.peer] == "full"
    pipe.deliver(publish(b"t", BIG))
    assert states(bus)[pipe.peer] == "waiting"
    assert not pipe.reading
    bus.pass_time(2 * TIMEOUT_S)
    assert pipe.aborted
    assert bus.stats("connections", "waiting") == 0
    assert bus.stats("dropped", "slow_consumer") == 3


def test_reader_over_outbox_max_bytes_is_cut_at_once():
    bus = MemoryBus(Limits(outbox_high_water_bytes=MARK, outbox_max_bytes=MARK))
    reader, healthy = reader_of(bus, b"t", appetite=0), reader_of(bus, b"t")
    bus.connect().deliver(publish(b"t", BIG) * 2)
    assert reader.aborted
    assert reasons(bus) == ["outbox_overflow"]
    assert bus.stats("dropped", "outbox_overflow") == 2
    assert healthy.taken == notification(b"t", BIG) * 2


def test_client_that_overflows_its_own_outbox_is_cut():
    """Its number in the fan-out is free then; its later frames must not act under that number."""
    bus = MemoryBus(Limits(outbox_high_water_bytes=MARK, outbox_max_bytes=MARK))
    pipe = reader_of(bus, b"t", appetite=0)
    pipe.deliver(publish(b"t", BIG) * 2 + subscribe(b"u") + publish(b"u", b"x"))
    assert pipe.aborted
    assert bus.stats("subscriptions") == 0
    assert bus.stats("messages", "received") == 2


def test_client_that_overflows_its_own_outbox_is_not_blocked():
    bus = MemoryBus(Limits(outbox_high_water_bytes=MARK, outbox_max_bytes=MARK + 300))
    full_reader(bus, b"other")
    pipe = reader_of(bus, b"t", appetite=0)
    pipe.deliver(publish(b"t", BIG) * 3 + publish(b"other", b"x"))
    assert pipe.aborted
    assert bus.stats("connections", "waiting") == 0
