"""Retention: limits by age, size and number, readers that hold messages back, and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polybus.dialects.pirate.server import subscriber_records
from polybus.dialects.pirate.server.subscriber_records import SubscriptionKey
from polybus.durable.retention import ALARM_S, UNREAD_ALARM, Retention, describe_retention
from polybus.durable.retention_limits import (
    MAX_BLOCKS,
    MAX_LIMIT,
    RetentionLimits,
    check_retention_settings,
    parse_limit,
)
from polybus.errors import MalformedRequest, Trimmed, UsageError
from polybus.groups.message_block import OutputMessage, build_block
from polybus.groups.reader_positions import read_positions
from polybus.model.byte_size import format_size_bytes, parse_size_bytes
from polybus.model.commit import Append, Commit
from polybus.model.duration import parse_duration_ms
from polybus.store.contract import Store
from polybus.store.lmdb.lmdb_store import LmdbStore
from polybus.store.memory.memory_store import MemoryStore
from tests.unit.groups.group_harness import SECOND_NS, GroupHarness

LARGE = bytes(100_000)  # a block of its own in every engine


class RetentionHarness(GroupHarness):
    """Groups with a retention that runs when a test calls it."""

    def __init__(self, open_store: Callable[[Callable[[], int]], Store]) -> None:
        self.time_ns = 1000 * SECOND_NS
        super().__init__(open_store(lambda: self.time_ns))
        self.wall_ns = lambda: self.time_ns
        self.unread = 0
        self.retention = Retention(
            self.durable,
            read_positions,
            self.alarms,
            self._count_unread,
            lambda: self.now,
            lambda: self.time_ns,
        )

    def _count_unread(self, messages: int) -> None:
        self.unread += messages

    def configure(self, **settings: Any) -> None:
        self.durable.register(self.store.configure(self.topic().name, settings))

    def retain(self) -> list[tuple[int, int]]:
        """Run retention until it has nothing to do. Returns start and end of each shard."""
        while self.retention.run_round():
            pass
        return [shard[:2] for shard in self.store.bounds(self.topic().number).shards]

    def put_large(self, shard: int) -> None:
        block = build_block([OutputMessage(None, LARGE, None, 0)])
        self.durable.commit(Commit(appends=(Append(self.topic().number, shard, block),))).result()

    def describe(self) -> dict[str, Any]:
        topic = self.topic()
        bounds = self.store.bounds(topic.number)
        return describe_retention(self.store, topic, bounds, read_positions, self.time_ns)

    def subscribe(self, client: bytes, last: int) -> None:
        """Store a pirate subscriber with its LAST."""
        key = SubscriptionKey(self.topic().number, client)
        changes = (subscriber_records.last_change(key, last),)
        self.store.commit(Commit(changes=changes)).result()


@pytest.fixture(params=["memory", "lmdb"])
def harness(request, tmp_path: Path) -> Iterator[RetentionHarness]:
    def open_store(wall_ns: Callable[[], int]) -> Store:
        if request.param == "memory":
            return MemoryStore(wall_ns=wall_ns)
        return LmdbStore(tmp_path / "store", wall_ns=wall_ns)

    opened = RetentionHarness(open_store)
    with opened.store:
        opened.topic(shards=2)
        yield opened


def test_topic_without_limits_keeps_all(harness):
    harness.produce(10)
    harness.time_ns += 10**18
    assert harness.retain() == [(0, 10), (0, 0)]


def test_age_is_exact(harness):
    for _ in range(5):
        harness.time_ns += SECOND_NS
        harness.produce(2)
        harness.produce(1, shard=1)
    harness.configure(retain_age_ms=2000)
    # Messages of the last 2 seconds stay: those of the third to the fifth commit.
    assert harness.retain() == [(4, 10), (2, 5)]
    harness.time_ns += 100 * SECOND_NS
    assert harness.retain() == [(10, 10), (5, 5)]


def test_number_is_exact_over_all_shards(harness):
    harness.produce(5)  # ids 1 to 5
    harness.produce(5, shard=1)  # 6 to 10
    harness.produce(5)  # 11 to 15
    harness.configure(retain_messages=7)
    assert harness.retain() == [(5, 10), (3, 5)]
    harness.produce(20, shard=1)
    assert harness.retain() == [(10, 10), (18, 25)]


def test_size_removes_the_oldest_blocks_and_keeps_the_limit(harness):
    for number in range(8):
        harness.put_large(number % 2)
    size = sum(shard.size_bytes for shard in harness.store.bounds(harness.topic().number).shards)
    harness.configure(retain_bytes=size * 3 // 8)
    assert harness.retain() == [(3, 4), (2, 4)]
    harness.configure(retain_bytes=1)  # the last block stays, because it is more than the limit
    assert harness.retain() == [(4, 4), (3, 4)]


def test_age_may_be_longer_than_the_time_since_1970(harness):
    harness.produce(1)
    harness.configure(retain_age_ms=MAX_LIMIT)
    assert harness.retain()[0] == (0, 1)
    assert harness.describe()["due"] == 0


def test_blocks_of_a_stage_go_one_by_one(harness):
    """In LMDB a published stage is one entry with many blocks."""
    number = harness.topic().number
    block = build_block([OutputMessage(None, LARGE, None, 0)] * 2)
    stage = harness.store.open_stage()
    for _ in range(10):
        harness.store.stage(stage, [Append(number, 0, block)]).result()
    harness.durable.commit(Commit(stages=(stage,))).result()
    size = sum(shard.size_bytes for shard in harness.store.bounds(number).shards)
    harness.configure(retain_bytes=size * 35 // 100)
    for _ in range(3):  # nothing more goes when the limit is reached
        assert harness.retain() == [(12, 20), (0, 0)]
    harness.configure(retain_bytes=1)
    for _ in range(3):
        harness.retain()
    assert harness.retain() == [(18, 20), (0, 0)]


def test_large_excess_takes_several_searches(harness):
    count = 2 * MAX_BLOCKS + 3
    for _ in range(count):
        harness.put_large(0)
    harness.configure(retain_bytes=1)
    assert harness.retain() == [(count - 1, count), (0, 0)]


def test_topic_without_due_messages_is_not_searched_again(harness, monkeypatch):
    harness.produce(2)
    harness.configure(retain_age_ms=10_000)
    harness.retain()
    searches = []
    bounds = harness.store.bounds
    monkeypatch.setattr(
        harness.store, "bounds", lambda topic: searches.append(topic) or bounds(topic)
    )
    harness.time_ns += 9 * SECOND_NS
    harness.produce(1)  # a new message makes no older one due
    searches.clear()
    harness.retention.run_round()
    assert searches == []
    harness.time_ns += 2 * SECOND_NS
    assert harness.retain()[0] == (2, 3)
    harness.configure(retain_messages=3)
    assert harness.retain()[0] == (2, 3)
    harness.produce(5)
    assert harness.retain()[0] == (5, 8)


def test_any_limit_removes_a_message(harness):
    harness.produce(4)
    harness.time_ns += 10 * SECOND_NS
    harness.produce(4)
    harness.configure(retain_age_ms=5000, retain_messages=100)
    assert harness.retain() == [(4, 8), (0, 0)]
    harness.configure(retain_age_ms=50_000, retain_messages=1)
    assert harness.retain() == [(7, 8), (0, 0)]


def test_group_holds_back_messages_that_it_has_not_acked(harness):
    harness.produce(10)
    harness.produce(10, shard=1)
    reader = harness.join("a")
    reader.fetch()
    reader.ack(0, (0, 3), (5, 10))
    reader.ack(1, (0, 10))
    harness.configure(retain_messages=2)
    assert harness.retain() == [(3, 10), (8, 10)]
    assert harness.describe()["held_by"] == [{"reader": "group g", "messages": 2}]
    reader.ack(0, (3, 5))
    assert harness.retain() == [(10, 10), (8, 10)]
    assert harness.shard(0)["trimmed_unread"] == 0
    assert not harness.unread


def test_every_group_must_have_acked(harness):
    harness.produce(10)
    fast, slow = harness.join("a", group="fast"), harness.join("a", group="slow")
    for reader, acked in ((fast, 10), (slow, 4)):
        reader.fetch()
        reader.ack(0, (0, acked))
    harness.configure(retain_messages=1)
    assert harness.retain()[0] == (4, 10)
    harness.groups.remove(harness.topic(), "slow", force=True)
    assert harness.retain()[0] == (9, 10)


def test_positions_are_those_on_disk(harness):
    harness.produce(10)
    harness.join("a")
    harness.configure(retain_messages=1)
    harness.open()  # a restart: no group is loaded
    assert harness.retain()[0] == (0, 10)


def test_subscriber_holds_back_messages_that_it_has_not_read(harness):
    harness.produce(5)
    harness.produce(5, shard=1)
    harness.subscribe(b"fast", 10)
    harness.subscribe(b"slow", 7)
    harness.configure(retain_messages=1)
    assert harness.retain() == [(5, 5), (2, 5)]
    assert harness.describe()["held_by"] == [
        {"reader": f"subscriber {b'slow'.hex()}", "messages": 2}
    ]


def test_dropped_unread_messages_are_counted_by_group(harness):
    harness.produce(10)
    one, other = harness.join("a", group="one"), harness.join("a", group="other")
    for reader in (one, other):
        reader.fetch()
    one.ack(0, (0, 2), (4, 6))
    harness.configure(retain_messages=3, retain_unread="drop")
    assert harness.retain()[0] == (7, 10)
    # Group one has not acked 2, 3 and 6; the other has acked none.
    counts = {group: harness.shard(0, group)["trimmed_unread"] for group in ("one", "other")}
    assert counts == {"one": 3, "other": 7}
    assert harness.unread == 10
    (alarm,) = harness.alarms.to_json(with_names=True)
    assert (alarm["kind"], alarm["object"]) == (UNREAD_ALARM, "t")
    assert "3 of group one, 7 of group other" in alarm["text"]
    # The count stays exact when the member skips the trimmed messages, and over a restart.
    one.held = {0: one.held[0]._replace(next=2)}
    one.fetch()
    harness.open()
    assert harness.shard(0, "one")["trimmed_unread"] == 3


def test_alarm_ends(harness):
    harness.produce(10)
    harness.join("a")
    harness.configure(retain_messages=3, retain_unread="drop")
    harness.retain()
    harness.now += ALARM_S - 1
    harness.retain()
    assert harness.alarms.is_raised(UNREAD_ALARM, "t")
    harness.now += 2
    harness.retain()
    assert not harness.alarms.is_raised(UNREAD_ALARM, "t")


def test_drop_without_unread_messages_raises_no_alarm(harness):
    harness.produce(10)
    reader = harness.join("a")
    reader.fetch()
    reader.ack(0, (0, 10))
    harness.configure(retain_messages=3, retain_unread="drop")
    assert harness.retain()[0] == (7, 10)
    assert (harness.unread, harness.alarms.to_json(with_names=True)) == (0, [])


def test_new_group_waits_for_a_trim_in_progress(harness):
    """Without the lock the group would start at messages that the trim removes."""
    harness.produce(10)
    harness.configure(retain_messages=3)
    assert harness.durable.trim_lock.acquire(blocking=False)
    harness.durable.trim_lock.release()
    joined = []
    trim = harness.store.trim

    def join_during_trim(*args: Any) -> None:
        from threading import Thread

        thread = Thread(target=lambda: joined.append(harness.join("a")))
        thread.start()
        thread.join(0.2)
        assert not joined
        trim(*args)
        harness.retention_thread = thread

    harness.store.trim = join_during_trim
    assert harness.retain()[0] == (7, 10)
    harness.retention_thread.join(30)
    assert harness.shard(0)["low"] == 7
    assert harness.shard(0)["trimmed_unread"] == 0


def test_damaged_position_of_a_group_stops_trims(harness):
    from polybus.groups import group_records
    from polybus.model.commit import RecordChange

    harness.produce(10)
    harness.join("a")
    key = group_records.shard_key(harness.topic().number, "g", 0)
    harness.store.commit(Commit(changes=(RecordChange(key, b"no json"),))).result()
    harness.configure(retain_messages=3)
    assert harness.retain()[0] == (0, 10)


def test_one_failing_topic_does_not_stop_the_others(harness):
    harness.produce(5, topic="a")
    harness.produce(5)
    for name in ("a", "t"):
        harness.durable.register(harness.store.configure(name, {"retain_messages": 1}))
    bounds = harness.store.bounds
    number = harness.topic("a").number

    def fail_for_a(topic: int) -> Any:
        if topic == number:
            raise Trimmed("no", 0)
        return bounds(topic)

    harness.store.bounds = fail_for_a
    assert harness.retain()[0] == (4, 5)


def test_description_says_what_is_kept(harness):
    harness.produce(4)
    harness.time_ns += 10 * SECOND_NS
    harness.configure(retain_age_ms=60_000)
    described = harness.describe()
    size = sum(shard.size_bytes for shard in harness.store.bounds(harness.topic().number).shards)
    assert described == {
        "age_ms": 60_000,
        "bytes": None,
        "messages": None,
        "unread": "keep",
        "stored_messages": 4,
        "stored_bytes": size,
        "oldest_timestamp_ns": harness.time_ns - 10 * SECOND_NS,
        "due": 0,
        "held_by": [],
        "due_before": {},
    }
    harness.configure(retain_messages=1)
    described = harness.describe()
    assert (described["due"], described["due_before"]) == (3, {"0": 3})


@pytest.mark.parametrize(
    "settings",
    [
        {"retain_age_ms": 0},
        {"retain_bytes": -1},
        {"retain_messages": "10"},
        {"retain_messages": True},
        {"retain_messages": 2**53 + 1},
        {"retain_unread": "maybe"},
    ],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(MalformedRequest):
        check_retention_settings(settings)


def test_settings_of_other_versions_are_no_limits(harness):
    harness.configure(retain_age_ms="7d", retain_unread=3)
    assert not RetentionLimits.of(harness.topic())


@pytest.mark.parametrize(
    ("text", "value"),
    [("1ms", 1), ("2s", 2000), ("15m", 900_000), ("1.5h", 5_400_000), ("7d", 604_800_000)],
)
def test_durations(text, value):
    assert parse_limit(text, parse_duration_ms) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("17B", 17), ("1KiB", 1024), ("1.5MiB", 1_572_864), ("10GiB", 10 << 30)],
)
def test_sizes(text, value):
    assert parse_limit(text, parse_size_bytes) == value
    assert parse_size_bytes(format_size_bytes(value)) == value


@pytest.mark.parametrize("text", ["", "7", "7 d", "7D", "-1d", "1e3s", "d", "0s", "9" * 14 + "d"])
def test_invalid_durations(text):
    with pytest.raises(UsageError):
        parse_limit(text, parse_duration_ms)


@pytest.mark.parametrize("text", ["", "GiB", "1GB", "1 GiB", "-1", "0", "1TiB", "9999999GiB9"])
def test_invalid_sizes(text):
    with pytest.raises(UsageError):
        parse_limit(text, parse_size_bytes)


def test_none_removes_a_limit():
    assert parse_limit("none", parse_duration_ms) is None
