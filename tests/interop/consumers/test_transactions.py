"""Transactions: ack and outputs are atomic."""

import threading

import pytest

from polybus import fdq
from polybus.errors import InvalidTopic, Stale, TooLarge, UsageError
from tests.interop.consumers.consumer_fixture import (
    QUICK,
    Seen,
    acked,
    fdq_bus,
    numbered,
    produce,
    total,
)
from tests.rig.observer import until


def outputs(url, topic):
    return list(fdq.replay(url, topic)) if topic in names(url) else []


def names(url):
    with fdq_bus(url) as bus:
        return {one["topic"] for one in bus.act("topic.list")["topics"]}


def test_transaction_acks_and_produces_atomically(url, topic, consumer):
    def handle(envelope):
        with envelope.transaction() as tx:
            tx.produce(f"{topic}.out", "k", envelope.message + b"!", {"h": b"v"})
            tx.produce(f"{topic}.other", None, b"second")
        assert not tx.is_duplicate

    produce(url, topic, *numbered(30))
    consumer.consume(topic, "one", handle)
    until(lambda: acked(url, topic) == 30, "all are acked")
    consumer.close()
    found = outputs(url, f"{topic}.out")
    assert sorted(int(one.message[:-1]) for one in found) == list(range(30))
    assert (found[0].shard_key, found[0].headers) == ("k", {"h": b"v"})
    assert len(outputs(url, f"{topic}.other")) == 30
    assert total(url, topic, "emitted") == 30


def test_exception_aborts_the_transaction_and_fails_the_run(url, topic, consumer):
    def handle(envelope):
        with envelope.transaction() as tx:
            tx.produce(f"{topic}.out", "k", b"%d" % envelope.delivery)
            if envelope.delivery < 3:
                raise RuntimeError("abort")

    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", handle, **QUICK)
    until(lambda: acked(url, topic) == 1, "the third run")
    consumer.close()
    assert [one.message for one in outputs(url, f"{topic}.out")] == [b"3"]


def test_run_that_fails_after_its_commit_is_done(url, topic, consumer):
    runs = []

    def handle(envelope):
        runs.append(envelope.delivery)
        with envelope.transaction() as tx:
            tx.produce(f"{topic}.out", "k", b"")
        raise RuntimeError("too late")

    produce(url, topic, ("k", b""), ("k", b""))
    consumer.consume(topic, "one", handle, **QUICK)
    until(lambda: len(runs) == 2, "both")
    consumer.close()
    assert (runs, acked(url, topic), len(outputs(url, f"{topic}.out"))) == ([1, 1], 2, 2)


def test_transaction_with_many_small_outputs(url, topic, consumer):
    count = 50_000  # small in total, but large as JSON

    def handle(envelope):
        with envelope.transaction() as tx:
            for _ in range(count):
                tx.produce(f"{topic}.out", None, b"")

    produce(url, topic, ("k", b"x"))
    consumer.consume(topic, "one", handle)
    until(lambda: acked(url, topic) == 1, "it is committed")
    assert total(url, f"{topic}.out", "inserted") == count
    assert total(url, topic, "redelivered") == 0


def test_large_outputs_are_staged(url, topic, consumer):
    size = 700_000

    def handle(envelope):
        with envelope.transaction() as tx:
            for n in range(4):
                tx.produce(f"{topic}.out", "k", b"%d" % n + bytes(size), {"n": b"%d" % n})
            tx.produce(f"{topic}.small", "k", b"s")

    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", handle)
    until(lambda: acked(url, topic) == 1, "the ack")
    found = outputs(url, f"{topic}.out")
    assert [(one.message[:1], one.headers) for one in found] == [
        (b"%d" % n, {"n": b"%d" % n}) for n in range(4)
    ]
    assert len(outputs(url, f"{topic}.small")) == 1


def test_misuse_of_a_transaction_is_refused(url, topic, consumer):
    problems = []

    def check_error(kind, action):
        with pytest.raises(kind) as caught:
            action()
        problems.append(caught.value)

    def handle(envelope):
        tx = envelope.transaction()
        check_error(UsageError, lambda: tx.produce("out", "k", b""))
        with tx:
            check_error(InvalidTopic, lambda: tx.produce("_hidden", "k", b""))
            check_error(InvalidTopic, lambda: tx.produce(None, "k", b""))
            check_error(TooLarge, lambda: tx.produce("out", "k" * 2000, b""))
            check_error(UsageError, lambda: tx.produce("out", "k", "text"))
        check_error(UsageError, tx.__enter__)
        check_error(UsageError, envelope.transaction().__enter__)

    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", handle, **QUICK)
    until(lambda: acked(url, topic) == 1, "the ack")
    assert len(problems) == 7


def test_transaction_after_its_run_is_refused(url, topic, consumer):
    seen = Seen()
    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", seen)
    until(lambda: acked(url, topic) == 1, "the ack")
    with pytest.raises(Stale), seen[0].transaction() as tx:
        tx.produce(f"{topic}.out", "k", b"")
    assert not outputs(url, f"{topic}.out")


def test_abandoned_run_cannot_commit(url, topic, consumer):
    hangs, refused = threading.Event(), []

    def handle(envelope):
        with envelope.transaction() as tx:
            tx.produce(f"{topic}.out", "k", b"%d" % envelope.delivery)
            if envelope.delivery == 1:
                hangs.wait()

    def watched(envelope):
        try:
            handle(envelope)
        except Exception as error:
            refused.append(error)
            raise

    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", watched, handler_timeout_s=0.2, **QUICK)
    until(lambda: acked(url, topic) == 1, "its second run")
    hangs.set()
    until(lambda: refused, "the first one is refused")
    assert [type(one).__name__ for one in refused] == ["Stale"]
    assert [one.message for one in outputs(url, f"{topic}.out")] == [b"2"]
