"""The end of a consumer: by close, by a newer consumer, or by its topic."""

import threading

import pytest

from polybus import fdq
from polybus.errors import DoesNotExist, Fenced
from tests.interop.consumers.consumer_fixture import (
    Seen,
    acked,
    fdq_bus,
    group,
    produce,
    spread,
    total,
    unhurried,
)
from tests.rig.observer import until


def test_close_waits_for_active_runs_and_leaves_the_rest(url, topic):
    started, go_on, seen = threading.Event(), threading.Event(), Seen()

    def handle(envelope):
        started.set()
        go_on.wait()
        seen(envelope)

    produce(url, topic, *(("k", b"%d" % n) for n in range(10)))
    consumer = unhurried(url)
    consumer.consume(topic, "one", handle)
    started.wait()
    closing = threading.Thread(target=consumer.close)
    closing.start()
    go_on.set()
    closing.join()
    assert seen.bodies[:1] == [b"0"]
    assert acked(url, topic) == len(seen) < 10
    rest = Seen()
    with unhurried(url) as other:
        other.consume(topic, "two", rest)
        until(lambda: len(seen) + len(rest) == 10, "the rest is another's")
    assert [one.delivery for one in rest] == [1] * len(rest)
    assert total(url, topic, "redelivered") == 0


def test_a_handler_may_close_its_consumer(url, topic):
    produce(url, topic, *(("k", b"%d" % n) for n in range(10)))
    consumer, seen = unhurried(url), Seen()

    def handle(envelope):
        seen(envelope)
        if len(seen) == 3:
            consumer.close()

    consumer.consume(topic, "one", handle)
    assert consumer.wait(20)
    consumer.close()
    assert (len(seen), acked(url, topic)) == (3, 3)


def test_close_gives_up_hung_runs_at_the_hung_thread_limit(url, topic, monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.client.executor.MAX_HUNG", 0)
    produce(url, topic, ("k", b"one"))
    began, may_end = threading.Event(), threading.Event()

    def handle(envelope):
        began.set()
        may_end.wait(20)

    consumer = fdq.Consumer(url)
    consumer.consume(topic, "one", handle, handler_timeout_s=0.1)
    assert began.wait(20)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(10)
    is_alive = closing.is_alive()
    may_end.set()
    assert not is_alive


def test_second_close_may_have_a_shorter_timeout(url, topic):
    produce(url, topic, ("k", b"one"))
    began, may_end = threading.Event(), threading.Event()

    def handle(envelope):
        began.set()
        may_end.wait(20)

    consumer = fdq.Consumer(url)
    consumer.consume(topic, "one", handle)
    assert began.wait(20)
    first = threading.Thread(target=consumer.close)
    first.start()
    until(lambda: consumer._is_closed, "it closes")
    second = threading.Thread(target=consumer.close, args=(0.05,))
    second.start()
    second.join(10)
    first.join(10)
    alive = second.is_alive(), first.is_alive()
    may_end.set()
    assert alive == (False, False)


def test_close_does_not_exceed_its_timeout(url, topic):
    started, hangs = threading.Event(), threading.Event()

    def handle(_):
        started.set()
        hangs.wait()

    produce(url, topic, ("k", b"x"))
    consumer = unhurried(url)
    consumer.consume(topic, "one", handle)
    started.wait()
    consumer.close(timeout_s=0.05)
    hangs.set()
    assert acked(url, topic) == 0
    again = Seen()
    with unhurried(url) as other:
        other.consume(topic, "two", again)
        until(lambda: acked(url, topic) == 1, "another has it")
    assert [one.delivery for one in again] == [2]
    assert (total(url, topic, "emitted"), total(url, topic, "redelivered")) == (2, 1)


def test_newer_consumer_of_the_same_name_ends_the_older(url, topic, consumer):
    old, new = Seen(), Seen()
    consumer.consume(topic, "one", old)
    produce(url, topic, ("k", b"before"))
    until(lambda: acked(url, topic) == 1, "the older has it")
    with unhurried(url) as other:
        other.consume(topic, "one", new)
        with pytest.raises(Fenced):
            consumer.wait(20)
        produce(url, topic, ("k", b"after"))
        until(lambda: new, "the newer goes on")
    assert (old.bodies, new.bodies) == ([b"before"], [b"after"])


def test_wait_raises_the_first_error(url, topic, consumer):
    """While earlier subscriptions continue."""
    consumer.consume(topic, "one", Seen(), group="first")
    consumer.consume(topic, "one", Seen(), group="second")
    with unhurried(url) as other:
        other.consume(topic, "one", Seen(), group="second")
        with pytest.raises(Fenced):
            consumer.wait(20)
    assert len(group(url, topic, "first")["members"]) == 1


def test_expired_consumer_joins_again(url, topic, consumer):
    """The bus has dropped the member, so it joins again with a new epoch."""
    seen = Seen()
    consumer.consume(topic, "one", seen)
    produce(url, topic, ("k", b"1"))
    until(lambda: acked(url, topic) == 1, "the first")
    with fdq_bus(url) as bus:
        bus.act("group.rm", topic=topic, group="default", force=True)
    until(lambda: len(seen) >= 2, "it comes again")
    assert seen[1].message == b"1"
    until(lambda: spread(url, topic) == [16], "it is a member")


def test_consumer_continues_after_a_reset(url, topic, consumer):
    seen = Seen()
    consumer.consume(topic, "one", seen)
    produce(url, topic, ("k", b"1"), ("k", b"2"))
    until(lambda: acked(url, topic) == 2, "both")
    fdq.reset(url, topic, to="earliest", force=True)
    until(lambda: acked(url, topic) == 2 and len(seen) == 4, "both come again")
    assert seen.bodies == [b"1", b"2"] * 2
    assert seen[2].shard_epoch > seen[1].shard_epoch


def test_dropped_topic_ends_its_consumers(url, topic, consumer):
    produce(url, topic, ("k", b"1"))
    seen = Seen()
    consumer.consume(topic, "one", seen)
    until(lambda: seen, "the message")
    with fdq_bus(url) as bus:
        bus.act("topic.drop", topic=topic)
    with pytest.raises(DoesNotExist):
        consumer.wait(20)


def test_trimmed_failed_message_unblocks_its_key(url, topic, consumer):
    seen, trimmed = [], threading.Event()

    def handle(envelope):
        seen.append(envelope.message)
        if envelope.message == b"bad":
            if len(seen) > 1:
                trimmed.wait(20)
            raise ValueError

    produce(url, topic, ("k", b"bad"))
    consumer.consume(topic, "one", handle, max_deliver=3, first_backoff_s=0.01)
    until(lambda: len(seen) == 2, "it runs once more")
    with fdq_bus(url) as bus:
        ends = {str(one["shard"]): one["end"] for one in bus.act("bounds", topic=topic)["shards"]}
        bus.act("topic.trim", topic=topic, before=ends)
    produce(url, topic, ("k", b"next"))
    trimmed.set()
    until(lambda: seen[2:] == [b"next"], "its key goes on")
    until(lambda: acked(url, topic) == 1, "which is acked")
