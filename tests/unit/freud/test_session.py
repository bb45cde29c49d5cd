"""One Freud connection in memory: halts, stalls, disconnects and their effects.

Requests one by one, states and quotas are in tests/property/bus, against a model.
"""

from __future__ import annotations

import struct

import pytest

from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server.plain_session import MAX_UNSCANNED_BYTES, STEP_BYTES
from polybus.model.identity import Identity
from polybus.model.limits import Limits
from tests.rig import freud_client, rqueue_client
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    MALFORMED,
    NOTHING_HAPPENED,
    OK,
    Answer,
    create,
    delete,
    frame,
    get,
    list_topics,
    produce,
    subscribe,
    unsubscribe,
)
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe

ALICE = Identity(1, groups=frozenset())
MARK = 1000
TIMEOUT_S = 5.0
RATE = 100
LIMITS = Limits(
    outbox_high_water_bytes=MARK,
    outbox_max_bytes=100 * MARK,
    slow_consumer_min_bytes_per_s=RATE,
    slow_consumer_timeout_s=TIMEOUT_S,
)
EMPTY = len(freud_client.frame(OK))


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(LIMITS, freud=FreudLimits(max_frame_bytes=1 << 20))


class Speaker:
    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.pipe: MemoryPipe = bus.connect_freud(identity=ALICE)
        self._read = 0

    def send(self, *requests: bytes) -> None:
        self.pipe.deliver(b"".join(requests))
        self.bus.turn()

    def answers(self) -> list[Answer]:
        """Return the answers since the last call."""
        found, size = freud_client.answers_in(self.pipe.taken[self._read :])
        self._read += size
        return found

    def codes(self) -> list[int]:
        return [one.code for one in self.answers()]

    def ask(self, *requests: bytes) -> list[Answer]:
        self.send(*requests)
        return self.answers()

    def subscribe(self, name: bytes) -> bytes:
        (answer,) = self.ask(subscribe(name))
        assert answer.code == OK
        return answer.payload

    def end(self) -> None:
        self.pipe.hang_up()
        self.bus.turn()


@pytest.fixture
def owner(bus: MemoryBus) -> Speaker:
    """The creator of the topics t and u."""
    one = Speaker(bus)
    assert one.ask(create(b"t"), create(b"u")) == [(OK, b""), (OK, b"")]
    return one


def full_push_reader(bus: MemoryBus, *topics: bytes) -> MemoryPipe:
    """An rqueue reader that does not read and is over its high-water mark."""
    reader = bus.connect(appetite=0)
    reader.deliver(b"".join(rqueue_client.subscribe(topic) for topic in topics))
    bus.connect().deliver(rqueue_client.publish(topics[0], bytes(MARK)) * 2)
    bus.turn()
    return reader


def numbers(answers: list[Answer]) -> list[int]:
    return [struct.unpack_from("<I", one.payload)[0] for one in answers if one.code == OK]


# --- blocked by a full push reader -------------------------------------------


@pytest.mark.needs(dialect="rqueue")
def test_produce_waits_for_a_full_push_reader_and_later_requests_wait_too(
    bus: MemoryBus, owner: Speaker
):
    key = owner.subscribe(b"t")
    reader = full_push_reader(bus, b"t")
    producer = Speaker(bus)
    owner.ask(*(get(key) for _ in range(2)))
    assert producer.ask(produce(b"t", b"1"), produce(b"t", b"2"), list_topics()) == []
    assert owner.ask(get(key)) == [(NOTHING_HAPPENED, b"")]
    assert bus.stats("connections", "waiting") == 1
    reader.eat()
    bus.turn()
    assert producer.codes() == [OK, OK, OK]
    assert bus.broker.quotas.used(1, "quota_bytes") == 2  # charged once, however often it tried
    assert owner.ask(get(key), get(key)) == [(OK, b"1"), (OK, b"2")]
    assert bus.broker.quotas.used(1, "quota_bytes") == 0
    assert bus.stats("connections", "waiting") == 0
    expected = rqueue_client.notification(b"t", bytes(MARK)) * 2
    expected += rqueue_client.notification(b"t", b"1") + rqueue_client.notification(b"t", b"2")
    assert bytes(reader.taken) == expected


@pytest.mark.needs(dialect="rqueue")
def test_blocked_produce_is_counted_once_when_delivered(bus: MemoryBus, owner: Speaker):
    other = bus.connect(appetite=0)
    other.deliver(rqueue_client.subscribe(b"t"))
    reader = full_push_reader(bus, b"t")
    before = bus.stats("messages", "received")
    owner.send(produce(b"t", b"x"))
    for one in (reader, other):
        one.eat()
        bus.turn()
    assert owner.codes() == [OK]
    assert bus.stats("messages", "received") == before + 1


@pytest.mark.needs(dialect="rqueue")
def test_blocked_produces_of_a_closed_connection_are_dropped_and_counted(
    bus: MemoryBus, owner: Speaker
):
    """Produces to the full reader are dropped and counted; other requests are executed."""
    full_push_reader(bus, b"t", b"u")
    producer = Speaker(bus)
    producer.send(produce(b"t", b"1"), produce(b"u", b"2"), produce(b"t", b"3"), create(b"v"))
    producer.end()
    assert bus.stats("connections", "waiting") == 0
    assert bus.stats("dropped", "slow_consumer") == 3
    assert owner.ask(create(b"v")) == [(NOTHING_HAPPENED, b"")]


@pytest.mark.needs(dialect="rqueue")
def test_half_close_while_blocked_gets_all_answers(bus: MemoryBus, owner: Speaker):
    reader = full_push_reader(bus, b"t")
    producer = Speaker(bus)
    producer.send(produce(b"t", b"x"), list_topics())
    producer.pipe.shut_down()
    assert producer.codes() == []
    assert not producer.pipe.closed
    reader.eat()
    bus.turn()
    assert producer.codes() == [OK, OK]
    assert producer.pipe.closed


@pytest.mark.needs(dialect="rqueue")
def test_get_after_a_blocked_produce_ends_when_the_client_hangs_up(bus: MemoryBus, owner: Speaker):
    """A blocked Produce pauses reading; the waiting Get must resume it to notice a hang-up."""
    key = owner.subscribe(b"u")
    reader = full_push_reader(bus, b"t")
    producer = Speaker(bus)
    producer.send(produce(b"t", b"x"), get(key, FOR_EVER))
    assert not producer.pipe.reading
    reader.eat()
    bus.turn()
    assert producer.codes() == [OK]
    assert is_read_from(producer)
    producer.pipe.shut_down()
    assert producer.codes() == [NOTHING_HAPPENED]
    assert producer.pipe.closed


@pytest.mark.needs(dialect="rqueue")
def test_message_too_large_for_a_push_encoding_is_counted():
    """An rqueue message has at most 65535 parts, and a long name leaves little room in each."""
    from polybus.dialects.rqueue.limits import RqueueLimits

    bus = MemoryBus(LIMITS, RqueueLimits(max_payload=282))
    name, large = b"n" * 250, bytes(6 * 65535 + 1)
    owner = Speaker(bus)
    assert owner.ask(create(name)) == [(OK, b"")]
    key = owner.subscribe(name)
    readers = [bus.connect() for _ in range(2)]
    for reader in readers:
        reader.deliver(rqueue_client.subscribe(name))
    owner.send(produce(name, large), produce(name, b"x"))
    assert owner.codes() == [OK, OK]
    assert [bytes(reader.taken) for reader in readers] == [
        rqueue_client.notification(name, b"x")
    ] * 2
    assert bus.stats("dropped") == {"too_large": 2}
    assert owner.ask(get(key)) == [(OK, large)]


@pytest.mark.needs(dialect="rqueue")
def test_disconnecting_a_slow_reader_unblocks_the_producer(bus: MemoryBus, owner: Speaker):
    full_push_reader(bus, b"t")
    owner.send(produce(b"t", b"x"))
    bus.pass_time(2 * TIMEOUT_S)
    assert owner.codes() == [NOTHING_HAPPENED]


# --- stalled -----------------------------------------------------------------


def test_stalled_connection_executes_no_further_requests(bus: MemoryBus, owner: Speaker):
    stuck = Speaker(bus)
    stuck.pipe.appetite = 0
    stuck.send(list_topics())
    stuck.send(create(b"later"))
    assert owner.ask(create(b"later")) == [(OK, b"")]
    stuck.pipe.eat()
    bus.turn()
    assert stuck.codes() == [OK, NOTHING_HAPPENED]


def is_read_from(speaker: Speaker) -> bool:
    return speaker.pipe.reading


def test_halted_connection_stops_reading_its_socket(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    waiting = Speaker(bus)
    waiting.send(get(key, FOR_EVER))
    behind = list_topics() * (MAX_UNSCANNED_BYTES // len(list_topics()))
    waiting.send(behind)
    assert is_read_from(waiting)
    waiting.send(list_topics())
    assert not is_read_from(waiting)
    owner.ask(produce(b"t", b"go on"))
    assert is_read_from(waiting)
    assert waiting.pipe.unread == 0
    assert len(waiting.codes()) == 1 + len(behind) // len(list_topics()) + 1


def test_hang_up_ends_a_waiting_get_while_reading_is_paused(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    waiting = Speaker(bus)
    waiting.send(get(key, FOR_EVER), list_topics() * MAX_UNSCANNED_BYTES, get(key, 99))
    assert not waiting.pipe.reading
    waiting.pipe.hung_up()
    bus.turn()
    codes = waiting.codes()
    assert (codes[0], codes[-1]) == (NOTHING_HAPPENED, NOTHING_HAPPENED)
    assert len(codes) == MAX_UNSCANNED_BYTES + 2


def test_message_is_consumed_once_its_whole_answer_is_in_the_socket(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    owner.ask(*(produce(b"t", b"%d" % at) for at in range(4)))
    stuck = Speaker(bus)
    stuck.pipe.appetite = 2 * (EMPTY + 1) + EMPTY  # two answers, and the third but its body
    stuck.send(*(get(key) for _ in range(4)))
    assert bus.broker.quotas.used(1, "quota_bytes") == 2
    stuck.end()
    assert owner.ask(get(key), get(key), get(key)) == [
        (OK, b"2"),
        (OK, b"3"),
        (NOTHING_HAPPENED, b""),
    ]


def test_partial_answers_of_records_and_messages_are_unread_again(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    owner.ask(*(produce(b"t", b"%d" % at) for at in range(3)))
    stuck = Speaker(bus)
    stuck.pipe.appetite = (EMPTY + 1) + (EMPTY + 20 + 1) - 1
    stuck.send(get(key), freud_client.get_record(key), get(key))
    stuck.end()
    assert owner.ask(get(key), get(key)) == [(OK, b"1"), (OK, b"2")]


def test_stalled_client_continues_at_the_next_answer(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    total, size = 100, STEP_BYTES // 20
    for at in range(total):
        owner.ask(produce(b"t", struct.pack("<I", at) + bytes(size)))
    slow = Speaker(bus)
    slow.pipe.appetite = 0
    slow.send(*(get(key) for _ in range(total)), list_topics())
    assert slow.pipe.backlog_bytes() < 2 * STEP_BYTES  # and not all at once
    while slow.pipe.backlog_bytes():
        slow.pipe.eat(STEP_BYTES // 3)
        bus.turn()
    assert numbers(slow.answers()[:total]) == list(range(total))


# --- given back --------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 70])
def test_returned_messages_are_read_in_order(bus: MemoryBus, owner: Speaker, together: int):
    """Also by a waiting Get, and also from many chunks."""
    key = owner.subscribe(b"t")
    total = 280
    for start in range(0, total, together):
        batch = range(start, start + together)
        owner.ask(*(produce(b"t", struct.pack("<I", at) + bytes(400)) for at in batch))
    stuck, waiting = Speaker(bus), Speaker(bus)
    stuck.pipe.appetite = 0
    stuck.send(*(get(key) for _ in range(total)))
    waiting.send(*(get(key, FOR_EVER) for _ in range(total)))
    assert waiting.answers() == []
    stuck.end()
    assert numbers(waiting.answers()) == list(range(total))


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_connections_return_messages_to_one_subscription_in_any_order(
    bus: MemoryBus, owner: Speaker, first_to_end: int
):
    key = owner.subscribe(b"t")
    owner.ask(*(produce(b"t", b"%d" % at) for at in range(6)))
    stuck = [Speaker(bus), Speaker(bus)]
    for one in stuck:
        one.pipe.appetite = 0
        one.send(get(key), get(key))
    stuck.pop(first_to_end).end()
    stuck.pop().end()
    expected = [(OK, b"%d" % at) for at in range(6)]
    assert owner.ask(*(get(key) for _ in range(6))) == expected


def test_broken_connection_does_not_consume_the_message_that_wakes_it(
    bus: MemoryBus, owner: Speaker
):
    """A write fails: the next waiting Get receives the message."""
    key = owner.subscribe(b"t")
    dead, alive = Speaker(bus), Speaker(bus)
    dead.send(get(key, FOR_EVER), get(key, FOR_EVER))
    alive.send(get(key, FOR_EVER))
    dead.pipe.broken = True
    owner.ask(produce(b"t", b"x"))
    assert alive.answers() == [(OK, b"x")]
    dead.end()
    assert bus.broker.quotas.used(1, "quota_bytes") == 0


# --- the end -----------------------------------------------------------------


def test_produce_passes_a_thousand_broken_waiting_connections(bus: MemoryBus, owner: Speaker):
    """The message passes from one broken connection to the next without recursion."""
    key = owner.subscribe(b"t")
    crowd = [Speaker(bus) for _ in range(1000)]
    for one in crowd:
        one.send(get(key, FOR_EVER))
        one.pipe.broken = True
    last = Speaker(bus)
    last.send(get(key, FOR_EVER), get(key, FOR_EVER))
    assert owner.ask(produce(b"t", b"x")) == [(OK, bytes(8))]
    assert last.answers() == [(OK, b"x")]
    assert owner.ask(unsubscribe(key)) == [(OK, b"")]
    assert last.answers() == [(DOESNT_EXIST, b"")]


def test_disconnected_client_has_its_requests_executed_except_gets(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    owner.ask(produce(b"t", b"kept"))
    gone = Speaker(bus)
    gone.send(get(owner.subscribe(b"u"), FOR_EVER))
    gone.send(get(key), create(b"new"), produce(b"t", b"more"), subscribe(b"t"))
    gone.end()
    assert owner.ask(create(b"new")) == [(NOTHING_HAPPENED, b"")]
    assert owner.ask(get(key), get(key)) == [(OK, b"kept"), (OK, b"more")]
    assert freud_client.number(owner.ask(freud_client.count(b"t"))[0]) == 2
    bus.pass_time(FreudLimits().detached_subscription_s + 1)
    assert (
        freud_client.number(owner.ask(freud_client.count(b"t"))[0]) == 1
    )  # no other connection used it


def test_requests_after_an_oversized_one_are_not_executed(bus: MemoryBus, owner: Speaker):
    offender = Speaker(bus)
    offender.send(list_topics(), struct.pack("<II", 0, 1 << 21), create(b"after"))
    assert offender.codes() == [OK, MALFORMED]
    assert offender.pipe.closed
    offender.send(create(b"after"))
    offender.end()
    assert owner.ask(create(b"after")) == [(OK, b"")]
    assert bus.stats("connections", "closed", "too_large") == 1
    assert bus.stats("refused", "malformed_too_large") == 1


def test_answered_get_cancels_its_timer(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    waiting = Speaker(bus)
    waiting.send(get(key, 10), get(key, 10))
    bus.pass_time(9)
    owner.ask(produce(b"t", b"x"))
    assert waiting.answers() == [(OK, b"x")]
    bus.pass_time(9)  # the second began when the first was done
    assert waiting.answers() == []
    bus.pass_time(1)
    assert waiting.answers() == [(NOTHING_HAPPENED, b"")]
    waiting.send(get(key, 10))
    waiting.end()
    bus.pass_time(20)
    assert waiting.answers() == []


def test_woken_connection_continues_after_the_producer_that_woke_it(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    waiting = Speaker(bus)
    waiting.send(get(key, FOR_EVER), delete(b"u"))
    assert [one.code for one in owner.ask(produce(b"t", b"x"), subscribe(b"u"))] == [OK, OK]
    assert waiting.codes() == [OK, OK]


def test_waiting_gets_are_served_before_queued_ones(bus: MemoryBus, owner: Speaker):
    key = owner.subscribe(b"t")
    first, second = Speaker(bus), Speaker(bus)
    first.send(get(key, FOR_EVER), get(key, FOR_EVER))
    second.send(get(key, FOR_EVER))
    owner.send(produce(b"t", b"1"), produce(b"t", b"2"))
    assert first.answers() == [(OK, b"1")]
    assert second.answers() == [(OK, b"2")]
    owner.send(produce(b"t", b"3"))
    assert first.answers() == [(OK, b"3")]


def test_malformed_requests_are_counted_by_reason(bus: MemoryBus, owner: Speaker):
    requests = [frame(99), create(b""), create(b"a,b"), frame(6, b"x"), frame(3)]
    assert [one.code for one in owner.ask(*requests)] == [MALFORMED] * 5
    refused = bus.stats("refused")
    expected = {"unknown_type": 1, "bad_name": 2, "trailing_bytes": 1, "truncated": 1}
    assert refused == {f"malformed_{reason}": n for reason, n in expected.items()}


# --- clients that never read -------------------------------------------------


def cuts(bus: MemoryBus) -> list[str]:
    return [str(fields["reason"]) for event, fields in bus.log.warnings() if "cut" in event]


def stalled(bus: MemoryBus, size: int, in_host: int = 0) -> Speaker:
    """A connection with `size` bytes of answers that it does not read."""
    owner = Speaker(bus)
    owner.ask(create(b"stall"))
    key = owner.subscribe(b"stall")
    owner.ask(produce(b"stall", bytes(size - EMPTY)))
    stuck = Speaker(bus)
    stuck.pipe.appetite = 0
    stuck.pipe.in_host = in_host
    stuck.send(get(key))
    assert stuck.pipe.backlog_bytes() == size
    return stuck


def test_client_that_reads_nothing_is_disconnected_at_the_timeout(bus: MemoryBus):
    stuck = stalled(bus, 10_000)
    bus.pass_time(TIMEOUT_S - 0.25)
    assert cuts(bus) == []
    bus.pass_time(0.25)
    assert cuts(bus) == ["slow_consumer"]
    assert stuck.pipe.aborted
    assert bus.stats("connections", "closed", "slow_consumer") == 1


def test_client_above_the_minimum_rate_is_not_disconnected(bus: MemoryBus):
    stuck = stalled(bus, 10_000)
    for _ in range(3):
        stuck.pipe.eat(int(RATE * TIMEOUT_S))
        bus.pass_time(TIMEOUT_S)
    assert cuts(bus) == []
    stuck.pipe.eat(int(RATE * TIMEOUT_S) - 1)
    bus.pass_time(TIMEOUT_S)
    assert cuts(bus) == ["slow_consumer"]


def test_fast_first_window_does_not_count_for_the_next(bus: MemoryBus):
    stuck = stalled(bus, 10_000)
    stuck.pipe.eat(9_000)
    bus.pass_time(TIMEOUT_S)
    assert cuts(bus) == []
    bus.pass_time(TIMEOUT_S)
    assert cuts(bus) == ["slow_consumer"]


def test_bytes_read_from_the_socket_queue_count_as_progress(bus: MemoryBus):
    """The socket queue empties first; until then the outbox of the bus does not shrink."""
    stuck = stalled(bus, 10_000, in_host=1000)
    for _ in range(2):
        stuck.pipe.in_host -= int(RATE * TIMEOUT_S)
        bus.pass_time(TIMEOUT_S)
        assert cuts(bus) == []
    bus.pass_time(TIMEOUT_S)
    assert cuts(bus) == ["slow_consumer"]


def test_reading_all_answers_restarts_the_timeout(bus: MemoryBus):
    stuck = stalled(bus, 100)
    bus.pass_time(TIMEOUT_S - 0.25)
    stuck.pipe.eat(100)
    stuck.send(list_topics())
    assert stuck.pipe.backlog_bytes()
    bus.pass_time(TIMEOUT_S - 0.25)
    assert cuts(bus) == []
    bus.pass_time(0.5)
    assert cuts(bus) == ["slow_consumer"]


def test_pause_of_the_bus_does_not_count_for_a_client(bus: MemoryBus):
    stuck = stalled(bus, 10_000, in_host=1000)
    bus.pass_time(TIMEOUT_S - 0.25)
    stuck.pipe.in_host = 0  # it has taken all bytes that the bus offered
    bus.pause(10 * TIMEOUT_S)
    bus.pass_time(TIMEOUT_S - 0.25)
    assert cuts(bus) == []
    bus.pass_time(0.25)
    assert cuts(bus) == ["slow_consumer"]


def test_few_unread_bytes_at_the_timeout_disconnect_too(bus: MemoryBus):
    stalled(bus, 20)
    bus.pass_time(TIMEOUT_S)
    assert cuts(bus) == ["slow_consumer"]


def test_unsubscribe_releases_the_quota_of_an_answer_in_flight(bus: MemoryBus, owner: Speaker):
    """The quota is released at once, and not again when the other connection ends."""
    key = owner.subscribe(b"t")
    owner.ask(produce(b"t", b"12345"), produce(b"t", b"67890"))
    stuck = Speaker(bus)
    stuck.pipe.appetite = 0
    stuck.send(get(key))
    assert owner.ask(unsubscribe(key)) == [(OK, b"")]
    assert bus.broker.quotas.used(1, "quota_bytes") == 0
    assert bus.stats("dropped") == {"unsubscribed": 1}
    stuck.end()
    assert bus.stats("dropped") == {"unsubscribed": 1, "disconnected": 1}
    assert owner.ask(get(key)) == [(DOESNT_EXIST, b"")]
