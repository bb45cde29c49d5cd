"""FDQ's consumers against a bus in the process and one behind its port: runs, acks, ends."""

import os
import threading
from typing import Any

import pytest

from polybus import fdq
from polybus.errors import (
    DoesNotExist,
    Fenced,
    InvalidTopic,
    Stale,
    StoreClosed,
    TooLarge,
    UsageError,
)
from polybus.testing.nativebus import NativeBus
from polybus.testing.watch import until

QUICK: dict[str, Any] = {"first_backoff_s": 0.005, "last_backoff_s": 0.02}


@pytest.fixture(scope="module")
def native_url():
    with NativeBus() as bus:
        yield bus.url


@pytest.fixture(params=["memory", "native"])
def url(request):
    if request.param == "memory":
        # One that lives as long as the test, so that clients may come and go.
        with fdq.Producer("memory:consumers"):
            yield "memory:consumers"
    else:
        yield request.getfixturevalue("native_url")


@pytest.fixture
def topic(request):
    return f"{request.node.name}".replace("[", "-").replace("]", "").replace("_", "-")


@pytest.fixture
def consumer(url):
    with unhurried(url) as one:
        yield one


def unhurried(url):
    """One that is not taken for dead because the machine stood still."""
    return fdq.Consumer(url, heartbeat_s=0.5, dead_s=120.0)


def produce(url, topic, *messages, headers=None):
    with fdq.Producer(url) as producer:
        requests = [fdq.MessageRequest(key, body, headers) for key, body in messages]
        return producer.produce_batch(topic, requests)


def numbered(count, keys=7):
    return [(f"key-{n % keys}", b"%d" % n) for n in range(count)]


def group(url, topic, name="default"):
    return next(one for one in fdq.stats(url, topic)["groups"] if one["group"] == name)


def acked(url, topic):
    return sum(shard["acked"] for shard in group(url, topic)["shards"])


def total(url, topic, what):
    return fdq.stats(url, topic)["all"][what]


class Seen(list):
    """A handler that keeps what it gets."""

    def __call__(self, envelope):
        self.append(envelope)

    @property
    def bodies(self):
        return [one.message for one in self]


def test_each_message_comes_once_in_order_per_key_and_is_acked(url, topic, consumer):
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


def test_an_envelope_knows_where_it_stands(url, topic, consumer):
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


def test_keyless_messages_come_too_and_a_missing_topic_is_made(url, topic, consumer):
    seen = Seen()
    consumer.consume(topic, "one", seen)
    produce(url, topic, (None, b"a"), ("", b"b"))
    until(lambda: len(seen) == 2, "both")
    assert {one.shard_key for one in seen} == {None, ""}


def test_latest_starts_behind_what_is_there(url, topic, consumer):
    produce(url, topic, ("k", b"old"))
    seen = Seen()
    consumer.consume(topic, "one", seen, start="latest")
    produce(url, topic, ("k", b"new"))
    until(lambda: seen, "the new one")
    consumer.close()
    assert seen.bodies == [b"new"]


# --- failures


def test_a_failure_holds_back_its_key_alone(url, topic, consumer):
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
def test_what_fails_too_often_is_a_dead_letter(url, topic, consumer, error):
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


def test_a_handler_that_hangs_has_failed_and_its_late_end_does_not_count(url, topic, consumer):
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


def test_executors_run_side_by_side_and_a_key_meets_the_same_one(url, topic, consumer):
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
    """A key for each executor."""
    import xxhash

    found = {}
    for n in range(1000):
        key = f"k{n}"
        found.setdefault((xxhash.xxh64_intdigest(key.encode()) >> 32) % count, key)
    return [found[n] for n in range(count)]


# --- ends


def test_close_lets_what_runs_finish_and_leaves_the_rest(url, topic):
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


def test_close_gives_up_what_hangs_though_too_much_else_does(url, topic, monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.executors.MAX_HUNG", 0)
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


def test_a_second_close_may_be_less_patient_than_the_first(url, topic):
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


def test_close_does_not_wait_longer_than_it_was_told(url, topic):
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


def test_a_newer_one_of_the_same_name_ends_the_older(url, topic, consumer):
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


def test_wait_tells_of_the_first_that_ends_by_an_error(url, topic, consumer):
    """Though what was asked for before it goes on."""
    consumer.consume(topic, "one", Seen(), group="first")
    consumer.consume(topic, "one", Seen(), group="second")
    with unhurried(url) as other:
        other.consume(topic, "one", Seen(), group="second")
        with pytest.raises(Fenced):
            consumer.wait(20)
    assert len(group(url, topic, "first")["members"]) == 1


def test_one_that_is_taken_for_dead_joins_again(url, topic, consumer):
    """The bus knows it no more; so it is somebody new, from the start."""
    seen = Seen()
    consumer.consume(topic, "one", seen)
    produce(url, topic, ("k", b"1"))
    until(lambda: acked(url, topic) == 1, "the first")
    with fdq_bus(url) as bus:
        bus.act("group.rm", topic=topic, group="default", force=True)
    until(lambda: len(seen) >= 2, "it comes again")
    assert seen[1].message == b"1"
    until(lambda: spread(url, topic) == [16], "it is a member")


def test_a_group_that_is_moved_goes_on_from_there(url, topic, consumer):
    seen = Seen()
    consumer.consume(topic, "one", seen)
    produce(url, topic, ("k", b"1"), ("k", b"2"))
    until(lambda: acked(url, topic) == 2, "both")
    fdq.reset(url, topic, to="earliest", force=True)
    until(lambda: acked(url, topic) == 2 and len(seen) == 4, "both come again")
    assert seen.bodies == [b"1", b"2"] * 2
    assert seen[2].shard_epoch > seen[1].shard_epoch


def test_a_topic_that_is_dropped_ends_who_consumes_it(url, topic, consumer):
    produce(url, topic, ("k", b"1"))
    seen = Seen()
    consumer.consume(topic, "one", seen)
    until(lambda: seen, "the message")
    with fdq_bus(url) as bus:
        bus.act("topic.drop", topic=topic)
    with pytest.raises(DoesNotExist):
        consumer.wait(20)


def fdq_bus(url):
    from contextlib import closing

    from polybus.dialects.fdq import bus as buses

    return closing(buses.connect(url))


def test_a_message_that_fails_and_is_trimmed_holds_its_key_no_longer(url, topic, consumer):
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


# --- groups


def test_two_consumers_share_the_shards_and_drain_before_they_hand_over(url, topic):
    """The first is in the middle of a message of every shard's key when the second comes."""
    running, overlaps, seen = set(), [], Seen()
    lock = threading.Lock()

    def handle(envelope):
        with lock:
            if envelope.shard_key in running:
                overlaps.append(envelope)
            running.add(envelope.shard_key)
        threading.Event().wait(0.002)
        with lock:
            running.discard(envelope.shard_key)
            seen(envelope)

    produce(url, topic, *numbered(1200, keys=40))
    settings: dict[str, Any] = {"executors": 4}
    with unhurried(url) as one, unhurried(url) as two:
        one.consume(topic, "one", handle, **settings)
        until(lambda: len(seen) > 100, "one is at work")
        two.consume(topic, "two", handle, **settings)
        until(lambda: spread(url, topic) == [8, 8], "shards are shared evenly")
        until(lambda: len(seen) >= 1200, "all is done")
    assert not overlaps
    numbers = [int(one.message) for one in seen]
    assert sorted(numbers) == list(range(1200)), "nothing is lost, and nothing comes twice"
    for key in {one.shard_key for one in seen}:
        mine = [int(one.message) for one in seen if one.shard_key == key]
        assert mine == sorted(mine)
    assert (acked(url, topic), total(url, topic, "emitted")) == (1200, 1200)


def spread(url, topic):
    return sorted(len(one["shards"]) for one in group(url, topic)["members"])


def test_groups_are_independent(url, topic, consumer):
    produce(url, topic, *numbered(20))
    one, two = Seen(), Seen()
    consumer.consume(topic, "same", one, group="first")
    consumer.consume(topic, "same", two, group="second")
    until(lambda: len(one) == len(two) == 20, "each gets all")


def test_more_shards_than_one_call_takes(url, topic, consumer):
    with fdq_bus(url) as bus:
        bus.act("topic.create", topic=topic, shards=300)
    produce(url, topic, *numbered(900, keys=900))
    seen = Seen()
    consumer.consume(topic, "one", seen)
    until(lambda: len(seen) == 900, "all")
    consumer.close()
    assert (acked(url, topic), total(url, topic, "emitted")) == (900, 900)


# --- batches


def test_batches_are_arrow_of_one_shard(url, topic, consumer):
    produce(url, topic, *numbered(3000, keys=50))
    batches = []
    consumer.consume(topic, "one", batches.append, batch=True)
    until(lambda: sum(one.num_rows for one in batches) >= 3000, "all rows")
    consumer.close()
    bodies = [int(body) for one in batches for body in one.column("body").to_pylist()]
    assert sorted(bodies) == list(range(3000))
    assert all(len(set(one.column("shard").to_pylist())) == 1 for one in batches)
    assert (acked(url, topic), total(url, topic, "emitted")) == (3000, 3000)


def test_a_batch_with_a_poisonous_message_costs_nobody_else(url, topic, consumer):
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


# --- transactions


def outputs(url, topic):
    return list(fdq.replay(url, topic)) if topic in names(url) else []


def names(url):
    with fdq_bus(url) as bus:
        return {one["topic"] for one in bus.act("topic.list")["topics"]}


def test_a_transaction_acks_and_produces_in_one_step(url, topic, consumer):
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


def test_an_exception_inside_aborts_all_and_the_run_has_failed(url, topic, consumer):
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


def test_what_fails_after_its_commit_is_done(url, topic, consumer):
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


def test_very_many_small_outputs_are_a_transaction_too(url, topic, consumer):
    count = 50_000  # together little, but not as JSON

    def handle(envelope):
        with envelope.transaction() as tx:
            for _ in range(count):
                tx.produce(f"{topic}.out", None, b"")

    produce(url, topic, ("k", b"x"))
    consumer.consume(topic, "one", handle)
    until(lambda: acked(url, topic) == 1, "it is committed")
    assert total(url, f"{topic}.out", "inserted") == count
    assert total(url, topic, "redelivered") == 0


def test_large_outputs_travel_as_stages(url, topic, consumer):
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


def test_a_transaction_that_is_used_wrongly_says_so(url, topic, consumer):
    problems = []

    def told(kind, action):
        with pytest.raises(kind) as caught:
            action()
        problems.append(caught.value)

    def handle(envelope):
        tx = envelope.transaction()
        told(UsageError, lambda: tx.produce("out", "k", b""))
        with tx:
            told(InvalidTopic, lambda: tx.produce("_hidden", "k", b""))
            told(TooLarge, lambda: tx.produce("out", "k" * 2000, b""))
            told(UsageError, lambda: tx.produce("out", "k", "text"))
        told(UsageError, tx.__enter__)
        told(UsageError, envelope.transaction().__enter__)

    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", handle, **QUICK)
    until(lambda: acked(url, topic) == 1, "the ack")
    assert len(problems) == 6


def test_a_transaction_after_its_run_is_refused(url, topic, consumer):
    seen = Seen()
    produce(url, topic, ("k", b""))
    consumer.consume(topic, "one", seen)
    until(lambda: acked(url, topic) == 1, "the ack")
    with pytest.raises(Stale), seen[0].transaction() as tx:
        tx.produce(f"{topic}.out", "k", b"")
    assert not outputs(url, f"{topic}.out")


def test_a_run_that_was_given_up_cannot_commit(url, topic, consumer):
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
    until(lambda: refused, "the first one is told")
    assert [type(one).__name__ for one in refused] == ["Stale"]
    assert [one.message for one in outputs(url, f"{topic}.out")] == [b"2"]


# --- bad input


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
def test_terms_that_cannot_be_are_refused_at_once(url, topic, consumer, settings):
    with pytest.raises(UsageError):
        consumer.consume(topic, "one", print, **settings)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of forks with threads
def test_a_child_of_a_fork_has_no_consumer():
    with fdq.Consumer("memory:forked") as consumer:
        consumer.consume("t", "one", print)
        child = os.fork()
        if not child:
            code = 1
            try:
                consumer.close()  # does nothing, and does not hang
                consumer.consume("t", "two", print)
            except StoreClosed:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0


def test_calls_that_cannot_be(url, topic, consumer):
    with pytest.raises(UsageError):
        consumer.consume(topic, "one", None)
    with pytest.raises(UsageError):
        consumer.consume(topic, "", print)
    with pytest.raises(DoesNotExist):
        consumer.consume(topic, "one", print, create=False)
    with pytest.raises(InvalidTopic):
        consumer.consume("_no", "one", print)
    with fdq.Consumer(url, heartbeat_s=3, dead_s=2) as other, pytest.raises(UsageError):
        other.consume(topic, "one", print)
    consumer.close()
    with pytest.raises(UsageError, match="closed"):
        consumer.consume(topic, "one", print)
