"""Push readers of durable topics: order, start, catch-up and back-pressure.

The disk and the threads that read are steps here, so every interleaving can be driven.
"""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polybus.bus.rule_table import PlacedRule
from polybus.dialects.rqueue.limits import RqueueLimits
from polybus.durable import push_readers
from polybus.errors import StoreFault
from polybus.model.access_rule import Rule
from polybus.model.limits import Limits
from polybus.model.rows import Rows
from tests.rig import freud_client
from tests.rig.call_count import count_calls
from tests.rig.memory_bus import MemoryBus
from tests.rig.memory_pipe import MemoryPipe
from tests.rig.rqueue_client import (
    NOTIFICATION,
    deregister,
    notification,
    publish,
    publish_part,
    remove,
    subscribe,
)

MARK = 1000
LIMITS = Limits(outbox_high_water_bytes=MARK, outbox_max_bytes=100 * MARK)
BIG = bytes(600)  # two of these are over the mark


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(LIMITS, durable=True)


def reader_of(bus: MemoryBus, topic: bytes = b"t", appetite: int | None = None) -> MemoryPipe:
    pipe = bus.connect(appetite)
    pipe.deliver(subscribe(topic))
    return pipe


def bodies(pipe: MemoryPipe) -> list[bytes]:
    """Return the bodies of the complete notifications that the far end has received."""
    found, data = [], bytes(pipe.taken)
    while len(data) >= 5:
        size, kind = struct.unpack_from(">IB", data)
        if len(data) < 5 + size:
            break
        assert kind == NOTIFICATION
        found.append(data[5 + 1 + data[5] : 5 + size])
        data = data[5 + size :]
    return found


def full_reader(bus: MemoryBus, writer: MemoryPipe) -> MemoryPipe:
    """Return a reader over its high-water mark, so that it lags at the next message."""
    reader = reader_of(bus, appetite=0)
    writer.deliver(publish(b"t", BIG) * 2)
    bus.settle()
    return reader


# --- after the commit, from the end ------------------------------------------


def test_message_is_visible_only_after_its_commit(bus: MemoryBus):
    bus.make("t")
    reader, writer = reader_of(bus), bus.connect()
    writer.deliver(publish(b"t", b"x"))
    bus.turn()
    assert bodies(reader) == []
    assert len(bus.store.waiting) == 1
    bus.commit()
    bus.turn()
    assert bodies(reader) == []
    bus.read()
    bus.turn()
    assert bodies(reader) == [b"x"]


def test_publisher_gets_its_own_messages(bus: MemoryBus):
    bus.make("t")
    both = reader_of(bus)
    both.deliver(publish(b"t", b"x"))
    bus.settle()
    assert bytes(both.taken) == notification(b"t", b"x")


def test_one_buffer_is_one_commit_per_topic(bus: MemoryBus):
    bus.make("t")
    bus.make("u")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"a") + publish(b"u", b"b") + publish(b"t", b"c"))
    assert len(bus.store.waiting) == 2


def test_reader_starts_at_the_end_as_of_its_subscribe(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    writer.deliver(publish(b"t", b"before"))
    bus.settle()
    reader = reader_of(bus)
    writer.deliver(publish(b"t", b"after"))
    bus.settle()
    assert bodies(reader) == [b"after"]


def test_reader_that_joins_while_the_tail_is_behind_gets_no_older_messages(bus: MemoryBus):
    bus.make("t")
    first, writer = reader_of(bus), bus.connect()
    writer.deliver(publish(b"t", b"one"))
    bus.commit()
    bus.turn()  # the tail is about to read
    second = reader_of(bus)
    writer.deliver(publish(b"t", b"two"))
    bus.settle()
    assert bodies(first) == [b"one", b"two"]
    assert bodies(second) == [b"two"]


def test_read_past_a_joining_readers_start_loses_nothing(bus: MemoryBus):
    """The read was asked for before it joined, and is done after the next commit."""
    bus.make("t")
    first, writer = reader_of(bus), bus.connect()
    writer.deliver(publish(b"t", b"one"))
    bus.commit()
    bus.turn()
    assert bus.reads == 1
    second = reader_of(bus)
    writer.deliver(publish(b"t", b"two"))
    bus.commit()  # visible before the read is done
    bus.settle()
    assert bodies(first) == [b"one", b"two"]
    assert bodies(second) == [b"two"]


def test_rows_read_for_former_readers_do_not_reach_new_ones(bus: MemoryBus):
    bus.make("t")
    first, writer = reader_of(bus), bus.connect()
    writer.deliver(publish(b"t", b"old"))
    bus.commit()
    bus.turn()
    first.deliver(remove(b"t"))
    second = reader_of(bus)
    bus.settle()
    assert bodies(second) == []
    writer.deliver(publish(b"t", b"new"))
    bus.settle()
    assert bodies(second) == [b"new"]


def test_commit_between_an_empty_read_and_its_result_is_read(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    bus.make("t")
    reader, writer = reader_of(bus), bus.connect()
    read, late = bus.store.read, [b"two"]

    def then_commit(*where: int, **bounds: int) -> Rows:
        rows = read(*where, **bounds)
        if not rows.count and late:
            writer.deliver(publish(b"t", late.pop()))
            bus.commit()
        return rows

    monkeypatch.setattr(bus.store, "read", then_commit)
    writer.deliver(publish(b"t", b"one"))
    bus.settle()
    assert bodies(reader) == [b"one", b"two"]


def test_join_of_a_completely_trimmed_topic(bus: MemoryBus):
    topic = bus.make("t")
    reader_of(bus)
    writer = bus.connect()
    writer.deliver(publish(b"t", b"one"))
    bus.commit()
    bus.turn()
    second = reader_of(bus)
    bus.store.trim(topic.number, {0: 1})
    bus.settle()
    writer.deliver(publish(b"t", b"two"))
    bus.settle()
    assert bodies(second) == [b"two"]


def test_shards_are_read_in_id_order(bus: MemoryBus):
    bus.make("t", shards=4)
    reader, writer = reader_of(bus), bus.connect()
    for number in range(20):
        writer.deliver(publish(b"t", b"%d" % number))
    bus.settle()
    assert bodies(reader) == [b"%d" % number for number in range(20)]


# --- full readers -------------------------------------------------------------


def test_full_reader_blocks_no_other_and_gets_all_in_order(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    slow, quick = full_reader(bus, writer), reader_of(bus)
    sent = [b"%d" % number for number in range(50)]
    for body in sent:
        writer.deliver(publish(b"t", body))
        bus.settle()
    assert writer.reading
    assert bodies(quick) == sent
    assert bodies(slow) == []
    slow.eat()
    bus.settle()
    assert bodies(slow) == [BIG, BIG, *sent]
    writer.deliver(publish(b"t", b"last"))
    bus.settle()
    assert bodies(slow)[-1] == bodies(quick)[-1] == b"last"


def test_caught_up_reader_joins_the_tail(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    slow = full_reader(bus, writer)
    writer.deliver(publish(b"t", b"x"))
    bus.settle()
    slow.eat()
    bus.settle()
    writer.deliver(publish(b"t", b"y"))
    bus.commit()
    bus.turn()
    assert bus.reads == 1  # the tail's alone


def test_readers_behind_the_tail_advance_independently(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    slow = [reader_of(bus, appetite=0) for _ in range(3)]
    sent = [BIG, BIG]
    writer.deliver(publish(b"t", BIG) * 2)
    bus.settle()
    for number in range(60):
        sent.append(b"%d" % number + bytes(100))
        writer.deliver(publish(b"t", sent[-1]))
        slow[number % 3].eat(number * 20)
        bus.settle()
    for reader in slow:
        reader.eat()
        bus.settle()
        assert bodies(reader) == sent


def test_reader_behind_the_tail_skips_trimmed_messages(bus: MemoryBus):
    topic = bus.make("t")
    writer = bus.connect()
    slow = full_reader(bus, writer)
    writer.deliver(publish(b"t", b"lost") * 5)
    bus.settle()
    bus.store.trim(topic.number, {0: 7})
    slow.eat()
    bus.settle()
    writer.deliver(publish(b"t", b"next"))
    bus.settle()
    assert bodies(slow) == [BIG, BIG, b"next"]


@pytest.mark.parametrize("goodbye", [remove(b"t"), deregister()])
def test_unsubscribe_of_a_reader_behind_the_tail(bus: MemoryBus, goodbye: bytes):
    topic = bus.make("t")
    writer = bus.connect()
    slow = full_reader(bus, writer)
    writer.deliver(publish(b"t", b"x"))
    bus.settle()
    slow.eat(MARK)
    bus.turn()
    slow.deliver(goodbye)
    slow.eat()
    bus.settle()
    assert bodies(slow) == [BIG, BIG]
    assert bus.durable.push_readers.count(topic) == 0


@pytest.mark.parametrize("how", ["hang_up", "shut_down"])
def test_disconnect_of_joining_and_behind_readers(bus: MemoryBus, how: str):
    topic = bus.make("t")
    writer = bus.connect()
    slow, quick = full_reader(bus, writer), reader_of(bus)
    writer.deliver(publish(b"t", b"x"))
    bus.commit()
    bus.turn()
    joining = reader_of(bus)
    getattr(joining, how)()
    getattr(slow, how)()
    bus.settle()
    assert bodies(quick) == [b"x"]
    assert bus.durable.push_readers.count(topic) == 1


@pytest.mark.parametrize("how", ["hang_up", "deregister"])
def test_cost_of_a_leave_does_not_grow_with_the_tails_of_others(how: str):
    def calls_of_a_leave(topics: int) -> int:
        bus = MemoryBus(LIMITS, durable=True)
        other, reader = bus.connect(), reader_of(bus)
        for number in range(topics):
            bus.make(f"t{number}")
            other.deliver(subscribe(b"t%d" % number))
        reader.deliver(subscribe(b"t0"))
        if how == "hang_up":
            return count_calls(reader.hang_up)
        return count_calls(lambda: reader.deliver(deregister()))

    assert calls_of_a_leave(200) == calls_of_a_leave(2)


def test_cost_of_room_does_not_grow_with_the_tails_of_others():
    def calls_of_room(topics: int) -> int:
        bus = MemoryBus(LIMITS, durable=True)
        bus.make("t")
        writer, other = bus.connect(), bus.connect()
        for number in range(topics):
            bus.make(f"t{number}")
            other.deliver(subscribe(b"t%d" % number))
        slow = full_reader(bus, writer)
        writer.deliver(publish(b"t", b"x"))
        bus.settle()
        return count_calls(slow.eat)

    assert calls_of_room(200) == calls_of_room(2)


def test_reader_behind_several_tails_catches_up_with_each(bus: MemoryBus):
    for name in ("t", "u", "v"):
        bus.make(name)
    writer = bus.connect()
    slow = full_reader(bus, writer)
    for topic in (b"u", b"v"):
        slow.deliver(subscribe(topic))
    for topic in (b"t", b"u", b"v"):
        writer.deliver(publish(topic, b"to " + topic))
        bus.settle()
    slow.deliver(remove(b"u"))
    slow.eat()
    bus.settle()
    assert sorted(bodies(slow)) == sorted([BIG, BIG, b"to t", b"to v"])


def test_revoked_reader_behind_the_tail_gets_no_more():
    bus = MemoryBus(LIMITS, durable=True)
    bus.make("t")
    writer = bus.connect()
    slow = full_reader(bus, writer)
    writer.deliver(publish(b"t", b"secret"))
    bus.settle()
    bus.broker.policy.replace([PlacedRule(Rule.parse("deny anonymous subscribe t"), "test", None)])
    slow.eat()
    bus.settle()
    assert bodies(slow) == [BIG, BIG]


@pytest.mark.parametrize("is_behind", [False, True])
def test_unsent_messages_of_a_durable_reader_are_counted(is_behind: bool):
    """One byte a PART, and more bytes than a message may have PARTs."""
    name = "t" * 255
    bus = MemoryBus(LIMITS, RqueueLimits(max_payload=282), durable=True)
    bus.make(name)
    client = bus.connect_freud()
    reader = reader_of(bus, name.encode(), appetite=0 if is_behind else None)
    for size in (1, 1, 1, 1, 65536, 2):  # the first four are over the mark
        client.deliver(freud_client.produce(name.encode(), bytes(size)))
        bus.settle()
    reader.eat()
    bus.settle()
    assert bodies(reader) == [bytes(1)] * 4 + [bytes(2)]
    assert bus.stats("dropped") == {"too_large": 1}


def test_slow_reader_of_a_durable_topic_is_cut(bus: MemoryBus):
    bus.make("t")
    writer = bus.connect()
    slow = full_reader(bus, writer)
    bus.pass_time(6)
    assert slow.aborted
    writer.deliver(publish(b"t", b"x"))
    bus.settle()
    assert bus.stats("dropped") == {"slow_consumer": 2}


def test_failed_read_is_retried_with_the_next_commit(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
):
    bus.make("t")
    writer = bus.connect()
    slow, quick = full_reader(bus, writer), reader_of(bus)
    writer.deliver(publish(b"t", b"x"))
    bus.settle()

    def fail(*_: object, **__: object) -> None:
        raise StoreFault("a bad sector")

    with monkeypatch.context() as broken:
        broken.setattr(bus.store, "read", fail)
        slow.eat()
        writer.deliver(publish(b"t", b"y"))
        bus.settle()
    assert ("following failed", "a bad sector") in [
        (event, fields.get("reason")) for event, fields in bus.log.warnings()
    ]
    writer.deliver(publish(b"t", b"z"))
    bus.settle()
    assert bodies(quick) == [b"x", b"y", b"z"]
    assert bodies(slow) == [BIG, BIG, b"x", b"y", b"z"]


# --- names that change --------------------------------------------------------


def test_subscribed_name_becomes_durable(bus: MemoryBus):
    reader, writer = reader_of(bus), bus.connect()
    writer.deliver(publish(b"t", b"at once"))
    assert bodies(reader) == [b"at once"]
    bus.make("t")
    writer.deliver(publish(b"t", b"kept"))
    assert len(bodies(reader)) == 1
    bus.settle()
    assert bodies(reader) == [b"at once", b"kept"]


def test_name_of_a_dropped_topic_is_ephemeral_again(bus: MemoryBus):
    topic = bus.make("t")
    writer = bus.connect()
    slow, quick = full_reader(bus, writer), reader_of(bus)
    writer.deliver(publish(b"t", b"seen"))
    bus.settle()  # the slow one is behind
    writer.deliver(publish(b"t", b"missed"))
    bus.commit()
    bus.turn()
    bus.drop(topic)
    bus.settle()
    slow.eat()
    bus.settle()
    assert bodies(slow) == [BIG, BIG]
    assert bodies(quick) == [b"seen"]
    writer.deliver(publish(b"t", b"ephemeral"))
    assert not bus.store.waiting
    bus.turn()
    assert bodies(slow)[-1] == bodies(quick)[-1] == b"ephemeral"


def test_topic_created_again_is_read_by_existing_subscribers(bus: MemoryBus):
    topic = bus.make("t")
    writer = bus.connect()
    slow, quick = full_reader(bus, writer), reader_of(bus)
    writer.deliver(publish(b"t", b"old"))
    bus.commit()
    bus.turn()  # a read of the old topic is in progress
    bus.drop(topic)
    again = bus.make("t")
    writer.deliver(publish(b"t", b"new"))
    slow.eat()
    bus.settle()
    assert bodies(quick) == [b"new"]
    assert bodies(slow) == [BIG, BIG, b"new"]
    assert bus.store.bounds(again.number).next_id == 5


def test_commit_after_its_topic_was_dropped_is_counted(bus: MemoryBus):
    topic = bus.make("t")
    bus.connect().deliver(publish(b"t", b"x") * 3)
    bus.drop(topic)
    bus.settle()
    assert bus.stats("dropped") == {"does_not_exist": 3}


# --- parts --------------------------------------------------------------------


def test_parts_are_assembled_before_they_are_stored(bus: MemoryBus):
    topic = bus.make("t")
    writer = bus.connect()
    writer.deliver(publish_part(b"t", bytes(16), 1, 2, b"world"))
    bus.settle()
    assert bus.store.bounds(topic.number).next_id == 1
    writer.deliver(publish_part(b"t", bytes(16), 0, 2, b"hello ") + publish(b"t", b"next"))
    bus.settle()
    rows = bus.store.read(topic.number, 0, 0)
    assert bytes(rows.bodies) == b"hello worldnext"
    assert rows.count == 2


# --- all at once --------------------------------------------------------------

TOPICS = (b"t", b"u")
READERS = st.integers(0, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(TOPICS), st.integers(1, 400)),
        st.tuples(st.sampled_from(("subscribe", "unsubscribe")), st.sampled_from(TOPICS), READERS),
        st.tuples(st.sampled_from(("deregister", "reconnect")), READERS),
        st.tuples(st.just("eat"), READERS, st.integers(0, 1500)),
        st.tuples(st.sampled_from(("commit", "turn", "read")), st.integers(1, 2)),
    ),
    max_size=60,
)


class World:
    """Readers that come and go, and the bodies that each must have received."""

    def __init__(self) -> None:
        self.bus = MemoryBus(Limits(outbox_high_water_bytes=500), durable=True)
        self.topics = {name: self.bus.make(name.decode()) for name in TOPICS}
        self.writer = self.bus.connect()
        self.readers = [self.bus.connect(appetite=0) for _ in range(4)]
        # By reader and topic, (first, last) ids of each subscription; last None: still subscribed
        self.since = [{name: [] for name in TOPICS} for _ in self.readers]
        self.sent = dict.fromkeys(TOPICS, 0)

    def end(self, name: bytes) -> int:
        return self.bus.durable.topics.next_id(self.topics[name])

    def do(self, step: tuple) -> None:
        verb, *rest = step
        if verb == "publish":
            name, size = rest
            self.sent[name] += 1
            self.writer.deliver(publish(name, b"%c%d." % (name, self.sent[name]) + bytes(size)))
        elif verb == "subscribe":
            name, reader = rest
            if not self.is_subscribed(reader, name):
                self.since[reader][name].append((self.end(name), None))
            self.readers[reader].deliver(subscribe(name))
        elif verb == "unsubscribe":
            name, reader = rest
            self.end_spans(reader, (name,))
            self.readers[reader].deliver(remove(name))
        elif verb == "deregister":
            self.end_spans(rest[0], TOPICS)
            self.readers[rest[0]].deliver(deregister())
        elif verb == "reconnect":
            self.readers[rest[0]].hang_up()
            self.readers[rest[0]] = self.bus.connect(appetite=0)
            self.since[rest[0]] = {name: [] for name in TOPICS}
        elif verb == "eat":
            self.readers[rest[0]].eat(rest[1])
        elif verb == "turn":
            self.bus.turn()
        else:
            waiting = self.bus.reads if verb == "read" else len(self.bus.store.waiting)
            getattr(self.bus, verb)(min(rest[0], waiting))

    def is_subscribed(self, reader: int, name: bytes) -> bool:
        spans = self.since[reader][name]
        return bool(spans) and spans[-1][1] is None

    def end_spans(self, reader: int, names: tuple[bytes, ...]) -> None:
        for name in names:
            if self.is_subscribed(reader, name):
                first, _ = self.since[reader][name].pop()
                self.since[reader][name].append((first, self.end(name)))

    def numbers(self, reader: MemoryPipe, name: bytes) -> list[int]:
        return [int(body[1:].partition(b".")[0]) for body in bodies(reader) if body[:1] == name]


def is_run_of(got: list[int], spans: list[tuple[int, int]]) -> bool:
    """A beginning of each span in turn, whole in the last one: ids are those of publishing."""
    for first, last in spans:
        at = first
        while got and got[0] == at and at < last:
            got = got[1:]
            at += 1
    return not got


@settings(max_examples=300)
@given(STEPS, st.sampled_from((1, 3, push_readers.CHUNK_ROWS)))
def test_each_reader_gets_the_log_from_its_start(steps, chunk_rows):
    world = World()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push_readers, "CHUNK_ROWS", chunk_rows)
        for step in steps:
            world.do(step)
            for name, topic in world.topics.items():
                there = [world.is_subscribed(reader, name) for reader in range(4)]
                assert world.bus.durable.push_readers.count(topic) == sum(there)
        for reader in world.readers:
            reader.eat()
        world.bus.settle()
    for reader, since in zip(world.readers, world.since, strict=True):
        for name, spans in since.items():
            got = world.numbers(reader, name)
            if spans and spans[-1][1] is None:  # it is still there: it has all since it began
                first = spans[-1][0]
                whole = list(range(first, world.sent[name] + 1))
                assert got[len(got) - len(whole) :] == whole
                got = got[: len(got) - len(whole)]
            ended = [(first, last) for first, last in spans if last is not None]
            assert is_run_of(got, ended)
    assert world.bus.stats("faults") == {}
