"""Messages that fail too often become dead letters, in the commit that acks them."""

from __future__ import annotations

import pytest

from polybus.errors import Denied, Unavailable
from polybus.groups import dead_letter_queue
from polybus.groups.message_block import OutputMessage, build_block
from polybus.groups.shard_progress import FailureReport
from polybus.model.commit import Append, Commit


@pytest.fixture
def member(harness):
    harness.produce(10, shard=1, key="k")
    one = harness.join("a")
    one.fetch()
    return one


def test_message_becomes_a_dead_letter_after_max_deliver_failures(harness, member):
    assert member.fail(1, 4, 0)["attempts"] == {"4": 1}
    assert member.fail(1, 4, 1)["attempts"] == {"4": 2}
    assert harness.letters() == []
    response = member.fail(1, 4, 2)
    assert (response["attempts"], response["dead"], response["error"]) == ({}, [4], None)
    (letter,) = harness.letters()
    assert (letter.key, letter.body, letter.insertion_ms) == ("k", b"4", 7)
    assert dict(letter.headers) == {
        "h": b"1",
        "polybus.topic": b"t",
        "polybus.shard": b"1",
        "polybus.offset": b"4",
        "polybus.id": b"5",
        "polybus.group": b"g",
        "polybus.deliveries": b"3",
        "polybus.reason": b"no good",
    }
    shard = harness.shard(1)
    assert (shard["acked"], shard["dead_lettered"], shard["ranges"]) == (1, 1, 1)
    assert member.fail(1, 4, 2)["dead"] == []  # acked already
    assert len(harness.letters()) == 1


def test_dead_letter_and_ack_are_one_commit(harness, member, monkeypatch):
    commits: list[Commit] = []
    real = harness.store.commit
    monkeypatch.setattr(harness.store, "commit", lambda one: commits.append(one) or real(one))
    response = member.ack(1, (0, 4), failed=tuple(FailureReport(4, "x") for _ in range(3)))
    assert response["dead"] == [4]
    (commit,) = commits
    assert len(commit.appends) == len(commit.changes) == 1
    assert harness.shard(1)["low"] == 5


def test_dead_letter_topic_has_no_dead_letter_topic(harness):
    harness.topic("t.dlq")
    harness.produce(1, topic="t.dlq")
    member = harness.join("a")
    harness.groups.leave(*member.who, [])
    joined = harness.groups.join(harness.topic("t.dlq"), "g", "a", member_of())
    entry = member.entry(0, epoch=1, failed=tuple(FailureReport(0) for _ in range(5)))
    (response,) = harness.groups.ack(harness.topic("t.dlq"), "g", "a", joined.epoch, [entry])
    assert (response["attempts"], response["dead"]) == ({"0": 5}, [])
    assert harness.durable.find("t.dlq.dlq") is None


def member_of():
    from polybus.groups.group_records import Member

    return Member(0, 3, 2000, 5000)


def test_message_without_a_dead_letter_topic_is_redelivered(harness, member, monkeypatch):
    def denied(topic):
        raise Denied("not this")

    with monkeypatch.context() as patch:
        patch.setattr(harness, "_dead_letters", denied)
        harness.open()
        response = member.ack(1, (0, 2), failed=tuple(FailureReport(4) for _ in range(3)))
    assert response == {"shard": 1, "low": 2, "attempts": {"4": 3}, "dead": [], "error": None}
    (alarm,) = harness.alarms.to_json(with_names=True)
    assert (alarm["kind"], alarm["object"]) == ("dead_letters_blocked", "t")
    assert alarm["text"] == "dead letters of t cannot be written to t.dlq: not this"
    harness.open()
    assert member.fail(1, 4, 3)["dead"] == [4]
    assert harness.alarms.to_json(with_names=True) == []


def test_blocked_topic_is_tried_again_without_another_failure(harness, member, monkeypatch):
    def denied(topic):
        raise Denied("not this")

    with monkeypatch.context() as patch:
        patch.setattr(harness, "_dead_letters", denied)
        member.ack(1, failed=tuple(FailureReport(4) for _ in range(3)))
        harness.groups.tick()
        assert harness.alarms.is_raised("dead_letters_blocked", "t")
    harness.groups.tick()
    assert harness.alarms.is_raised("dead_letters_blocked", "t")  # at most once per second
    harness.now += 1
    harness.groups.tick()
    assert not harness.alarms.is_raised("dead_letters_blocked", "t")


def test_alarm_ends_with_its_topic(harness, member, monkeypatch):
    def denied(topic):
        raise Denied("not this")

    monkeypatch.setattr(harness, "_dead_letters", denied)
    member.ack(1, failed=tuple(FailureReport(4) for _ in range(3)))
    assert harness.alarms.is_raised("dead_letters_blocked", "t")
    harness.groups.drop(harness.topic())
    assert not harness.alarms.is_raised("dead_letters_blocked", "t")


def test_full_dead_letter_topic_raises_the_alarm(harness, member):
    harness.durable.register(harness.store.create("t.dlq", 1, {"max_bytes": 1}))
    assert member.ack(1, failed=tuple(FailureReport(4) for _ in range(3)))["dead"] == []
    assert harness.alarms.is_raised("dead_letters_blocked", "t")
    harness.now += 1
    harness.groups.tick()
    assert harness.alarms.is_raised("dead_letters_blocked", "t")
    harness.durable.register(harness.store.configure("t.dlq", {}))
    assert member.fail(1, 4, 3)["dead"] == [4]
    assert not harness.alarms.is_raised("dead_letters_blocked", "t")


def test_unavailable_store_fails_the_call(harness, member, monkeypatch):
    def slow(topic):
        raise Unavailable("try again")

    monkeypatch.setattr(harness, "_dead_letters", slow)
    harness.open()
    with pytest.raises(Unavailable):
        member.ack(1, (0, 2), failed=tuple(FailureReport(4) for _ in range(3)))
    assert harness.shard(1)["low"] == 0


@pytest.mark.parametrize("runs", [1, 3])
def test_trimmed_message_is_neither_dead_lettered_nor_retried(harness, member, runs):
    member.ack(1, (0, 2), failed=(FailureReport(4),))
    harness.store.trim(harness.topic().number, {1: 6})
    response = member.ack(1, failed=tuple(FailureReport(4) for _ in range(runs)))
    assert response == {"shard": 1, "low": 6, "attempts": {}, "dead": [], "error": None}
    assert harness.letters() == []
    harness.open()
    shard = harness.shard(1)
    assert (shard["low"], shard["acked"], shard["trimmed_unread"]) == (6, 2, 4)


def test_dead_letters_per_commit_are_limited(harness, member, monkeypatch):
    monkeypatch.setattr(dead_letter_queue, "MAX_DEAD_LETTERS", 2)
    failed = tuple(FailureReport(offset) for offset in (1, 2, 3) for _ in range(3))
    response = member.ack(1, failed=failed)
    assert response["dead"] == [1, 2]
    assert response["attempts"] == {"3": 3}
    assert member.fail(1, 3)["dead"] == [3]
    monkeypatch.setattr(dead_letter_queue, "MAX_BYTES", 1)
    response = member.ack(
        1, failed=tuple(FailureReport(offset) for offset in (5, 6) for _ in range(3))
    )
    assert response["dead"] == [5]


def test_headers_are_replaced_and_reasons_truncated(harness, member):
    requeued = OutputMessage(None, b"", [("polybus.topic", b"old"), ("x", b"1")], 0)
    append = Append(harness.topic().number, 1, build_block([requeued]))
    harness.store.commit(Commit(appends=(append,))).result()
    reason = "ä" * 2000 + "\ud800"
    member.ack(1, failed=tuple(FailureReport(10, reason) for _ in range(3)))
    (letter,) = harness.letters()
    headers = dict(letter.headers)
    assert [name for name, _ in letter.headers].count("polybus.topic") == 1
    assert (headers["polybus.topic"], headers["x"]) == (b"t", b"1")
    assert headers["polybus.reason"].decode() == "ä" * 512


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("two\nlines\tand a tab", "two\\nlines\\tand a tab"),
        ("\x7f\x9b\u202e\ud800", "\\x7f\\x9b\\u202e\\ud800"),
        ("é 日本", "é 日本"),
        ("\x00" * 5000, "\\x00" * 256),
    ],
)
def test_reason_is_printable_and_bounded(harness, member, reason, shown):
    member.ack(1, failed=tuple(FailureReport(4, reason) for _ in range(3)))
    (letter,) = harness.letters()
    assert dict(letter.headers)["polybus.reason"].decode() == shown


def test_runs_of_a_dead_consumer_have_failed(harness):
    harness.produce(10)
    for death in range(3):
        one = harness.join("a")
        one.fetch()
        assert one.beat({0: (2, 3)})
        if death == 2:
            one.ack(0, (0, 3), running=(3,))  # offset 2 is a dead letter
        harness.now += 6
        harness.groups.tick()
    assert [letter.body for letter in harness.letters()] == [b"3"]
    assert (
        dict(harness.letters()[0].headers)["polybus.reason"] == b"the consumer died during the run"
    )
    shard = harness.shard(0)
    assert (shard["low"], shard["suspect_to"], shard["dead_lettered"]) == (4, 10, 1)


def test_failed_run_does_not_fail_again_when_its_consumer_dies(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.beat({0: (2, 3)})
    one.fail(0, 2)
    two = harness.join("a")
    assert two.fetch().assigned[0]["attempts"] == {"2": 1, "3": 1}


def test_runs_reported_with_an_ack_fail_when_their_consumer_dies(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.ack(0, (0, 2), running=(2, 4))
    two = harness.join("a")
    assert two.fetch().assigned[0]["attempts"] == {"2": 1, "4": 1}


def test_replaced_consumer_counts_as_dead(harness):
    harness.produce(10)
    one = harness.join("a")
    one.fetch()
    one.beat({0: (2,), 1: (5,)})  # shard 1 has no offset 5
    two = harness.join("a")
    assert two.fetch().assigned[0]["attempts"] == {"2": 1}
    assert harness.shard(1)["attempts"] == 0
