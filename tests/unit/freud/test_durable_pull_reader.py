"""Pull readers of durable topics: a position in the log, and the messages fetched from it."""

from __future__ import annotations

import pytest

from polybus.dialects.freud.limits import FreudLimits
from polybus.dialects.freud.server import durable_pull_reader
from polybus.model.identity import Identity
from polybus.model.limits import QuotaLimits
from tests.rig.freud_client import (
    DOESNT_EXIST,
    FOR_EVER,
    NOTHING_HAPPENED,
    NOTICE,
    NOTICE_FLAG,
    OK,
    Answer,
    answers_in,
    count,
    get,
    get_record,
    number,
    produce,
    record,
    subscribe,
    unsubscribe,
)
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.rqueue_client import publish
from tests.rig.rqueue_client import subscribe as push

ALICE = Identity(1, groups=frozenset(), service="a")
NOTHING = Answer(NOTHING_HAPPENED)

pytestmark = pytest.mark.needs(dialect="rqueue")  # an rqueue client publishes


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(durable=True)


def answers(pipe: MemoryPipe) -> list[Answer]:
    found, size = answers_in(pipe.taken)
    assert size == len(pipe.taken)
    pipe.taken.clear()
    return found


def ask(bus: MemoryBus, client: MemoryPipe, *requests: bytes) -> list[Answer]:
    client.deliver(b"".join(requests))
    bus.settle()
    return answers(client)


def reader_of(bus: MemoryBus, client: MemoryPipe, name: bytes = b"t") -> bytes:
    (answer,) = ask(bus, client, subscribe(name))
    assert answer.code == OK
    return answer.payload


def write(bus: MemoryBus, *bodies: bytes) -> None:
    bus.connect().deliver(b"".join(publish(b"t", body) for body in bodies))
    bus.settle()


# --- getting -------------------------------------------------------------------


def test_get_returns_messages_committed_since_the_subscribe(bus: MemoryBus):
    bus.make("t")
    write(bus, b"before")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    assert ask(bus, client, get(me)) == [NOTHING]
    write(bus, b"a", b"b")
    assert ask(bus, client, get(me), get(me), get(me)) == [
        Answer(OK, b"a"),
        Answer(OK, b"b"),
        NOTHING,
    ]


def test_get_does_not_return_uncommitted_messages(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    bus.connect().deliver(publish(b"t", b"a"))
    client.deliver(get(me))
    bus.turn()
    assert answers(client) == [NOTHING]


def test_commit_wakes_a_waiting_get(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    client.deliver(get(me, FOR_EVER))
    bus.settle()
    assert answers(client) == []
    write(bus, b"a")
    assert answers(client) == [Answer(OK, b"a")]


def test_commit_event_before_the_writers_answer_wakes_readers(bus: MemoryBus):
    """Engines call commit listeners first, before the registry knows the new end of the log."""
    topic = bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    client.deliver(get(me, FOR_EVER))
    bus.settle()
    bus.connect().deliver(publish(b"t", b"a"))
    commit, future = bus.store.waiting.popleft()
    super(type(bus.store), bus.store).commit(commit).result()
    assert bus.durable.topics.next_id(topic) == 1
    bus.settle()
    assert answers(client) == [Answer(OK, b"a")]
    assert not future.done()


def test_get_waits_at_most_its_timeout(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    client.deliver(get(me, 5))
    bus.pass_time(4.5)
    assert answers(client) == []
    bus.pass_time(1)
    assert answers(client) == [NOTHING]


def test_messages_beyond_one_fetch_are_complete_and_in_order(bus: MemoryBus):
    bus.make("t", shards=3)
    client = bus.connect_freud()
    me = reader_of(bus, client)
    sent = [b"%d" % at for at in range(3 * durable_pull_reader.AHEAD_MESSAGES)]
    write(bus, *sent[:2000])
    write(bus, *sent[2000:])
    got = ask(bus, client, *(get(me) for _ in range(len(sent) + 1)))
    assert got == [Answer(OK, body) for body in sent] + [NOTHING]


def test_prefetched_bytes_of_a_reader_are_bounded(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud(identity=ALICE)
    me = reader_of(bus, client)
    write(bus, *(bytes(1000) for _ in range(3000)))
    assert len(ask(bus, client, get(me))) == 1
    held = bus.broker.quotas.used(1, "quota_bytes")
    assert 0 < held <= durable_pull_reader.AHEAD_MESSAGES * 1000


def test_records_have_the_ids_and_timestamps_of_the_log(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    write(bus, b"before")
    me = reader_of(bus, client)
    write(bus, b"a")
    bus.now_s += 10
    write(bus, b"b")
    found = [record(one) for one in ask(bus, client, get_record(me), get_record(me))]
    times = list(memoryview(bus.store.read(topic.number, 0, 1).timestamps_ns).cast("B").cast("q"))
    assert [(one.id, one.timestamp_ns, one.body) for one in found] == [
        (2, times[0], b"a"),
        (3, times[1], b"b"),
    ]


def test_get_on_the_same_connection_returns_the_produced_message(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    kept, got = ask(bus, client, produce(b"t", b"a"), get(me))
    assert number(kept) == 1
    assert got == Answer(OK, b"a")


# --- giving back, ending ---------------------------------------------------------


def test_messages_not_written_to_the_socket_become_unread_again(bus: MemoryBus):
    bus.make("t")
    first = bus.connect_freud(appetite=10_000, identity=ALICE)
    me = reader_of(bus, first)
    write(bus, b"a", b"b")
    first.appetite = 0
    first.deliver(get(me))
    bus.settle()
    first.hang_up()
    second = bus.connect_freud(identity=ALICE)
    assert ask(bus, second, get(me), get(me)) == [Answer(OK, b"a"), Answer(OK, b"b")]


def test_stalled_connection_does_not_block_another_on_the_same_subscription(
    bus: MemoryBus,
):
    bus.make("t")
    slow = bus.connect_freud(appetite=1000, identity=ALICE)
    me = reader_of(bus, slow)
    many = durable_pull_reader.AHEAD_MESSAGES
    write(bus, *(b"%d" % at for at in range(many + 1)))
    assert ask(bus, slow, get(me)) == [Answer(OK, b"0")]
    slow.appetite = 0
    slow.deliver(get(me) * (many - 1))  # all that is fetched ahead, and not taken by its client
    bus.settle()
    quick = bus.connect_freud(identity=ALICE)
    assert ask(bus, quick, get(me)) == [Answer(OK, b"%d" % many)]


def test_reader_without_a_connection_expires(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud(identity=ALICE)
    me = reader_of(bus, client)
    client.hang_up()
    bus.pass_time(FreudLimits().detached_subscription_s + 1)
    other = bus.connect_freud(identity=ALICE)
    assert ask(bus, other, get(me)) == [Answer(DOESNT_EXIST)]
    assert bus.topics.durable_readers is not None
    assert bus.topics.durable_readers.count(topic) == 0
    assert bus.broker.quotas.used(1, "quota_subscriptions") == 0


def test_unsubscribe_during_a_fetch_ends_the_waiting_get(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud(identity=ALICE)
    me = reader_of(bus, client)
    write(bus, b"a")
    waiting = bus.connect_freud(identity=ALICE)
    waiting.deliver(get(me))
    assert bus.reads == 1
    client.deliver(unsubscribe(me))
    bus.settle()
    assert answers(waiting) == [Answer(DOESNT_EXIST)]
    assert bus.broker.quotas.used(1, "quota_bytes") == 0


# --- quotas and trimming -----------------------------------------------------------


def test_full_quota_delays_messages_and_loses_none():
    bus = MemoryBus(quotas=QuotaLimits(quota_bytes=1000), durable=True)
    bus.make("t")
    client = bus.connect_freud(appetite=100_000, identity=ALICE)
    first, second = reader_of(bus, client), reader_of(bus, client)
    bodies = [b"%d" % at + bytes(400) for at in range(5)]
    write(bus, *bodies)
    client.appetite = 0
    client.deliver(get(first) * 2)  # two of them fill the quota
    bus.settle()
    other = bus.connect_freud(identity=ALICE)
    assert ask(bus, other, get(second)) == [NOTHING]
    other.deliver(get(second, 60))
    bus.settle()
    assert bus.reads == 0  # no reader polls
    client.eat()
    bus.pass_time(1)
    bus.settle()
    assert [one.payload for one in answers(other)] == bodies[:1]


def test_reader_skips_trimmed_messages(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    many = 2 * durable_pull_reader.AHEAD_MESSAGES
    write(bus, *(b"%d" % at for at in range(many + 1)))
    bus.store.trim(topic.number, {0: many})
    assert ask(bus, client, get(me)) == [Answer(OK, b"%d" % many)]
    write(bus, b"gone")
    bus.store.trim(topic.number, {0: many + 2})
    assert ask(bus, client, get(me)) == [NOTHING]


def test_trimmed_message_does_not_shift_later_ids(bus: MemoryBus):
    topic = bus.make("t", shards=2)
    client = bus.connect_freud()
    me = reader_of(bus, client)
    for body in (b"a", b"b", b"c"):  # to the shards in turn
        write(bus, body)
    bus.store.trim(topic.number, {1: 1})
    found = [record(one) for one in ask(bus, client, get_record(me), get_record(me))]
    assert [(one.id, one.body) for one in found] == [(1, b"a"), (3, b"c")]


# --- the topic itself ----------------------------------------------------------------


def test_count_counts_readers_of_every_kind(bus: MemoryBus):
    bus.make("t")
    client = bus.connect_freud()
    reader_of(bus, client)
    slow = bus.connect(appetite=0)
    slow.deliver(push(b"t"))
    bus.connect().deliver(push(b"t"))
    assert [number(one) for one in ask(bus, client, count(b"t"))] == [3]


def test_dropped_topic_ends_with_the_deletion_notice(bus: MemoryBus):
    topic = bus.make("t")
    client, waiting = bus.connect_freud(identity=ALICE), bus.connect_freud(identity=ALICE)
    me, other = reader_of(bus, client), reader_of(bus, client)
    waiting.deliver(get(other, FOR_EVER))
    write(bus, b"a")
    assert answers(waiting) == [Answer(OK, b"a")]
    waiting.deliver(get(other, FOR_EVER))
    client.deliver(get(me))
    assert bus.reads == 1
    bus.read()
    bus.drop(topic)
    bus.settle()
    assert answers(waiting) == [Answer(OK, NOTICE + b"t")]
    got = answers(client) + ask(bus, client, get(me))
    assert Answer(OK, NOTICE + b"t") in got
    assert got[-1] == Answer(DOESNT_EXIST)
    assert ask(bus, client, subscribe(b"t")) == [Answer(DOESNT_EXIST)]


def test_deletion_notice_has_its_flag(bus: MemoryBus):
    topic = bus.make("t")
    client = bus.connect_freud()
    me = reader_of(bus, client)
    bus.drop(topic)
    found = record(ask(bus, client, get_record(me))[0])
    assert (found.flags, found.body) == (NOTICE_FLAG, NOTICE + b"t")
