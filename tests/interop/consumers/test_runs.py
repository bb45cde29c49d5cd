"""Deliveries: every message in key order, again after a failure, and in batches."""

import os
import threading

import pytest
import xxhash

from polybus import fdq
from polybus.dialects.fdq.client.fetcher import FetchWindow
from polybus.errors import DoesNotExist, InvalidTopic, StoreClosed, UsageError
from tests.interop.consumers.consumer_fixture import (
    QUICK,
    Seen,
    acked,
    numbered,
    produce,
    total,
    unhurried,
)
from tests.rig.observer import until


def test_each_message_is_delivered_once_in_key_order_and_acked(url, topic, consumer):
    produce(url, topic, *numbered(500))
    seen = Seen()
    consumer.consume(topic, "one", seen)
    until(lambda: len(seen) >= 500, "all messages")
    produce(url, topic, ("key-0", b"500"))
    until(lambda: len(seen) >= 501, "what came later")
    consumer.close()
    assert sorted(map(int, seen.bodies)) == list(range(501))
    for key in {one.shard_key for one in seen}:
        numbers = [int(one.message) for one in seen if one.shard_key == key]
        assert numbers == sorted(numbers)
    assert acked(url, topic) == 501
    assert (total(url, topic, "emitted"), total(url, topic, "redelivered")) == (501, 0)


def test_envelope_has_its_position(url, topic, consumer):
    produce(url, topic, ("é", b"body"), headers={"h": b"v"})
    seen = Seen()
    consumer.consume(topic, "one", seen)
    until(lambda: seen, "the message")
    one = seen[0]
    assert (one.topic, one.shard_key, one.message) == (topic, "é", b"body")
    assert (one.id, one.offset, one.delivery, one.executor_index) == (1, 0, 1, 0)
    assert one.shard == one.shard_index == 0x17D757DFB8B46F78 % 16
    assert one.headers == {"h": b"v"}
    assert one.shard_epoch > 0
    assert one.timestamp_ns // 10**6 >= one.insertion_time > 0


def test_messages_without_a_key_and_topic_creation(url, topic, consumer):
    seen = Seen()
    consumer.consume(topic, "one", seen)
    produce(url, topic, (None, b"a"), ("", b"b"))
    until(lambda: len(seen) == 2, "both")
    assert {one.shard_key for one in seen} == {None, ""}


def test_latest_starts_after_existing_messages(url, topic, consumer):
    produce(url, topic, ("k", b"old"))
    seen = Seen()
    consumer.consume(topic, "one", seen, start="latest")
    produce(url, topic, ("k", b"new"))
    until(lambda: seen, "the new one")
    consumer.close()
    assert seen.bodies == [b"new"]


# --- failures


def test_failure_blocks_only_its_key(url, topic, consumer):
    release = threading.Event()
    order = []

    def handle(envelope):
        if envelope.message == b"bad" and not release.is_set():
            raise ValueError("not yet")
        order.append((envelope.message, envelope.delivery))

    produce(url, topic, ("a", b"bad"), ("b", b"1"), ("a", b"after"), ("b", b"2"))
    consumer.consume(topic, "one", handle, max_deliver=1000, **QUICK)
    until(lambda: len(order) == 2, "the other key goes on")
    assert [body for body, _ in order] == [b"1", b"2"]
    until(lambda: total(url, topic, "redelivered") > 2, "it is tried again")
    release.set()
    until(lambda: len(order) == 4, "its key goes on")
    assert [body for body, _ in order[2:]] == [b"bad", b"after"]
    assert order[2][1] > 2
    consumer.close()
    assert acked(url, topic) == 4


@pytest.mark.parametrize("error", [ValueError("broken\nhere"), SystemExit(3), KeyboardInterrupt()])
def test_message_that_fails_too_often_becomes_a_dead_letter(url, topic, consumer, error):
    seen, runs = Seen(), []

    def handle(envelope):
        runs.append(envelope.delivery)
        if envelope.message == b"poison":
            raise error
        seen(envelope)

    produce(url, topic, ("a", b"poison"), ("a", b"good"), headers={"kept": b"yes"})
    consumer.consume(topic, "one", handle, max_deliver=3, **QUICK)
    until(lambda: seen, "the key goes on")
    consumer.close()
    assert runs == [1, 2, 3, 1]
    letters = list(fdq.replay(url, f"{topic}.dlq"))
    assert [(one.shard_key, one.message) for one in letters] == [("a", b"poison")]
    headers = letters[0].headers
    assert headers["kept"] == b"yes"
    assert headers["polybus.topic"] == topic.encode()
    assert headers["polybus.group"] == b"default"
    assert headers["polybus.deliveries"] == b"3"
    assert headers["polybus.reason"].startswith(type(error).__name__.encode())
    assert (acked(url, topic), total(url, topic, "dead_lettered")) == (2, 1)
    assert (total(url, topic, "emitted"), total(url, topic, "redelivered")) == (4, 2)


def test_hung_handler_fails_and_its_late_end_does_not_count(url, topic, consumer):
    hangs, threads, late = threading.Event(), [], []

    def handle(envelope):
        threads.append((threading.get_ident(), envelope.delivery))
        if envelope.delivery == 1:
            hangs.wait()
            late.append(envelope)

    produce(url, topic, ("a", b"slow"), ("a", b"next"))
    consumer.consume(topic, "one", handle, handler_timeout_s=0.3, **QUICK)
    until(lambda: len(threads) == 3, "it comes again, and the next one")
    hangs.set()
    until(lambda: len(late) == 2, "the late ones end")
    consumer.close()
    (first, one), (second, two) = threads[:2]
    assert (one, two) == (1, 2)
    assert first != second
    assert acked(url, topic) == 2
    assert total(url, topic, "emitted") == 3


# --- executors


def test_executors_run_concurrently_and_a_key_keeps_its_executor(url, topic, consumer):
    executors = 4
    together = threading.Barrier(executors)
    seen = Seen()

    def handle(envelope):
        if envelope.message == b"first":
            together.wait(20)
        seen(envelope)

    keys = keys_by_executor(executors)
    produce(url, topic, *((key, b"first") for key in keys))
    produce(url, topic, *((key, b"%d" % n) for n in range(50) for key in keys))
    produce(url, topic, *((None, b"") for _ in range(20)))
    consumer.consume(topic, "one", handle, executors=executors)
    until(lambda: len(seen) == 51 * executors + 20, "all")
    consumer.close()
    for key in keys:
        mine = [one for one in seen if one.shard_key == key]
        assert len({one.executor_index for one in mine}) == 1
        assert [one.message for one in mine] == [b"first", *(b"%d" % n for n in range(50))]
    assert {one.executor_index for one in seen} == set(range(executors))
    assert acked(url, topic) == total(url, topic, "inserted")


def keys_by_executor(count):
    """Return a key for each executor."""
    import xxhash

    found = {}
    for n in range(1000):
        key = f"k{n}"
        found.setdefault((xxhash.xxh64_intdigest(key.encode()) >> 32) % count, key)
    return [found[n] for n in range(count)]


# --- batches


def test_batches_are_arrow_rows_of_one_shard(url, topic, consumer):
    produce(url, topic, *numbered(3000, keys=50))
    batches = []
    consumer.consume(topic, "one", batches.append, batch=True)
    until(lambda: sum(one.num_rows for one in batches) >= 3000, "all rows")
    consumer.close()
    bodies = [int(body) for one in batches for body in one.column("body").to_pylist()]
    assert sorted(bodies) == list(range(3000))
    assert all(len(set(one.column("shard").to_pylist())) == 1 for one in batches)
    assert (acked(url, topic), total(url, topic, "emitted")) == (3000, 3000)


def test_failing_message_of_a_batch_does_not_kill_the_others(url, topic, consumer):
    sizes, done = [], []

    def handle(batch):
        bodies = batch.column("body").to_pylist()
        sizes.append(len(bodies))
        if b"3" in bodies:
            raise ValueError("poison")
        done.extend(bodies)

    produce(url, topic, *(("k", b"%d" % n) for n in range(6)))
    consumer.consume(topic, "one", handle, batch=True, max_deliver=3, **QUICK)
    until(lambda: len(done) == 5, "the others")
    consumer.close()
    assert done == [b"0", b"1", b"2", b"4", b"5"]
    assert sizes[:2] == [6, 6]
    assert set(sizes[2:]) == {1}
    assert [one.message for one in fdq.replay(url, f"{topic}.dlq")] == [b"3"]
    assert (acked(url, topic), total(url, topic, "emitted")) == (6, 18)


def test_dead_letters_of_a_batch_need_few_commits(url, topic, consumer):
    """Messages of one commit have one timestamp."""

    def handle(batch):
        raise ValueError("down")

    produce(url, topic, *(("k", b"%d" % n) for n in range(1000)))
    consumer.consume(topic, "one", handle, batch=True, max_deliver=2, **QUICK)
    until(lambda: acked(url, topic) == 1000, "all are dead letters")
    letters = list(fdq.replay(url, f"{topic}.dlq"))
    assert [one.message for one in letters] == [b"%d" % n for n in range(1000)]
    commits = len({one.timestamp_ns for one in letters})
    assert commits <= 100, f"{commits} commits for 1000 dead letters"
    assert (total(url, topic, "emitted"), total(url, topic, "dead_lettered")) == (2000, 1000)


@pytest.mark.parametrize("ends", ["released", "closed"])
def test_success_after_a_dead_letter_is_acked_before_its_shard_moves(url, topic, consumer, ends):
    may_end, handled = threading.Event(), []

    def handle(batch):
        bodies = batch.column("body").to_pylist()
        if bodies[0] == b"bad":
            raise ValueError("poison")
        handled.extend(bodies)
        may_end.wait(60)

    keys = one_key_per_shard(16)
    produce(url, topic, *((key, body) for key in keys for body in (b"bad", key.encode())))
    consumer.consume(topic, "one", handle, batch=True, executors=16, max_deliver=2, **QUICK)
    until(lambda: len(handled) == 16, "the good message of every shard")
    with unhurried(url) as other:
        (subscription,) = consumer._subscriptions
        if ends == "released":
            other.consume(topic, "two", handle, batch=True)
            shards = subscription._shards.all
            until(lambda: sum(shard.is_releasing for shard in shards()) == 8, "half must move")
            may_end.set()
        else:
            closing = threading.Thread(target=consumer.close)
            closing.start()
            until(lambda: subscription._stopping.is_set(), "it is closing")
            may_end.set()
            closing.join(60)
            other.consume(topic, "two", handle, batch=True)
        until(lambda: acked(url, topic) == 32, "all messages")
    assert sorted(handled) == sorted(key.encode() for key in keys), "a finished run was repeated"
    assert total(url, topic, "dead_lettered") == 16


def one_key_per_shard(count):
    keys = {}
    for n in range(1000):
        keys.setdefault(xxhash.xxh64_intdigest(b"k%d" % n) % count, f"k{n}")
    return [keys[n] for n in range(count)]


# --- invalid input


def test_slow_handler_does_not_block_other_executors(url, topic, consumer, monkeypatch):
    """Although more messages follow it than the fetch buffer has room for."""
    monkeypatch.setattr("polybus.dialects.fdq.client.acker.SLOW_S", 0.05)
    monkeypatch.setattr(
        "polybus.dialects.fdq.client.consumer.create_window", lambda _: FetchWindow(16, 16)
    )
    may_end, seen, messages = threading.Event(), Seen(), numbered(400, keys=40)

    def lane(key):
        return (xxhash.xxh64_intdigest(key.encode()) >> 32) % 2

    def handle(envelope):
        if envelope.message == b"0":
            may_end.wait(60)
        seen(envelope)

    produce(url, topic, *messages)
    consumer.consume(topic, "one", handle, executors=2)
    others = {body for key, body in messages if lane(key) != lane("key-0")}
    until(lambda: others <= set(seen.bodies), "those of the other executor")
    may_end.set()
    until(lambda: acked(url, topic) == 400, "all")
    assert len(seen) == 400


@pytest.mark.parametrize(
    "settings",
    [
        {"executors": 0},
        {"executors": 1000},
        {"max_deliver": 0},
        {"handler_timeout_s": 0},
        {"start": "middle"},
        {"first_backoff_s": -1},
        {"group": ""},
        {"group": "x" * 2000},
    ],
)
def test_invalid_consume_options_are_refused(url, topic, consumer, settings):
    with pytest.raises(UsageError):
        consumer.consume(topic, "one", print, **settings)


@pytest.mark.filterwarnings(
    "ignore:This process:DeprecationWarning"
)  # warns about forks with threads
def test_forked_child_has_no_consumer():
    with fdq.Consumer("memory:forked") as consumer:
        consumer.consume("t", "one", print)
        child = os.fork()
        if not child:
            code = 1
            try:
                consumer.close()  # does nothing and does not block
                consumer.consume("t", "two", print)
            except StoreClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_invalid_calls_are_refused(url, topic, consumer):
    with pytest.raises(UsageError):
        consumer.consume(topic, "one", None)
    with pytest.raises(UsageError):
        consumer.consume(topic, "", print)
    with pytest.raises(DoesNotExist):
        consumer.consume(topic, "one", print, create=False)
    with pytest.raises(InvalidTopic):
        consumer.consume("_no", "one", print)
    with pytest.raises(InvalidTopic, match=r"leave room for \.dlq"):
        consumer.consume("x" * 252, "one", print)
    with fdq.Consumer(url, heartbeat_s=3, dead_s=2) as other, pytest.raises(UsageError):
        other.consume(topic, "one", print)
    consumer.close()
    with pytest.raises(UsageError, match="closed"):
        consumer.consume(topic, "one", print)
