"""Delayed messages: kept aside as records, appended in due order, each exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from threading import Event

import pytest

from polybus.bus.alarms import Alarms
from polybus.bus.shares import Shares
from polybus.durable import delayed_records
from polybus.durable.delay_scheduler import ALARM, DelayScheduler
from polybus.durable.delayed_messages import NEVER_NS
from polybus.durable.topic_registry import DurableTopics
from polybus.errors import LimitReached, StoreFull, TooLarge
from polybus.model.commit import MAX_RECORD_BYTES, Commit, RecordChange
from polybus.model.delivery_time import due_of
from polybus.model.identity import Identity
from polybus.model.limits import Limits
from polybus.model.stamp import ProducerOptions, Stamp
from polybus.native.inprocess.inprocess_bus import StdlibLog
from polybus.store.contract import Store
from polybus.store.engine_registry import open_store
from polybus.testing.conformance.sample_blocks import block

ALICE, BOB = Identity(uid=1), Identity(uid=2)
WAIT_S = 30


@pytest.fixture(params=["memory:", "lmdb:"])
def url(request, tmp_path) -> str:
    return "memory:" if request.param == "memory:" else f"lmdb:{tmp_path}"


@pytest.fixture
def store(url) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


class Delays:
    """Delayed messages of one store, with a clock that the test sets."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ns = 1000
        self.now_s = 0.0
        self.open()

    def open(self) -> None:
        """Open them again on the same store, as a restart does."""
        self.durable = DurableTopics(self.store)
        self.delayed = self.durable.delayed
        self.alarms = Alarms(lambda: self.now_ns, StdlibLog("tests"))
        self.scheduler = DelayScheduler(
            self.durable, lambda: self.now_s, lambda: self.now_ns, self.alarms
        )

    def topic(self, name: str = "t", shards: int = 1, **settings: object):
        topic = self.store.create(name, shards, settings)
        self.durable.register(topic)
        return topic

    def put(self, topic, due_ns: int, *bodies: bytes, stamp: Stamp | None = None, who=ALICE):
        future = self.delayed.produce(topic, block(*bodies), due_ns, stamp, who)
        counted = Event()
        future.add_done_callback(lambda _: counted.set())  # after the callback that counts it
        assert counted.wait(WAIT_S)
        return future.result()

    def run(self, now_ns: int) -> None:
        self.now_ns = now_ns
        while self.delayed.due_topics(now_ns):
            self.scheduler.run_once()

    def bodies(self, topic) -> list[bytes]:
        rows = self.store.read(topic.number, "all", 1)
        ends = memoryview(rows.body_offsets).cast("B").cast("i").tolist()
        return [bytes(rows.bodies[a:b]) for a, b in pairwise(ends)]


@pytest.fixture
def delays(store) -> Delays:
    return Delays(store)


def test_messages_are_appended_in_due_order_and_ties_in_order_of_arrival(delays):
    topic = delays.topic()
    for due_ns, body in ((3000, b"c"), (2000, b"a"), (3000, b"d"), (2500, b"b"), (9000, b"z")):
        done = delays.put(topic, due_ns, body)
        assert (done.spans, due_of(done)) == ((), due_ns)
    delays.run(1999)
    assert delays.bodies(topic) == []
    delays.run(2000)
    assert delays.bodies(topic) == [b"a"]
    delays.run(5000)
    assert delays.bodies(topic) == [b"a", b"b", b"c", b"d"]
    assert delays.delayed.totals(topic.number)[::2] == (1, 9000)
    assert delays.delayed.overview()["appended"] == 4


def test_a_restart_keeps_messages_counts_and_the_order_of_arrival(delays):
    topic = delays.topic()
    delays.put(topic, 2000, b"a", b"b")
    delays.put(topic, 2000, b"c")
    before = delays.delayed.totals(topic.number)
    delays.open()
    assert delays.delayed.totals(topic.number) == before
    assert before.messages == 3
    delays.put(topic, 2000, b"d")
    delays.run(2000)
    assert delays.bodies(topic) == [b"a", b"b", b"c", b"d"]
    assert delays.store.scan(delayed_records.PREFIX) == []
    assert delays.delayed.next_due_ns() == NEVER_NS


def test_a_repeated_stamp_is_kept_once_and_answered_with_the_due_time(delays):
    topic = delays.topic()
    opened = delays.store.open_producer("p", ProducerOptions())
    stamp = Stamp("p", opened.epoch, 1)
    delays.put(topic, 2000, b"a", stamp=stamp)
    again = delays.put(topic, 7000, b"a", stamp=stamp)
    assert (again.duplicate, due_of(again)) == (True, 2000)
    assert delays.delayed.totals(topic.number).messages == 1
    delays.run(9000)
    assert delays.bodies(topic) == [b"a"]


def test_a_message_larger_than_a_record_is_kept_in_parts(delays):
    topic = delays.topic()
    large = bytes(range(256)) * (5 * MAX_RECORD_BYTES // 512)
    delays.put(topic, 2000, b"small", large)
    assert len(delays.store.scan(delayed_records.PREFIX)) == 3
    delays.open()
    delays.run(2000)
    assert delays.bodies(topic) == [b"small", large]
    assert delays.store.scan(delayed_records.PREFIX) == []


def test_a_batch_that_no_commit_could_append_is_refused(delays, monkeypatch):
    topic = delays.topic()
    monkeypatch.setattr(delayed_records, "MAX_PARTS", 1)
    with pytest.raises(TooLarge, match="delayed batch must have at most"):
        delays.put(topic, 2000, bytes(2 * MAX_RECORD_BYTES))
    assert delays.delayed.totals(topic.number).messages == 0


def test_many_batches_are_appended_in_bounded_commits(delays):
    topic = delays.topic(shards=3)
    futures = [
        delays.delayed.produce(topic, block(b"%d" % n, keys=["k"]), 2000 + n, None, ALICE)
        for n in range(1500)
    ]
    for future in futures:
        future.result(WAIT_S)
    delays.put(topic, NEVER_NS - 1, b"last")  # all before it are counted, too
    delays.run(2999)
    assert delays.bodies(topic) == [b"%d" % n for n in range(1000)]
    assert delays.delayed.totals(topic.number).messages == 501


def test_a_dropped_topic_takes_its_messages_with_it(delays):
    topic, other = delays.topic(), delays.topic("u")
    for n in range(600):
        delays.put(topic, 5000 + n, b"x")
    delays.put(other, 2000, b"y")
    delays.store.drop("t")
    delays.durable.forget(topic)
    delays.delayed.on_dropped(topic)
    delays.run(2000)
    assert delays.store.scan(delayed_records.PREFIX) == []
    assert delays.delayed.overview() | {"appended": 0} == {
        "messages": 0, "bytes": 0, "topics": 0, "appended": 0, "dropped": 600,
    }  # fmt: skip
    assert delays.bodies(other) == [b"y"]


def test_messages_of_a_topic_dropped_while_the_bus_was_down_are_removed(delays):
    topic = delays.topic()
    delays.put(topic, 5000, b"x")
    delays.store.drop("t")
    delays.open()
    delays.run(5000)
    assert delays.store.scan(delayed_records.PREFIX) == []


def test_max_bytes_counts_delayed_messages_once(delays):
    size = block(b"x" * 100).size_bytes
    topic = delays.topic(max_bytes=2 * size)
    delays.put(topic, 2000, b"x" * 100)
    delays.durable.produce(topic, block(b"x" * 100)).result(WAIT_S)
    with pytest.raises(LimitReached, match="may hold"):
        delays.put(topic, 2000, b"x" * 100)
    with pytest.raises(LimitReached, match="may hold"):
        delays.durable.produce(topic, block(b"x" * 100))
    delays.run(2000)  # it was charged when it was accepted
    assert len(delays.bodies(topic)) == 2


def test_each_user_has_a_share_and_each_topic_a_limit(delays):
    topic, other = delays.topic(), delays.topic("u")
    delays.put(topic, 2000, b"a", b"b")
    shares = Shares(Limits(admin_reserve=0), lambda identity: False)
    delays.delayed.set_limits(shares.new_table("max_delayed", 8), 5)
    delays.put(topic, 2000, b"c", b"d")
    with pytest.raises(LimitReached, match="has its share of max_delayed"):
        delays.put(other, 2000, b"e")
    with pytest.raises(LimitReached, match="topic t must have at most 5 delayed messages"):
        delays.put(topic, 2000, b"e", b"f", who=BOB)
    delays.put(topic, 2000, b"e", who=BOB)
    delays.run(2000)
    delays.put(other, 9000, b"g", b"h", b"i", b"j")


def test_a_full_disk_delays_messages_and_raises_an_alarm_until_there_is_room(delays, monkeypatch):
    topic, other = delays.topic(), delays.topic("u")
    delays.put(topic, 2000, b"x")
    delays.put(other, 2000, b"y")
    delays.now_ns = 2000
    commit = delays.durable.commit

    def fail(given: Commit):
        if given.appends[0].topic == topic.number:
            raise StoreFull("the disk is full")
        return commit(given)

    monkeypatch.setattr(delays.durable, "commit", fail)
    delays.scheduler.run_once()
    assert delays.alarms.is_raised(ALARM, "t")
    assert delays.bodies(other) == [b"y"]
    monkeypatch.undo()
    delays.scheduler.run_once()
    assert delays.bodies(topic) == []  # it pauses before the next try
    delays.now_s = 10.0
    delays.scheduler.run_once()
    assert delays.bodies(topic) == [b"x"]
    assert not delays.alarms.is_raised(ALARM, "t")


def test_the_alarm_of_a_dropped_topic_ends_after_further_failures(delays, monkeypatch):
    topic = delays.topic()
    delays.put(topic, 2000, b"x")
    delays.now_ns = 2000

    def fail(given: Commit):
        raise StoreFull("the disk is full")

    monkeypatch.setattr(delays.durable, "commit", fail)
    delays.scheduler.run_once()
    assert delays.alarms.is_raised(ALARM, "t")
    delays.store.drop("t")
    delays.durable.forget(topic)
    delays.delayed.on_dropped(topic)
    monkeypatch.setattr(delays.store, "commit", fail)
    delays.now_s = 10.0
    delays.scheduler.run_once()
    monkeypatch.undo()
    delays.now_s = 20.0
    delays.scheduler.run_once()
    assert delays.store.scan(delayed_records.PREFIX) == []
    assert not delays.alarms.is_raised(ALARM, "t")


def test_a_damaged_record_raises_an_alarm_and_loses_nothing(delays):
    topic, other = delays.topic(), delays.topic("u")
    delays.put(topic, 2000, b"x")
    delays.put(other, 2000, b"y")
    (record,) = delays.store.scan(delayed_records.topic_prefix(topic.number))
    broken = RecordChange(record.key, b"\0" + record.value[1:])
    delays.store.commit(Commit(changes=(broken,))).result(WAIT_S)
    delays.open()
    delays.now_ns = 2000
    delays.scheduler.run_once()
    assert delays.bodies(other) == [b"y"]
    assert delays.alarms.is_raised(ALARM, "t")
    assert len(delays.store.scan(delayed_records.PREFIX)) == 1
    delays.store.drop("t")
    delays.durable.forget(topic)
    delays.delayed.on_dropped(topic)
    delays.now_s = 10.0
    delays.scheduler.run_once()
    assert delays.store.scan(delayed_records.PREFIX) == []
    assert not delays.alarms.is_raised(ALARM, "t")


def test_resharding_chooses_the_shard_when_a_message_is_appended(delays):
    topic = delays.topic(shards=1)
    delays.put(topic, 2000, b"x")
    delays.durable.register(delays.store.configure("t", {}, add_shards=2))
    delays.run(2000)
    assert delays.bodies(topic) == [b"x"]
    assert delays.store.bounds(topic.number).shards[0].end == 0
