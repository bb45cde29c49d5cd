"""Expired messages: acked by the group, counted, kept as dead letters, never handed out."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from polybus.durable.topic_registry import EXPIRED, EXPIRED_DEAD_LETTER
from polybus.groups import shard_progress
from polybus.groups.member_fetch import MAX_EXPIRED_READS, HeldPosition
from polybus.groups.message_block import OutputMessage, build_block, read_messages
from polybus.groups.message_expiry import find_expired
from polybus.model import arrow
from polybus.model.commit import Append, Commit
from polybus.model.message_ttl import TTL_HEADER
from polybus.model.rows import EMPTY
from polybus.store.engine_registry import open_store
from tests.unit.groups.group_harness import GroupHarness, HarnessMember

NS_PER_MS = 1_000_000
SHORT, LONG = 10, 3_600_000


@pytest.fixture
def harness() -> Iterator[GroupHarness]:
    with open_store("memory:") as store:
        yield GroupHarness(store)


def produce(harness: GroupHarness, *ttls: int | None, shard: int = 0) -> None:
    """Append a message per time to live; None is a message without one."""
    number = harness.topic().number
    start = harness.store.bounds(number).shards[shard].end
    messages = [
        OutputMessage(
            "k" if ttl else None,
            b"%d" % (start + at),
            [("h", b"1"), (TTL_HEADER, b"%d" % ttl)] if ttl else None,
            7,
        )
        for at, ttl in enumerate(ttls)
    ]
    harness.store.commit(Commit(appends=(Append(number, shard, build_block(messages)),))).result()


def pass_time(harness: GroupHarness, ms: int = 1000) -> None:
    """Set the clock to a time after the newest message."""
    now_ns = harness.store.bounds(harness.topic().number).timestamp_ns + ms * NS_PER_MS
    harness.wall_ns = lambda: now_ns


def handed(result) -> list[bytes]:
    return [message.body for _, message in read_messages(result.rows)] if result.rows.count else []


def fetch(member: HarnessMember) -> list[bytes]:
    """Fetch rows, which may have gaps, and continue after them."""
    result = member.look()
    for assigned in result.assigned:
        member.held[assigned["shard"]] = HeldPosition(assigned["epoch"], assigned["low"])
    for place in result.places:
        held = member.held[place["shard"]]
        member.held[place["shard"]] = held._replace(next=place["to"])
    return handed(result)


def test_expired_messages_are_acked_counted_and_not_handed_out(harness):
    produce(harness, SHORT, None, SHORT, SHORT, LONG, None, SHORT)
    pass_time(harness)
    member = harness.join("c")
    assert handed(member.look()) == [b"1", b"4", b"5"]
    shard = harness.shard(0)
    assert (shard["expired"], shard["acked"], shard["low"], shard["ranges"]) == (4, 4, 1, 2)
    assert shard["lag"] == 3
    assert handed(member.look()) == [b"1", b"4", b"5"]  # the same again: they count once
    assert harness.shard(0)["expired"] == 4


def test_a_shard_with_expired_messages_alone_returns_nothing_and_goes_on(harness):
    produce(harness, *[SHORT] * 20)
    pass_time(harness)
    member = harness.join("c")
    assert handed(member.fetch((8, 1 << 20))) == []
    assert (harness.shard(0)["low"], harness.shard(0)["expired"]) == (20, 20)
    produce(harness, None)
    assert handed(member.fetch()) == [b"20"]


def test_a_fetch_of_many_expired_messages_ends_and_the_next_one_continues(harness):
    produce(harness, *[SHORT] * (MAX_EXPIRED_READS + 3), None)
    pass_time(harness)
    member = harness.join("c")
    first = member.fetch((1, 1 << 20))
    assert first.is_change  # so the member does not wait for another message
    assert (handed(first), harness.shard(0)["expired"]) == ([], MAX_EXPIRED_READS)
    assert handed(member.fetch((1, 1 << 20))) == [b"%d" % (MAX_EXPIRED_READS + 3)]


def test_messages_that_have_time_left_are_handed_out(harness):
    produce(harness, SHORT, LONG)
    pass_time(harness, SHORT - 1)
    assert handed(harness.join("c").look()) == [b"0", b"1"]
    assert harness.shard(0)["expired"] == 0
    pass_time(harness, SHORT)
    assert handed(harness.join("d", "other").look()) == [b"1"]


def test_counts_survive_a_restart(harness):
    produce(harness, SHORT, None)
    pass_time(harness)
    harness.join("c").look()
    harness.open()
    assert harness.shard(0)["expired"] == 1


def test_a_topic_may_keep_expired_messages_as_dead_letters(harness):
    topic = harness.topic()
    harness.durable.register(harness.store.configure(topic.name, {EXPIRED: EXPIRED_DEAD_LETTER}))
    produce(harness, SHORT, None)
    pass_time(harness)
    assert handed(harness.join("c").look()) == [b"1"]
    (letter,) = harness.letters()
    headers = dict(letter.headers or ())
    assert (letter.key, letter.body, headers["polybus.reason"]) == ("k", b"0", b"expired")
    assert headers["h"] == b"1"
    assert TTL_HEADER not in headers
    shard = harness.shard(0)
    assert (shard["expired"], shard["dead_lettered"], shard["low"]) == (1, 1, 1)


def test_a_shard_waits_if_no_more_ranges_fit(harness, monkeypatch):
    monkeypatch.setattr(shard_progress, "MAX_RANGES", 2)
    monkeypatch.setattr("polybus.groups.message_expiry.MAX_RANGES", 2)
    monkeypatch.setattr(shard_progress.ack_ranges, "__defaults__", (2,))
    produce(harness, None, SHORT, None, SHORT, None, SHORT, None)
    pass_time(harness)
    member = harness.join("c")
    assert fetch(member) == [b"0", b"2", b"4"]
    assert fetch(member) == []
    member.ack(0, (0, 1), (2, 3), (4, 5))
    assert fetch(member) == [b"6"]
    assert harness.shard(0)["expired"] == 3


def test_search_agrees_with_a_plain_loop():
    chosen = random.Random(7)
    now_ns = 10**18
    with open_store("memory:") as store:
        topic = store.create("t", 2, {})
        for _ in range(30):
            messages = []
            for _ in range(chosen.randint(1, 9)):
                value = chosen.choice([b"5", b"900000", b"", b"x5", b"5 ", b"-5", b"9" * 30])
                names = chosen.choice(
                    [[], ["a"], [TTL_HEADER], ["a", TTL_HEADER], ["xpolybus.ttl_ms"]]
                )
                pairs = [(name, value) for name in names]
                messages.append(OutputMessage(None, b"x", chosen.choice([None, pairs]), 7))
            append = Append(topic.number, chosen.randrange(2), build_block(messages))
            store.commit(Commit(appends=(append,))).result()
        rows = store.read(topic.number, "all", 1)
    times = arrow.batch_of(rows).column("timestamp_ns").to_pylist()
    now_ns = max(times) + 1000 * NS_PER_MS
    expected = []
    for at, row in enumerate(arrow.batch_of(rows).to_pylist()):
        values = [value for name, value in row["headers"] or () if name == TTL_HEADER]
        valid = [int(value) for value in values if value.isdigit() and len(value) <= 12]
        if any(row["timestamp_ns"] + ttl * NS_PER_MS <= now_ns for ttl in valid):
            expected.append(at)
    assert list(find_expired(rows, now_ns)) == expected
    assert expected
    kept = [at for at in range(rows.count) if at not in expected]
    part = arrow.batch_of(arrow.take_rows(rows, kept))
    assert part.to_pylist() == [arrow.batch_of(rows).to_pylist()[at] for at in kept]
    assert arrow.take_rows(rows, []) is EMPTY
