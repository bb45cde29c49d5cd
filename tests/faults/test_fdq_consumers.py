"""Consumers under single faults of the bus and of their own processes."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest

from polybus import fdq
from polybus.native import ClientOptions
from tests.rig import warm_bus
from tests.rig.native_bus import NativeBus
from tests.rig.observer import until

PATIENCE_S = 60
STILL_S = 15.0  # many times the longest pause between two acks, retries or heartbeats
QUICK: dict[str, Any] = {"heartbeat_s": 0.1, "dead_s": 1.0}
# Short client timeouts, so that the consumer itself must retry.
HASTY: dict[str, Any] = {
    "dead_s": 120.0,
    "options": ClientOptions(connect_timeout_s=0.1, last_backoff_s=0.05),
}
FAST: dict[str, Any] = {"first_backoff_s": 0.01, "last_backoff_s": 0.05}

CHILD = """
import os, sys, threading
from polybus import fdq
url, topic, name, max_deliver = sys.argv[1:]
def handle(envelope):
    print(envelope.message.decode(), envelope.delivery, flush=True)
    if envelope.message == b"killer":
        os._exit(9)
    if envelope.message == b"slow":
        threading.Event().wait()
consumer = fdq.Consumer(url, heartbeat_s=0.1, dead_s=0.5)
consumer.consume(topic, name, handle, max_deliver=int(max_deliver))
consumer.wait()
"""

BATCH_CHILD = """
import sys, threading
from polybus import fdq
consumer = fdq.Consumer(sys.argv[1], heartbeat_s=0.1, dead_s=0.5)
def handle(batch):
    bodies = batch.column("body").to_pylist()
    if len(bodies) > 1:
        raise ValueError("no")
    consumer._subscriptions[0]._send_heartbeat()  # the bus knows what is running
    print(bodies[0].decode(), flush=True)
    threading.Event().wait()
consumer.consume("t", "one", handle, batch=True, max_deliver=2, first_backoff_s=0)
consumer.wait()
"""


@pytest.fixture
def bus():
    with NativeBus() as running:
        yield running


def child(bus, topic, name, max_deliver=5):
    args = [sys.executable, "-c", CHILD, bus.url, topic, name, str(max_deliver)]
    return subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=bus.process.env)


def produce(url, topic, *messages):
    with fdq.Producer(url) as producer:
        producer.produce_batch(topic, [fdq.MessageRequest(*one) for one in messages])


def acked(url, topic):
    return fdq.stats(url, topic)["all"]["acked"]


def settled(read, wanted):
    """Return `read()` once it is `wanted`, or once it has not changed for `STILL_S`."""
    value, since_s = read(), time.monotonic()
    while value != wanted and time.monotonic() - since_s < STILL_S:
        time.sleep(0.05)
        now = read()
        if now != value:
            value, since_s = now, time.monotonic()
    return value


@pytest.mark.sabotage("acks-forgotten", expects=r"\d+ finished runs were not acked")
@pytest.mark.parametrize("ends", ["kill", "stop"])
def test_consumers_survive_a_restart_of_the_bus(bus, ends):
    """They keep their epochs and repeat no finished run."""
    seen, lock, go_on = [], threading.Lock(), threading.Event()

    def handle(envelope):
        with lock:
            seen.append((int(envelope.message), envelope.shard_epoch))
        if len(seen) == 200:
            go_on.wait()

    produce(bus.url, "t", *((f"k{n % 20}", b"%d" % n) for n in range(600)))
    with fdq.Consumer(bus.url, **HASTY) as one, fdq.Consumer(bus.url, **HASTY) as two:
        one.consume("t", "one", handle)
        two.consume("t", "two", handle)
        until(lambda: len(seen) >= 200, "they are at work")
        getattr(bus, ends)()
        go_on.set()
        with warm_bus.cold():  # the bus is away for longer than the client tries to connect
            bus.start()
        produce(bus.url, "t", *((f"k{n % 20}", b"%d" % n) for n in range(600, 700)))
        until(lambda: len({number for number, _ in seen}) == 700, "all messages are handled")
        missing = 700 - settled(lambda: acked(bus.url, "t"), 700)
        assert missing == 0, f"{missing} finished runs were not acked after the restart"
        members = fdq.stats(bus.url, "t")["groups"][0]["members"]
        assert sorted(one["epoch"] for one in members) == [1, 2]
    runs = Counter(number for number, _ in seen)
    assert set(runs) == set(range(700))
    assert max(runs.values()) == 1, "a finished run was repeated"
    stats = fdq.stats(bus.url, "t")["all"]
    assert (stats["emitted"], stats["redelivered"]) == (700, 0)


@pytest.mark.sabotage("counts-in-memory", expects=r"emitted is \d+ of 20 after the kill")
def test_counts_of_transactions_survive_a_kill_of_the_bus(bus):
    """A transaction acks its message itself, so that the consumer reports only the counts."""

    def handle(envelope):
        with envelope.transaction() as tx:
            tx.produce("out", envelope.shard_key, envelope.message)

    def emitted():
        return fdq.stats(bus.url, "t")["all"]["emitted"]

    produce(bus.url, "t", *((f"k{n}", b"%d" % n) for n in range(20)))
    with fdq.Consumer(bus.url, **HASTY) as consumer:
        consumer.consume("t", "one", handle)
        until(lambda: emitted() == 20, "the consumer has reported all runs")
        bus.kill()
        bus.start()
        # The bus shows a report before it is stored. The consumer repeats one without an answer.
        counted = settled(emitted, 20)
    assert counted == 20, f"emitted is {counted} of 20 after the kill"


@pytest.mark.sabotage("acks-forgotten", expects="the failed message was not retried")
def test_failures_survive_a_restart_of_the_bus(bus):
    deliveries, is_back = [], threading.Event()

    def handle(envelope):
        deliveries.append(envelope.delivery)
        if not is_back.is_set():
            raise ValueError("no")

    produce(bus.url, "t", ("k", b""))
    with fdq.Consumer(bus.url, **HASTY) as consumer:
        consumer.consume("t", "one", handle, max_deliver=10_000, **FAST)
        until(lambda: len(deliveries) > 3, "some runs")
        bus.kill()
        with warm_bus.cold():  # the bus is away for longer than the client tries to connect
            bus.start()
        is_back.set()
        assert settled(lambda: acked(bus.url, "t"), 1) == 1, (
            f"the failed message was not retried: {len(deliveries)} runs"
        )
    assert deliveries == list(range(1, len(deliveries) + 1)), "each failed run counts once"


@pytest.mark.sabotage("care-off", expects="it goes on killing")
def test_message_that_kills_its_consumers_becomes_a_dead_letter(bus):
    """Its first run is not reported; its later runs count."""
    produce(bus.url, "t", ("k", b"killer"), ("k", b"good"))
    deaths, words = 0, []
    while True:
        one = child(bus, "t", f"victim-{deaths}", max_deliver=3)
        try:
            line = one.stdout.readline()
            words.append(line.split())
            if line.startswith("good"):
                break
            assert one.wait(PATIENCE_S) == 9
            deaths += 1
            assert deaths <= 4, "it goes on killing"
        finally:
            one.kill()
            one.communicate()
    assert deaths >= 3
    numbers = [int(delivery) for body, delivery in words if body == "killer"]
    assert numbers == sorted(numbers)
    letters = list(fdq.replay(bus.url, "t.dlq"))
    assert [one.message for one in letters] == [b"killer"]
    assert b"died" in letters[0].headers["polybus.reason"]


@pytest.mark.sabotage("care-off", expects=r"assert 1 in \(2, 3\)")
def test_suspect_messages_run_guarded_and_do_not_count_as_failed(bus):
    """Only the message that ran when the consumer died may have failed."""
    produce(bus.url, "t", ("k", b"slow"), *(("k", b"%d" % n) for n in range(20)))
    one = child(bus, "t", "one")
    assert one.stdout.readline().split() == ["slow", "1"]
    one.send_signal(signal.SIGKILL)
    one.communicate()
    seen = []
    with fdq.Consumer(bus.url, **QUICK) as consumer:
        consumer.consume("t", "two", lambda envelope: seen.append(envelope))
        until(lambda: acked(bus.url, "t") == 21, "all is done")
    assert seen[0].delivery in (2, 3)  # 3 if its run was reported
    assert [one.delivery for one in seen[1:]] == [2] * 20
    stats = fdq.stats(bus.url, "t")["all"]
    assert (stats["dead_lettered"], stats["redelivered"]) == (0, 21)


@pytest.mark.sabotage("last-runs-together", expects=r"20 messages died with their neighbour")
def test_message_that_runs_for_the_last_time_dies_alone(bus):
    """The messages of a failed batch run alone, and only one of them runs when it is killed."""
    produce(bus.url, "t", ("k", b"slow"), *(("k", b"%d" % n) for n in range(20)))
    args = [sys.executable, "-c", BATCH_CHILD, bus.url]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=bus.process.env) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "slow\n"
        one.send_signal(signal.SIGKILL)
    bodies = []
    with fdq.Consumer(bus.url, **QUICK) as consumer:
        consumer.consume(
            "t",
            "two",
            lambda batch: bodies.extend(batch.column("body").to_pylist()),
            batch=True,
            max_deliver=2,
        )
        until(lambda: acked(bus.url, "t") == 21, "all is done")
    letters = [one.message for one in fdq.replay(bus.url, "t.dlq")]
    assert len(letters) == 1, f"{len(letters) - 1} messages died with their neighbour"
    assert letters == [b"slow"]
    assert bodies == [b"%d" % n for n in range(20)]


@pytest.mark.sabotage("rejoin-off", expects="the resumed consumer did not handle message 5")
def test_consumer_stopped_for_long_joins_again(bus):
    produce(bus.url, "t", *(("k", b"%d" % n) for n in range(5)))
    one = child(bus, "t", "one")
    until(lambda: acked(bus.url, "t") == 5, "the first messages are acked")
    one.send_signal(signal.SIGSTOP)
    members = lambda: fdq.stats(bus.url, "t")["groups"][0]["members"]  # noqa: E731
    until(lambda: not members(), "the bus declares the consumer dead")
    produce(bus.url, "t", ("k", b"5"))
    one.send_signal(signal.SIGCONT)
    settled(lambda: acked(bus.url, "t"), 6)
    epochs = [member["epoch"] for member in members()]
    one.kill()
    handled = one.communicate()[0].splitlines()
    assert handled[5:] == ["5 1"], "the resumed consumer did not handle message 5"
    assert handled[:5] == [f"{n} 1" for n in range(5)]
    assert epochs == [2]


def test_consumer_can_be_closed_while_reporting_to_an_unreachable_bus(bus, monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.client.acker.LEAVE_TRIES_S", 0.2)
    produce(bus.url, "t", *(("k", b"%d" % n) for n in range(3)))
    began, may_end, seen = threading.Event(), threading.Event(), []

    def handle(envelope):
        seen.append(envelope.offset)
        began.set()
        may_end.wait(PATIENCE_S)

    first, second = fdq.Consumer(bus.url, **HASTY), fdq.Consumer(bus.url, **HASTY)
    first.consume("t", "one", handle)
    assert began.wait(PATIENCE_S)
    began.clear()
    second.consume("t", "one", handle)  # takes over; the messages of the first are suspect
    assert began.wait(PATIENCE_S)
    bus.kill()
    may_end.set()
    (executor,) = second._subscriptions[0]._executors
    until(lambda: executor.queue.current is not None and executor.queue.current.offset == 1, "asks")
    closing = threading.Thread(target=second.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert seen == [0, 0]
    first.close()


def test_close_with_an_unreachable_bus_does_not_exceed_its_timeout(bus, monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.client.consumer.LEAVE_S", 0.2)
    patient = fdq.Consumer(bus.url, options=ClientOptions(connect_timeout_s=600.0))
    patient.consume("t", "one", print)
    bus.kill()
    closing = threading.Thread(target=patient.close, args=(0.1,), daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_consumer_logs_an_unreachable_bus(bus, caplog, monkeypatch):
    monkeypatch.setattr("polybus.dialects.fdq.client.acker.LEAVE_TRIES_S", 0.0)
    began, may_end = threading.Event(), threading.Event()

    def handle(_):
        began.set()
        may_end.wait(PATIENCE_S)

    produce(bus.url, "t", ("k", b""))
    with fdq.Consumer(bus.url, heartbeat_s=0.1, **HASTY) as consumer:
        consumer.consume("t", "one", handle)
        assert began.wait(PATIENCE_S)
        bus.kill()
        may_end.set()
        until(lambda: "one of t: heartbeat failed" in caplog.text, "its signs of life", PATIENCE_S)
        until(lambda: "one of t: acks are delayed" in caplog.text, "its acks", PATIENCE_S)
